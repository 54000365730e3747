"""What pictures cost: their parts, requests that nobody warmed up for, and adapters that peft does not merge.

    python benchmarks/pictures.py parts --model /tmp/flux1 --sizes 1024x1024 --store /tmp/parts
    python benchmarks/pictures.py unseen --model /tmp/z-image --sizes 1024x1024,768x1024 --store /tmp/unseen
    python benchmarks/pictures.py unseen --loras --store /tmp/loras
    python benchmarks/pictures.py peft --store /tmp/peft

Each boot is a process of its own.

*parts* boots eager, with an empty store (`block`), and from that store. Predictions with and without go_fast take
turns, and LoRAs of rank 32 on all linear layers of the blocks are merged. Another process compares each float8 layer
with the one that it is made from, on the inputs of a step.

*unseen* sends the same requests to an eager boot and to one with an empty store that compiles in the background: of all
sizes, of which only the first is warmed up, with the pipeline's own guidance and with 1.0, and prompts of 1 to 200
words. When all is compiled, each kind is asked for again, and once more in the next boot, in the other order. `--loras`
adds LoRAs of ten ranks, pictures to start from, masks and go_fast.

*peft* serves the demo model as docs/lora.md says: three adapters of two ranks have one name, and are unloaded before
the next one. A boot without the library answers the same requests first.

Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

from fresh_boot import PROMPT, ROOT, SEED, add_line, boot_environment, conclude, new_log, prepare, run_process
from served import Answer, InProcess, describe_machine
from table import markdown, percentile, spread

# What one boot told, as JSON.
Told = dict[str, Any]
_PATIENCE_S = 1200.0


def boot() -> tuple[Any, InProcess]:
    """A predictor that is READY, and what asks it."""
    from predict import Predictor

    predictor = Predictor()
    predictor.setup()
    return predictor, InProcess(predictor)


def write_lora(model: Any, file: Path, rank: int, is_chosen: Callable[[str], bool]) -> str:
    """A random LoRA of the chosen linear layers of a model's denoiser, the same for the same name of the file."""
    import torch
    from safetensors.torch import save_file

    component = "unet" if hasattr(model._pipeline, "unet") else "transformer"
    generator, state = torch.Generator().manual_seed(int(file.stem)), {}
    for name, layer in model.denoiser.named_modules():
        if isinstance(layer, torch.nn.Linear) and is_chosen(name):
            for letter, shape in (("A", (rank, layer.in_features)), ("B", (layer.out_features, rank))):
                noise = torch.randn(shape, generator=generator).to(layer.weight.dtype)
                state[f"{component}.{name}.lora_{letter}.weight"] = noise * 0.05
    save_file(state, file)
    return str(file)


# parts


class Clock:
    """Milliseconds of each part of a prediction, on the GPU's own clock where there is one."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._spans: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._torch.cuda.is_available():
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """Time what runs inside."""
        begun = self._now()
        yield
        self._spans.append((part, begun, self._now()))

    def wrap(self, part: str, holder: Any, name: str) -> None:
        """Time each call of a method."""
        method = getattr(holder, name)

        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.span(part):
                return method(*args, **kwargs)

        setattr(holder, name, timed)

    def read(self) -> dict[str, float]:
        """The sum of each part since the last reading."""
        if self._torch.cuda.is_available():
            self._torch.cuda.synchronize()
        found: dict[str, float] = defaultdict(float)
        for part, begun, ended in self._spans:
            found[part] += begun.elapsed_time(ended) if hasattr(begun, "elapsed_time") else (ended - begun) * 1e3
        self._spans.clear()
        return dict(found)


def serve_parts(kind: str, args: Any) -> Told:
    """What one boot tells of the parts."""
    if kind == "errors":
        return compare_layers(args)
    predictor, served = boot()
    before, found = predictor.boot.counts(), {"machine": describe_machine()}
    if kind != "cold":
        found["predictions"] = time_parts(predictor, served, args.steps, args.rounds)
        found |= time_loras(predictor, args.store)
    predictor.boot.wait_published(60)
    return {**found, "graphs": predictor.boot.counts().since(before).graphs}


def time_parts(predictor: Any, served: InProcess, steps: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Predictions in turn: of each number of steps, with and without go_fast where both are there."""
    clock, model = Clock(), predictor.model
    for is_fast, denoiser in model.denoisers.items():
        pipeline = model.pipeline_for(dataclasses.replace(model.warm_up_inputs()[0], go_fast=is_fast))
        clock.wrap("text", pipeline, "encode_prompt")
        clock.wrap("step", denoiser, "forward")
    clock.wrap("decode", model._pipeline.vae, "decode")
    clock.wrap("total", predictor, "run")
    found = []
    for number in range(rounds + 1):
        for count in steps:
            for is_fast in model.denoisers:
                answer = served.answer(prompt=PROMPT, seed=SEED, num_inference_steps=count, go_fast=is_fast)
                parts = clock.read()
                parts["step"] /= count
                which = {"steps": count, "fast": is_fast, "served": sorted(set(answer.served.values()))}
                if number:  # the first round is not counted
                    found.append({**which, **parts})
    return found


