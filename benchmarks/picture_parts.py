"""Where the time of a picture goes: text, steps, decoding; eager, compiled and with go_fast. And what a LoRA costs.

    python benchmarks/pipelines.py --shape flux1 --out /tmp/flux1
    python benchmarks/picture_parts.py --model /tmp/flux1 --store /tmp/parts --out parts.jsonl

Three boots, each a process of its own: an eager one; one that compiles in its setup and fills the store; and a warm one
from that store, where predictions with and without go_fast take turns. The eager and the warm one also merge LoRAs of
rank 32 on all linear layers of the blocks. A fourth process compares each float8 layer with the one that it is made
from, on the inputs of a step. Exits with 1 if a warm boot compiled anything after READY or served anything eager, if a
LoRA changes the kernels of a step, or if weights are not back to the bit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from statistics import mean, median
from typing import Any

from fresh_boot import PROMPT, ROOT, SEED, boot_environment, conclude, new_log, prepare, run_process
from table import markdown, spread

_RANK = 32
_PARTS = ("text", "step", "decode", "total")


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


def boot() -> tuple[Any, Any]:
    """A predictor that is READY, and what asks it."""
    from served import InProcess

    from predict import Predictor

    predictor = Predictor()
    predictor.setup()
    return predictor, InProcess(predictor)


def time_parts(predictor: Any, served: Any, steps: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Predictions in turn: of each number of steps, with and without go_fast where both are there."""
    clock, model = Clock(), predictor.model
    for is_fast, denoiser in model.denoisers.items():
        pipeline = model.pipeline_for(replace(model.warm_up_inputs()[0], go_fast=is_fast))
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
                if number:  # the first round is not counted
                    found.append(
                        {"steps": count, "fast": is_fast, **parts, "served": sorted(set(answer.served.values()))}
                    )
    return found


def write_lora(network: Any, file: Path, seed: int) -> Path:
    """A random LoRA of all linear layers of a network's blocks."""
    import torch
    from safetensors.torch import save_file

    generator, state = torch.Generator().manual_seed(seed), {}
    for name, layer in network.named_modules():
        if isinstance(layer, torch.nn.Linear) and "blocks." in name:
            for letter, shape in (("A", (_RANK, layer.in_features)), ("B", (layer.out_features, _RANK))):
                state[f"transformer.{name}.lora_{letter}.weight"] = (
                    torch.randn(shape, generator=generator, dtype=torch.float32).to(layer.weight.dtype) * 0.01
                )
    save_file(state, file)
    return file


def checksums(networks: Iterable[Any]) -> list[int]:
    """A checksum of each weight's bits."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    weights = [weight.detach() for network in networks for weight in network.parameters()]
    bits = [weight.view(kinds[weight.itemsize]).flatten() for weight in weights]
    return [int((each * (torch.arange(len(each), device=each.device) % 251 + 1)).sum()) for each in bits]


def time_loras(predictor: Any, served: Any, work: Path) -> dict[str, Any]:
    """Seconds to use a first LoRA, another one, and none."""
    import torch

    from models.image.lora import Lora

    model = predictor.model
    files = [write_lora(model.denoiser, work / f"lora{number}.safetensors", number) for number in range(2)]

    def kernels(**inputs: str) -> list[Counter[str]]:
        return [kernels_of_a_step(served, go_fast=is_fast, **inputs) for is_fast in model.denoisers]

    kernels()  # the profiler's first run has more
    before, found, seconds = checksums(model.denoisers.values()), [kernels()], {}
    for name, loras in (("first", files[:1]), ("change", files[1:]), ("base", []), ("again", files[:1]), ("end", [])):
        started = time.perf_counter()
        model.loras.use([Lora(file, 1.0) for file in loras])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - started
        found.append(kernels(**({"lora_weights": str(loras[0])} if loras else {})))
    pairs = [pair for each in found for pair in zip(found[0], each, strict=True)]
    return {
        "lora_s": seconds,
        "lora_bytes": files[0].stat().st_size,
        "changed_kernels": sorted({name for one, two in pairs for name in one | two if one[name] != two[name]}),
        "kernels": [sum(each.values()) for each in found[0]],
        "base_is_back": checksums(model.denoisers.values()) == before,
    }


def kernels_of_a_step(served: Any, **inputs: Any) -> Counter[str]:
    """The kernels of a prediction of one step, and how often each ran. Copies depend on what is cached, and are left
    out."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        served.answer(prompt=PROMPT, seed=SEED, num_inference_steps=1, **inputs)
    events = profiled.key_averages()
    return Counter({event.key: event.count for event in events if event.device_time_total and "Mem" not in event.key})


