"""Measure an example on a GPU with random weights of the published sizes: without the library, and restored.

    python examples/full_size.py speech --work /tmp/speech
    LENGTHS=128,512 BATCHES=1,32 python examples/full_size.py embeddings --work /tmp/embeddings
    VIDEOS=1280x704x121 python examples/full_size.py video/wan --work /tmp/wan
    VIDEOS=64x64x9 python examples/full_size.py video/ltx --work /tmp/tiny --tiny    # as a trial, also on a CPU

Each boot is a process of its own that prints a JSON line: `off` has COMPILE_CACHE_SCOPE=off, `first` compiles before
READY and fills the store, `second` restores.

- `speech` hears 30 s of noise, which is 445 tokens, in turn with transformers without the example's code, and compares
  the logits of both with fp32's.
- `embeddings` embeds 256 seeded texts of 3 to 512 tokens in one request, which makes batches of 32, and 64 of them in a
  request each, in turn with sentence-transformers, if it is installed.
- `edit` also edits pictures of all `SIZES`, with three lengths of a prompt.
- `edit`, `flux-lora` and `video` time the first request, and a step as the difference of requests of two and of six
  steps. A video is decoded in its first request only, and never encoded.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The function in tiny_models.py that writes an example's model.
MODELS = {"speech": "whisper", "embeddings": "modernbert", "edit": "kontext", "flux-lora": "flux"}
MODELS |= {"edit/qwen": "qwen_edit", "video/ltx": "ltx", "video/wan": "wan"}
_TEXTS, _SINGLE = 256, 64
_FEW, _MORE = 2, 6


def write(example: str, folder: Path, is_tiny: bool) -> None:
    """The tiny model of an example, with its published widths and depth."""
    import torch

    import tiny_models

    model = MODELS[example]
    sizes = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["flux" if model == "kontext" else model]
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    if example == "embeddings":
        tiny_models._SIZES.update({} if is_tiny else sizes)
    if example == "edit/qwen" and not is_tiny:
        tiny_models._SEEN_PIXELS.update(max_pixels=12845056)
    tiny_models.MODELS[model](folder)
    if not is_tiny and example != "embeddings":
        for part, changes in sizes.items():
            enlarge(folder / part, **changes)


def enlarge(folder: Path, dtype: str = "bfloat16", **sizes: Any) -> None:
    """Write a network again, with other sizes. Its weights are made on the GPU."""
    import diffusers
    import torch
    import transformers

    config = json.loads((folder / "config.json").read_text())
    for name, value in sizes.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    kind = config.get("_class_name") or config["architectures"][0]
    generation = folder / "generation_config.json"
    kept = json.loads(generation.read_text()) if generation.exists() else None
    is_diffusers = "_class_name" in config
    made = getattr(diffusers if is_diffusers else transformers, kind)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda"):
        network = made.from_config(config) if is_diffusers else made(made.config_class(**{**config, "dtype": dtype}))
    for tiny in folder.glob("*.safetensors"):
        tiny.unlink()
    network.save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    if kept is not None:
        longest = {"max_length": sizes["max_target_positions"]} if "max_target_positions" in sizes else {}
        generation.write_text(json.dumps({**kept, **longest}))


def timed(times: int, **works: Callable[[], Any]) -> dict[str, float]:
    """The median seconds of each. They take turns."""
    import torch

    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(times):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return {name: median(found) for name, found in seconds.items()}


def speech(predictor: Any, times: int) -> dict[str, Any]:
    """Seconds for 30 s of noise, whatever the random model would say; those of transformers alone beside them. The
    errors are those of the logits against fp32: all hear the same tokens."""
    import numpy
    import torch

    model = predictor.model
    sound = numpy.random.default_rng(0).standard_normal(30 * 16000).astype("f4")
    features = predictor.processor(sound, sampling_rate=16000, return_tensors="pt").input_features
    features = features.to(model.device, model.dtype)
    # Neither an end nor a time, which would begin another pass.
    known = model.generation_config
    never = [known.eos_token_id, *range(known.no_timestamps_token_id + 1, model.config.vocab_size)]
    said = {"suppress_tokens": never, "return_timestamps": True, "task": "transcribe", "language": "en"}

    def ours(**options: Any) -> Any:
        with predictor.boot.prediction() as prediction:
            heard = model.generate(features, **said, **options, cache_implementation="static", disable_compile=True)
        for name, value in prediction.metrics().items():
            predictor.record_metric(name, value)
        return heard

    def load(dtype: torch.dtype) -> Any:
        return type(model).from_pretrained(os.environ["MODEL"], dtype=dtype).to(model.device).eval()

    def logits_of(one: Any, hear: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
        kept: list[torch.Tensor] = []
        hook = one.proj_out.register_forward_hook(lambda _module, _inputs, logits: kept.append(logits[:, -1:].float()))
        heard = hear()
        hook.remove()
        return heard, torch.cat(kept, 1)

    plain, prefixes = load(model.dtype), list[torch.Tensor]()
    tokens, their_logits = logits_of(plain, lambda: plain.generate(features, **said))

    def force(prefix: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        prefixes.append(prefix)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, len(prefixes) - 1, None], 0.0)

    _, our_logits = logits_of(model, lambda: ours(logits_processor=[force]))
    with torch.inference_mode():
        exact = load(torch.float32)(features.float(), decoder_input_ids=prefixes[-1]).logits
    found: dict[str, Any] = {"tokens": tokens.shape[-1]}
    exact = exact[:, -tokens.shape[-1] :]
    for name, logits in {"error": our_logits, "their_error": their_logits}.items():
        found[name] = float((logits - exact).norm() / exact.norm())
    return found | timed(times, seconds=ours, theirs=lambda: plain.generate(features, **said))


def embeddings(predictor: Any, times: int) -> dict[str, Any]:
    """Seconds for the same texts, one a request and all in one; those of sentence-transformers beside them."""
    import numpy

    texts = ["x" * int(length) for length in numpy.random.default_rng(0).integers(1, 511, _TEXTS)]
    vectors = numpy.stack([numpy.frombuffer(base64.b64decode(vector), "<f4") for vector in predictor.run(texts)])
    works: dict[str, Callable[[], Any]] = {
        "seconds_1": lambda: [predictor.run([text]) for text in texts[:_SINGLE]],
        "seconds_32": lambda: predictor.run(texts),
    }
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return timed(times, **works)
    config = predictor.model.config
    kind = {"dtype": predictor.model.dtype, "attn_implementation": config._attn_implementation}
    model = SentenceTransformer(os.environ["MODEL"], model_kwargs=kind, device=str(predictor.model.device))
    works["theirs_1"] = lambda: [model.encode([text]) for text in texts[:_SINGLE]]
    works["theirs_32"] = lambda: model.encode(texts, batch_size=32)
    apart = float(abs(model.encode(texts, batch_size=32) - vectors).max())
    return {"apart": apart, **timed(times, **works)}


def edit(predictor: Any, times: int) -> dict[str, Any]:
    """An edit of a picture, of four steps. Then pictures of all `SIZES`, with three lengths of a prompt each: how many
    were precompiled."""
    from PIL import Image

    predict: Any = sys.modules["predict"]
    picture = Path(os.environ["MODEL"]).with_name("picture.png")
    Image.effect_noise((640, 640), 64).save(picture)

    def ask(count: int) -> None:
        predictor.run(picture, "make it blue", count, 0)

    found: dict[str, Any] = timed(1, request_s=lambda: ask(4)) | step_seconds(ask, times)
    kept, served = predictor.record_metric, list[set[str]]()
    for size in predict.SIZES:
        Image.effect_noise(size, 64).save(picture)
        for words in (3, 63, 250):
            metrics: dict[str, Any] = {}
            predictor.record_metric = metrics.__setitem__
            predictor.run(picture, " ".join(["boat"] * words), _FEW, 0)
            served.append({*metrics["compile_cache.served"].values()})
    predictor.record_metric = kept
    return found | {"edits": len(served), "precompiled": served.count({"precompiled"})}


def flux_lora(predictor: Any, times: int) -> dict[str, Any]:
    """A square picture of 28 steps, without a LoRA."""

    def ask(count: int) -> None:
        predictor.predict("a lighthouse", None, 1.0, "1:1", count, 3.5, 0)

    return timed(1, request_s=lambda: ask(28)) | step_seconds(ask, times)


def video(predictor: Any, times: int) -> dict[str, Any]:
    """A video of the first size, from text, with guidance, of four steps."""
    predict: Any = sys.modules["predict"]
    predict.write_mp4 = lambda *_: None
    text = {"prompt": "an otter swims", "negative_prompt": ""}
    size = dict.fromkeys(("width", "height", "num_frames"))

    def whole() -> None:
        predictor.run(**text, **size, image=None, num_inference_steps=4, guidance_scale=5.0, crf=18, seed=0)

    def ask(count: int) -> None:
        rest = {"num_inference_steps": count, "output_type": "latent", "generator": predictor.noise.manual_seed(0)}
        with predictor.boot.prediction():
            predictor.draw(predict.VIDEOS[0], None, 5.0, **text, **rest)

    return timed(1, request_s=whole) | step_seconds(ask, times)


def step_seconds(ask: Callable[[int], None], times: int) -> dict[str, float]:
    """Seconds of a step."""
    found = timed(times, few=lambda: ask(_FEW), more=lambda: ask(_MORE))
    return {"step_s": (found["more"] - found["few"]) / (_MORE - _FEW)}


WORK: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "speech": speech,
    "embeddings": embeddings,
    "edit": edit,
    "flux-lora": flux_lora,
    "video": video,
}


def measure(example: str, times: int, is_exact: bool) -> dict[str, Any]:
    """One boot in this process, as Cog's worker makes it, and what it serves."""
    began = time.perf_counter()
    sys.path[:0] = [str(ROOT / "examples" / example), str(ROOT)]
    if example in ("speech", "video"):
        sys.modules["av"] = types.ModuleType("av")  # nothing is decoded or encoded
    from predict import Predictor  # the example's

    sys.modules.pop("av", None)

    if is_exact:
        import torch
        from transformers import AutoModel

        load = AutoModel.from_pretrained
        AutoModel.from_pretrained = lambda *args, **options: load(*args, **{**options, "dtype": torch.float32})
    predictor = Predictor()
    metrics: dict[str, Any] = {}
    predictor.record_metric = metrics.setdefault  # those of the first request
    predictor.setup()
    metrics.clear()  # the warm-up's
    import torch

    found = {"ready_s": time.perf_counter() - began, "ready_gb": peak_gb()}
    if times:
        found |= WORK[example](predictor, times)
        found["request_gb"] = peak_gb()
        found |= {name: metrics[f"compile_cache.{name}"] for name in ("served", "compiled_now")}
    predictor.boot.wait_published(120.0)
    return found