def time_loras(predictor: Any, work: Path) -> Told:
    """Seconds to use a first LoRA, another one, and none."""
    import torch

    from models.image.lora_files import Lora

    model = predictor.model
    files = [Path(write_lora(model, work / f"{n}.safetensors", 32, lambda name: "blocks." in name)) for n in range(2)]

    before, seconds = checksums(model.denoisers.values()), {}
    for name, loras in (("first", files[:1]), ("change", files[1:]), ("base", []), ("again", files[:1]), ("end", [])):
        started = time.perf_counter()
        model.loras.use([Lora(file, 1.0) for file in loras])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - started
    return {"lora_s": seconds, "is_base_back": checksums(model.denoisers.values()) == before}


def checksums(networks: Iterable[Any]) -> list[int]:
    """A checksum of each weight's bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    weights = [weight.detach() for network in networks for weight in network.parameters()]
    bits = [weight.view(kinds[weight.itemsize]).flatten() for weight in weights]
    return [int((each * (torch.arange(len(each), device=each.device) % 251 + 1)).sum()) for each in bits]


def compare_layers(args: Any) -> Told:
    """The error of each float8 layer against the one that it is made from, and of a step: ‖difference‖ / ‖value‖."""
    import torch

    from models.image.pipeline import DiffusionModel
    from models.image.settings import ImageSettings
    from models.image.sizes import parse_sizes

    settings = ImageSettings(image_sizes=parse_sizes("--sizes", args.sizes), go_fast="on")
    model = DiffusionModel.load(str(args.model), None, settings)
    plain, fast = model.denoisers[False], model.denoisers[True]
    layers, errors, outputs = dict(fast.named_modules()), defaultdict(list), list[Any]()

    def difference(found: Any, expected: Any) -> float:
        return float((found.float() - expected.float()).norm() / expected.float().norm())

    def hook(name: str) -> Callable[..., None]:
        kind = re.sub(r"\.\d+\.", ".*.", name, count=1)
        return lambda module, inputs, output: errors[kind].append(difference(layers[name](inputs[0]), output))

    for name, layer in plain.named_modules():
        if type(layers.get(name)) is not type(layer):
            layer.register_forward_hook(hook(name))
    plain.register_forward_hook(
        lambda module, args, kwargs, output: outputs.append(difference(fast(*args, **kwargs)[0], output[0])),
        with_kwargs=True,
    )
    with torch.inference_mode():
        model.run(dataclasses.replace(model.warm_up_inputs()[-1], go_fast=False))
    return {"layers": {kind: [mean(found), max(found)] for kind, found in errors.items()}, "step_errors": outputs}


def conclude_parts(boots: dict[str, Told], args: Any) -> None:
    """The tables and the checks."""
    rows, parts = [], ("text", "step", "decode", "total")
    for name in ("eager", "warm"):
        predictions = boots[name]["predictions"]
        for steps, fast in dict.fromkeys((each["steps"], each["fast"]) for each in predictions):
            chosen = [each for each in predictions if (each["steps"], each["fast"]) == (steps, fast)]
            way = "eager" if name == "eager" else "go_fast" if fast else "compiled"
            rows.append([steps, way, *(spread((each.get(part) for each in chosen), 1) for part in parts)])
    header = ("steps", "", *(f"{part}, ms" for part in parts))
    print(f"\n{markdown(header, sorted(rows, key=lambda row: row[0]))}\n")
    layers = [[kind, f"{a:.1e}", f"{b:.1e}"] for kind, (a, b) in boots["errors"]["layers"].items()]
    print(markdown(("layer", "mean error", "largest"), layers))
    print(f"a step: {median(boots['errors']['step_errors']):.1e}\n")
    eager, warm = boots["eager"], boots["warm"]
    loras = [[name, *(f"{seconds:.2f}" for seconds in boots[name]["lora_s"].values())] for name in ("eager", "warm")]
    print(f"{markdown(('LoRA, s', *warm['lora_s']), loras)}\n")
    conclude(
        {
            "nothing is compiled": not warm["graphs"],
            "all is precompiled": all(each["served"] == ["precompiled"] for each in warm["predictions"]),
            "the weights are back to the bit": warm["is_base_back"] and eager["is_base_back"],
        }
    )


# unseen

_LONGEST_PROMPT = 200
_RANKS = (1, 2, 4, 4, 8, 8, 16, 16, 32, 32)
# Kinds are asked for again until one round is precompiled as a whole: a length of a prompt may have its code late.
_ROUNDS = 3
# Some peaks of memory last a twentieth of a second.
_MEMORY_LOOK_S = 0.025


def kinds(args: Any) -> list[dict[str, Any]]:
    """The inputs that make a kind."""
    sizes = [dict(zip(("width", "height"), map(int, size.split("x")), strict=True)) for size in args.sizes.split(",")]
    found = [{**size, **scale} for size in sizes for scale in ({}, {"guidance_scale": 1.0})]
    if args.loras:
        start, mask = str(args.store / "start.png"), str(args.store / "mask.png")
        found += [{"image": start}, {"image": start, "mask": mask}]
        found = [{**kind, "go_fast": is_fast} for kind in found for is_fast in (False, True)]
    return found


def requests(chosen: Sequence[dict[str, Any]], args: Any, rng: random.Random) -> list[dict[str, Any]]:
    """A request of each of these kinds, with a prompt and LoRAs at random."""
    found = []
    for kind in chosen:
        prompt = " ".join(f"w{rng.randint(2, 999)}" for _ in range(rng.randint(1, _LONGEST_PROMPT)))
        request = {**kind, "prompt": prompt, "seed": SEED, "num_inference_steps": args.steps[0]}
        for name in ("lora", "extra_lora")[: rng.choice((0, 1, 1, 2)) if args.loras else 0]:
            file = str(args.store / f"{rng.randrange(len(_RANKS))}.safetensors")
            request |= {"lora_weights" if name == "lora" else name: file, f"{name}_scale": rng.choice((1.0, 0.5, -0.7))}
        found.append(request)
    return found


def unseen_and_again(args: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """As many requests of each kind in a random order, and three of each kind: the same in each process."""
    rng, every = random.Random(SEED), kinds(args)
    chosen = [every[number % len(every)] for number in range(args.requests)]
    rng.shuffle(chosen)
    return requests(chosen, args, rng), requests(every * 3, args, rng)


def write_files(model: Any, folder: Path) -> None:
    """The LoRAs of the attention, every second one of the other layers too; a picture of noise, and a mask."""
    import numpy
    from PIL import Image

    for number, rank in enumerate(_RANKS):
        write_lora(
            model, folder / f"{number}.safetensors", rank, lambda name, every=number % 2: every or ".attn" in name
        )
    pixels = numpy.random.default_rng(SEED).integers(0, 256, (120, 100, 3), dtype=numpy.uint8)
    mask = numpy.zeros((120, 100), dtype=numpy.uint8)
    mask[40:80, 30:70] = 255
    Image.fromarray(pixels).save(folder / "start.png")
    Image.fromarray(mask).save(folder / "mask.png")


def serve_unseen(kind: str, args: Any) -> Told:
    """The answers of one boot. `waited_s` is from the last unseen request until nothing was left to compile, and
    `extra_bytes` the most memory of the GPU in use outside this process's torch, over that at READY."""
    predictor, served = boot()
    if args.loras and kind == "eager":
        write_files(predictor.model, args.store)
    outside, is_over = list[int](), threading.Event()
    looking = threading.Thread(target=look_at_memory, args=(outside, is_over), daemon=True)
    looking.start()
    unseen, once = unseen_and_again(args)
    found: Told = {"report": json.loads(predictor.boot.report.to_json()), "unseen": [], "again": [], "waited_s": None}
    if kind != "next":
        found["unseen"] = [served.answer(**request) for request in unseen]
    for _ in range({"eager": 0, "background": _ROUNDS, "next": 1}[kind]):
        began = time.monotonic()
        is_compiled = predictor.boot.wait_compiled(_PATIENCE_S)
        if found["waited_s"] is None and is_compiled:
            found["waited_s"] = time.monotonic() - began
        answers = [served.answer(**request) for request in (once[::-1] if kind == "next" else once)]
        found["again"] = answers[::-1] if kind == "next" else answers
        if all(answer.is_precompiled for answer in answers):
            break
    is_over.set()
    looking.join()  # a process that ends while a thread asks CUDA is aborted
    predictor.boot.wait_published(60)
    told = {name: [dataclasses.asdict(answer) for answer in found[name]] for name in ("unseen", "again")}
    return {**found, **told, "extra_bytes": max(outside) - outside[0] if outside else None}


