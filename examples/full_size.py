"""Measure an example on a GPU with random weights of the published shapes: without the library, and restored.

    python examples/full_size.py speech --work /tmp/speech
    python examples/full_size.py embeddings --work /tmp/embeddings
    python examples/full_size.py speech --work /tmp/tiny --tiny        # as a trial, also on a CPU

Each boot is a process of its own that prints a JSON line: `off` has COMPILE_CACHE_SCOPE=off, `first` compiles before
READY and fills the store, `second` restores. `speech` hears 30 s of noise, which is 444 tokens. `embeddings` embeds
seeded texts of 1 to 512 tokens in batches of 1 and of 32, and also asks sentence-transformers, if it is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BOOTS = ("off", "first", "second")
_TIMES = 2
_BASE = {"hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22, "num_attention_heads": 12}
_TOWERS = {"layers": 32, "attention_heads": 20}
_LARGE = {"d_model": 1280, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "max_target_positions": 448}
_LARGE |= {f"{side}_{name}": count for side in ("encoder", "decoder") for name, count in _TOWERS.items()}


def write(example: str, folder: Path, is_tiny: bool) -> None:
    """The model of an example, with its published widths and depth, but the tokens of the tiny one."""
    import torch
    import transformers

    import tiny_models

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    if example == "embeddings":
        if not is_tiny:
            tiny_models._SIZES.update(_BASE)
        tiny_models.modernbert(folder)
    else:
        tiny_models.whisper(folder)
        if not is_tiny:
            config = transformers.WhisperConfig.from_pretrained(folder)
            config.update(_LARGE)
            with torch.device("cuda"):
                model = transformers.WhisperForConditionalGeneration(config).half()
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
            model.generation_config.max_length = 448
            model.save_pretrained(folder)


def timed(work: Callable[[], Any]) -> float:
    """The median seconds of a few calls, after one that is not measured."""
    import torch

    seconds = []
    for _ in range(_TIMES + 1):
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def speech(predictor: Any) -> dict[str, Any]:
    """Seconds for 30 s of noise, whatever the random model would say."""
    import numpy
    import torch

    model = predictor.model
    sound = numpy.random.default_rng(0).standard_normal(30 * 16000).astype("f4")
    features = predictor.processor(sound, sampling_rate=16000, return_tensors="pt").input_features
    features = features.to(model.device, model.dtype)
    end = model.generation_config.eos_token_id
    options = {
        "cache_implementation": "static",
        "disable_compile": True,
        "suppress_tokens": [end],
    }

    def hear() -> Any:
        with predictor.boot.prediction(), torch.inference_mode():
            return model.generate(features, **options, task="transcribe", language="en", return_timestamps=False)

    tokens = hear()
    return {"seconds": timed(hear), "tokens": tokens.shape[-1]}


def embeddings(predictor: Any) -> dict[str, Any]:
    """Seconds for the same texts in batches of 1 and of 32; those of sentence-transformers beside them."""
    import numpy
    import torch

    lengths = numpy.random.default_rng(0).integers(1, 500, 64)
    texts = ["x" * int(length) for length in lengths]
    tokenize = predictor.tokenizer

    def ours(size: int) -> None:
        with predictor.boot.prediction():
            for start in range(0, len(texts), size):
                predictor.embed(tokenize(texts[start : start + size], truncation=True, max_length=512)["input_ids"])

    found: dict[str, Any] = {f"seconds_{size}": timed(lambda size=size: ours(size)) for size in (1, 32)}
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return found
    kind = {"dtype": predictor.model.dtype, "attn_implementation": predictor.model.config._attn_implementation}
    theirs = SentenceTransformer(os.environ["MODEL"], model_kwargs=kind, device=str(predictor.model.device))
    with torch.inference_mode():
        for size in (1, 32):
            found[f"theirs_{size}"] = timed(lambda size=size: theirs.encode(texts, batch_size=size))
    return found


WORK: dict[str, Callable[[Any], dict[str, Any]]] = {"speech": speech, "embeddings": embeddings}


def measure(example: str) -> dict[str, Any]:
    """One boot in this process, as Cog's worker makes it, and what it serves."""
    began = time.perf_counter()
    sys.path[:0] = [str(ROOT / "examples" / example), str(ROOT)]
    if example == "speech":
        sys.modules["sound"] = types.SimpleNamespace(read=None)  # type: ignore[assignment]
    from predict import Predictor  # the example's

    predictor = Predictor()
    predictor.setup()
    import torch

    found = {"ready_s": time.perf_counter() - began, **WORK[example](predictor)}
    regions = json.loads(predictor.boot.report.to_json())["regions"]
    found["steps"] = {one["name"]: one["step"] for one in regions}
    found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
    predictor.boot.wait_published(120.0)
    return found


def main() -> None:
    """Write the model, and boot three times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=("speech", "embeddings"))
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--boot", choices=BOOTS, help="this boot alone, in this process")
    args = parser.parse_args()
    if args.boot:
        print(json.dumps({"example": args.example, "boot": args.boot, **measure(args.example)}), flush=True)
        return
    model = args.work.resolve() / "model"
    if not model.exists():
        write(args.example, model, args.tiny)
    for boot in BOOTS:
        scope = {"COMPILE_CACHE_SCOPE": "off"} if boot == "off" else {}
        environ = {**os.environ, **scope, "MODEL": str(model), "COMPILE_CACHE_COLD_START": "block"}
        environ |= {
            "COMPILE_CACHE_STORE": str(model.parent / "store"),
            "COMPILE_CACHE_DIR": str(model.parent / "directory"),
        }
        subprocess.run(
            [sys.executable, __file__, args.example, "--work", str(args.work), "--boot", boot], env=environ, check=True
        )


if __name__ == "__main__":
    main()