def peak_gb() -> float | None:
    """The GPU memory that was taken at most since the last time that this was asked."""
    import torch

    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_allocated() / 1e9
    torch.cuda.reset_peak_memory_stats()
    return peak


def main() -> None:
    """Write the model, and boot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=MODELS)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--fp32", action="store_true", help="the embeddings' weights in fp32")
    parser.add_argument("--boots", default="off,first,second")
    parser.add_argument("--times", type=int, default=3, help="how often requests are measured; 0: only READY")
    parser.add_argument("--boot", help="this boot alone, in this process")
    args = parser.parse_args()
    if args.boot:
        found = measure(args.example.partition("/")[0], args.times, args.fp32)
        print(json.dumps({"example": args.example, "boot": args.boot, **found}), flush=True)
        return
    model = args.work.resolve() / "model"
    if not model.exists():
        write(args.example, model, args.tiny)
    for boot in args.boots.split(","):
        directory = model.with_name("directory")
        shutil.rmtree(directory, ignore_errors=True)
        environ = {**os.environ, "MODEL": str(model), "COMPILE_CACHE_COLD_START": "block"}
        environ |= {"COMPILE_CACHE_STORE": str(model.with_name("store")), "COMPILE_CACHE_DIR": str(directory)}
        environ |= {"COMPILE_CACHE_SCOPE": "off"} if boot == "off" else {}
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--boot", boot], env=environ, check=True)


if __name__ == "__main__":
    main()