def look_at_memory(outside: list[int], is_over: threading.Event) -> None:
    """Add the bytes in use on the GPU outside this process's torch, again and again; nothing without a GPU."""
    import torch

    while torch.cuda.is_available() and not is_over.wait(_MEMORY_LOOK_S):
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        outside.append(all_bytes - free_bytes - torch.cuda.memory_reserved())


def conclude_unseen(boots: dict[str, Told], args: Any) -> None:
    """The table, a request relative to its kind's median in the eager boot, and the checks."""
    unseen, _ = unseen_and_again(args)
    answers = {name: [Answer(**one) for one in told["unseen"] + told["again"]] for name, told in boots.items()}
    eager, background, following = (answers[name] for name in ("eager", "background", "next"))
    names = [
        str({key: one[key] for key in one if key not in ("prompt", "seed") and "lora" not in key}) for one in unseen
    ]
    by_kind = {
        name: [answer.seconds for answer, own in zip(eager, names, strict=True) if own == name] for name in names
    }
    rows = []
    for boot, found in (("eager", eager), ("background", background)):
        pairs = [(answer.seconds, median(by_kind[name])) for answer, name in zip(found, names, strict=False)]
        ratios = [percentile([seconds / usual for seconds, usual in pairs], percent) for percent in (50, 99)]
        worst_s = max(seconds - usual for seconds, usual in pairs)
        rows.append([boot, len(by_kind), len(pairs), *(f"{ratio:.3f}" for ratio in ratios), f"{worst_s:.2f}"])
    print(f"\n{markdown(('boot', 'kinds', 'n', 'p50 / eager', 'p99 / eager', 'worst − eager, s'), rows)}\n")
    told = boots["background"]
    print(f"all compiled {told['waited_s']} s after the last; {told['extra_bytes']} bytes of the GPU outside torch\n")
    again = background[len(unseen) :]
    pairs = [(answer, right) for answer, right in zip(background, eager, strict=False) if answer.is_eager]
    conclude(
        {
            "no request compiles, or waits for a compiler": not any(
                answer.compiled_now for answer in (*background, *following)
            ),
            "nothing is compiled before READY": not any(made_in_setup(boots[name]) for name in ("background", "next")),
            "what is served eager is the eager boot's": all(answer.sha256 == right.sha256 for answer, right in pairs),
            "all is compiled in time": told["waited_s"] is not None,
            "each kind is precompiled when it is asked for again": all(answer.is_precompiled for answer in again),
            "each kind is precompiled in the next boot": all(answer.is_precompiled for answer in following),
            "its pictures are the same, in the other order": [answer.sha256 for answer in again]
            == [answer.sha256 for answer in following],
        }
    )