def measure(args: Any) -> dict[str, Any]:
    """What one boot tells."""
    predictor, served = boot()
    before = predictor.boot.counts()
    report = json.loads(predictor.boot.report.to_json())
    found = {"boot": args.boot, "report": {name: report.get(name) for name in ("ready_s", "regions", "timeline")}}
    if args.boot != "cold":
        found["predictions"] = time_parts(predictor, served, args.steps, args.rounds)
        found |= time_loras(predictor, served, args.store)
    predictor.boot.wait_published(60)
    from served import describe_machine

    return {**found, "graphs": predictor.boot.counts().since(before).graphs, "machine": describe_machine()}


def compare_layers(args: Any) -> dict[str, Any]:
    """The error of each float8 layer against the one that it is made from, and of a step: ‖difference‖ / ‖value‖."""
    import torch

    from models.image.pipeline import DiffusionModel
    from models.image.settings import parse_sizes

    model = DiffusionModel.load(str(args.model), None, parse_sizes("--sizes", args.sizes), "on")
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
        model.run(replace(model.warm_up_inputs()[-1], go_fast=False))
    return {"layers": {kind: [mean(found), max(found)] for kind, found in errors.items()}, "step_errors": outputs}


def show(boots: dict[str, dict[str, Any]]) -> None:
    """The tables."""
    rows = []
    for name in ("eager", "warm"):
        predictions = boots[name]["predictions"]
        for steps, fast in dict.fromkeys((each["steps"], each["fast"]) for each in predictions):
            chosen = [each for each in predictions if (each["steps"], each["fast"]) == (steps, fast)]
            way = "eager" if name == "eager" else "go_fast" if fast else "compiled"
            rows.append([steps, way, *(spread((each.get(part) for each in chosen), 1) for part in _PARTS)])
    print(
        markdown(["steps", "", "text, ms", "step, ms", "decode, ms", "total, ms"], sorted(rows, key=lambda row: row[0]))
    )
    layers = boots["errors"]["layers"].items()
    print()
    print(markdown(["layer", "mean error", "largest"], [[kind, f"{a:.1e}", f"{b:.1e}"] for kind, (a, b) in layers]))
    print(f"a step: {median(boots['errors']['step_errors']):.1e}")
    print()
    loras = [[name, *(f"{seconds:.2f}" for seconds in boots[name]["lora_s"].values())] for name in ("eager", "warm")]
    print(markdown(["LoRA, s", *boots["warm"]["lora_s"]], loras))


def main() -> None:
    """Boot, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "demo/flux-digits", help="a pipeline's folder")
    parser.add_argument("--store", type=Path, required=True, help="new folder for LoRAs, the store and logs")
    parser.add_argument("--sizes", default="1024x1024")
    parser.add_argument("--steps", type=int, nargs="+", default=(4, 28))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="file for all that was measured, a JSON line for each boot")
    parser.add_argument("--boot", choices=("eager", "cold", "warm", "errors"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.boot:
        print(json.dumps(compare_layers(args) if args.boot == "errors" else measure(args)), flush=True)
        return
    work, boots = prepare(args.store), {}
    for kind in ("errors", "eager", "cold", "warm"):
        environ = boot_environment(work, kind, work / "store") | {
            "LORA_LOCAL": str(work),
            "MODEL": str(args.model.resolve()),
            "IMAGE_SIZES": args.sizes,
            "GO_FAST": "off" if kind == "eager" else "on",
            "COMPILE_CACHE_COLD_START": "block" if kind == "cold" else "background",
        }
        command = [sys.executable, __file__, "--boot", kind, *sys.argv[1:]]
        boots[kind] = json.loads(run_process(kind, command, environ, new_log(work, kind), 900.0))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(boots[kind]) + "\n")
    show(boots)
    warm = boots["warm"]
    conclude(
        {
            "nothing is compiled": not warm["graphs"],
            "all is precompiled": all(each["served"] == ["precompiled"] for each in warm["predictions"]),
            "a LoRA changes no kernel": not (warm["changed_kernels"] or boots["eager"]["changed_kernels"]),
            "the weights are back to the bit": warm["base_is_back"] and boots["eager"]["base_is_back"],
        }
    )


if __name__ == "__main__":
    main()