def made_in_setup(told: Told) -> int:
    """Graphs, lookups that found nothing, kernels and artifacts of a boot until READY."""
    counts = told["report"]["counts"]
    return int(counts["graphs"] + counts["precompiled_made"] + counts["kernels_compiled"] + counts["misses"])


# peft

_ADAPTERS = (4, 4, 8)  # their ranks
_TOLERANCE = 2e-2


def serve_peft(kind: str, args: Any) -> Told:
    """Boot a predictor of one's own, and answer: no adapter, or one of some ranks and scales, in random order."""
    import compile_cache

    boot = compile_cache.boot("peft-requests", sources=[__file__])
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(args.model)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.requires_grad_(False)
    model = SimpleNamespace(_pipeline=pipeline, denoiser=pipeline.transformer)
    files = [
        write_lora(model, args.store / f"{number}.safetensors", rank, lambda name: ".attn.to_" in name)
        for number, rank in enumerate(_ADAPTERS)
    ]
    choices = [None, *((number, scale) for number in range(len(files)) for scale in (1.0, 0.5))]

    def draw(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        options = {"generator": generator, "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
        with torch.inference_mode():
            return pipeline(PROMPT, **options).images[0]

    with boot:
        if kind == "adopted":
            boot.compile(pipeline.transformer)
            boot.warm_up(lambda: draw(0))
    rng, told = random.Random(SEED), []
    for number in range(args.requests):
        adapter, seed = rng.choice(choices) if number else None, rng.randint(0, 3)
        with boot.prediction() as prediction:
            pipeline.unload_lora_weights()
            if adapter:
                pipeline.load_lora_weights(files[adapter[0]], adapter_name="style")
                pipeline.set_adapters(["style"], [adapter[1]])
            pixels = draw(seed).ravel().tolist()
        metrics = {name.removeprefix("compile_cache."): value for name, value in prediction.metrics().items()}
        boot.wait_compiled(_PATIENCE_S)
        made = sum(region.made for region in boot.report.regions)
        kept = {name: metrics.get(name) for name in ("served", "compiled_now")}
        combination = (_ADAPTERS[adapter[0]], adapter[1]) if adapter else None
        told.append({"adapter": combination, "pixels": pixels, "made": made, **kept})
    return {"answers": told}


def conclude_peft(boots: dict[str, Told], args: Any) -> None:
    """What was compiled, and the checks."""
    import numpy

    answers, errors = boots["adopted"]["answers"], []
    for right, answer in zip(boots["untouched"]["answers"], answers, strict=True):
        expected, pixels = (numpy.array(one["pixels"]) for one in (right, answer))
        errors.append(float(numpy.linalg.norm(pixels - expected) / numpy.linalg.norm(expected)))
    combinations = {str(one["adapter"]) for one in answers}
    regions, made = len(answers[-1]["served"]), answers[-1]["made"]
    eager = sum(any("eager" in step for step in one["served"].values()) for one in answers)
    back = [(before, one) for before, one in pairwise(answers) if not one["adapter"]]
    print(
        f"\n{len(answers)} requests, largest error {max(errors):.1e}; {eager} had eager calls; {made} functions "
        f"for {regions} regions, and {len(combinations)} ranks and scales, no adapter being one\n"
    )
    conclude(
        {
            "every picture is right": max(errors) <= _TOLERANCE,
            "no request waits": not any(one["compiled_now"] for one in answers),
            "each rank and scale is compiled once": made <= regions * len(combinations),
            "going back compiles nothing": all(one["made"] == before["made"] for before, one in back),
        }
    )


# The kinds of boots in order, what each does in its process, and what is made of all.
MEASURED = {
    "parts": (("errors", "eager", "cold", "warm"), serve_parts, conclude_parts),
    "unseen": (("eager", "background", "next"), serve_unseen, conclude_unseen),
    "peft": (("untouched", "adopted"), serve_peft, conclude_peft),
}


def environment(kind: str, args: Any) -> dict[str, str]:
    """The variables of a boot."""
    has_fast = args.loras or (args.what == "parts" and kind != "eager")
    return boot_environment(args.store, kind, args.store / "store") | {
        "MODEL": str(args.model),
        "IMAGE_SIZES": args.sizes,
        "WARM_UP_SIZES": args.sizes.partition(",")[0],
        "GO_FAST": "on" if has_fast else "off",
        "LORA_LOCAL": str(args.store),
        "COMPILE_CACHE_COLD_START": "block" if kind == "cold" else "background",
        "COMPILE_CACHE_SETUP_BUDGET_S": "0",
    }


def main() -> None:
    """Boot, measure, print; or serve one boot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=MEASURED)
    parser.add_argument("--model", type=Path, default=ROOT / "demo/flux-digits", help="a pipeline's folder")
    parser.add_argument("--sizes", default="64x64,96x64,64x96", help="only the first is warmed up")
    parser.add_argument("--steps", type=int, nargs="+", default=(4, 28), help="of denoising; unseen takes the first")
    parser.add_argument("--rounds", type=int, default=3, help="of parts")
    parser.add_argument("--requests", type=int, default=60, help="of unseen and peft")
    parser.add_argument("--loras", action="store_true", help="of unseen: with LoRAs, pictures, masks and go_fast")
    parser.add_argument("--store", type=Path, required=True, help="new folder for LoRAs, the store and logs")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one boot and its requests")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    parser.add_argument("--boot", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.model, args.store = args.model.resolve(), args.store.resolve()
    names, serve, conclude_all = MEASURED[args.what]
    if args.boot:
        print(json.dumps(serve(args.boot, args)), flush=True)
        return
    prepare(args.store)
    boots = {}
    for kind in names:
        command = [sys.executable, __file__, *sys.argv[1:], "--boot", kind]
        line = run_process(kind, command, environment(kind, args), new_log(args.store, kind), args.timeout)
        boots[kind] = json.loads(line)
        print(f"{kind} is done", flush=True)
        add_line(args.out, {"boot": kind, **boots[kind]})
    conclude_all(boots, args)


if __name__ == "__main__":
    main()
