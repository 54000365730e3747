"""peft's adapters in a FLUX predictor of one's own: is each picture right, and what is compiled?

    python benchmarks/peft_requests.py --work /tmp/peft --requests 50

The predictor does what docs/lora.md says: the network is frozen, adapters have one name, and are unloaded before the
next one. The requests have no adapter, or one of three (two of rank 4, one of rank 8) at one of two scales. A process
without the library answers them first. After each request the second one waits until all is compiled. Needs peft.
Exits with 1 if a picture differs by more than rounding, if a request waits, if more is compiled than there are ranks
and scales, or if going back to the base compiles anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fresh_boot import ROOT, SEED, boot_environment, conclude, new_log, prepare, run_process

_MODEL = ROOT / "demo/flux-digits"
_RANKS = (4, 4, 8)
_SCALES = (1.0, 0.5)
_TOLERANCE = 2e-2


def write_adapters(folder: Path) -> list[str]:
    """Random ones, of the attention."""
    import torch
    from diffusers import FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel.from_pretrained(_MODEL / "transformer")
    linear = {name: layer for name, layer in transformer.named_modules() if ".attn.to_" in name}
    linear = {name: layer for name, layer in linear.items() if isinstance(layer, torch.nn.Linear)}
    for number, rank in enumerate(_RANKS):
        generator, state = torch.Generator().manual_seed(number), {}
        for name, layer in linear.items():
            state[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.05
            state[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.05
        FluxPipeline.save_lora_weights(folder / str(number), transformer_lora_layers=state)
    return [str(folder / str(number)) for number in range(len(_RANKS))]


def requests(adapters: Sequence[str], count: int) -> list[dict[str, Any]]:
    """A first one without an adapter, then a random mix."""
    rng, found = random.Random(SEED), [{"adapter": "", "scale": 1.0, "seed": 0}]
    while len(found) < count:
        adapter, scale = rng.choice([("", 1.0), *((adapter, scale) for adapter in adapters for scale in _SCALES)])
        found.append({"adapter": adapter, "scale": scale, "seed": rng.randint(0, 3)})
    return found


def serve(kind: str, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Boot in this process, and answer: pixels, and the steps and the compiles of each request."""
    import compile_cache

    boot = compile_cache.boot("peft-requests", sources=[__file__])
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(_MODEL)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.requires_grad_(False)

    def draw(seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            options = {"generator": generator, "height": 64, "width": 64, "num_inference_steps": 2, "output_type": "np"}
            return pipeline("a handwritten three", **options).images[0]

    with boot:
        if kind == "adopted":
            boot.compile(pipeline.transformer)
            boot.warm_up(lambda: draw(0))
    told = []
    for request in asked:
        with boot.prediction() as prediction:
            pipeline.unload_lora_weights()
            if request["adapter"]:
                pipeline.load_lora_weights(request["adapter"], adapter_name="style")
                pipeline.set_adapters(["style"], [request["scale"]])
            pixels = draw(request["seed"])
        metrics = prediction.metrics()
        boot.wait_compiled(600.0)
        made = sum(region.made for region in boot.report.regions)
        kept = {name: metrics.get(f"compile_cache.{name}") for name in ("served", "waited_s", "compiled_now")}
        told.append({"pixels": pixels.ravel().tolist(), "made": made, **kept})
    return told


def main() -> None:
    """Ask both, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="new folder for adapters, the store and logs")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        kind, file = args.serve
        print(json.dumps(serve(kind, json.loads(Path(file).read_text()))), flush=True)
        os._exit(0)
    import numpy

    work = prepare(args.work)
    asked = requests(write_adapters(work), args.requests)
    file = work / "requests.json"
    file.write_text(json.dumps(asked))
    found = {}
    for kind in ("untouched", "adopted"):
        environ = boot_environment(work, kind, work / "store") | {"COMPILE_CACHE_COLD_START": "background"}
        command = [sys.executable, __file__, "--serve", kind, str(file)]
        found[kind] = json.loads(run_process(kind, command, environ, new_log(work, kind), 3000.0))
    errors = []
    for right, answer in zip(found["untouched"], found["adopted"], strict=True):
        expected, pixels = (numpy.array(one["pixels"]) for one in (right, answer))
        errors.append(float(numpy.linalg.norm(pixels - expected) / numpy.linalg.norm(expected)))
    answers = found["adopted"]
    first_adapter = next(number for number, request in enumerate(asked) if request["adapter"])
    combinations = {(_RANKS[int(Path(one["adapter"]).name)], one["scale"]) for one in asked if one["adapter"]}
    back = [number for number in range(first_adapter, len(asked)) if not asked[number]["adapter"]]
    regions = len(answers[-1]["served"])
    eager = sum(any("eager" in step for step in one["served"].values()) for one in answers)
    print(
        f"{len(asked)} requests, largest error {max(errors):.1e}; {eager} requests had eager calls; "
        f"{answers[-1]['made']} compiled for {regions} regions, {len(combinations)} ranks and scales, and no adapter"
    )
    conclude(
        {
            "every picture is right": max(errors) <= _TOLERANCE,
            "no request waits": not any(one["waited_s"] or one["compiled_now"] for one in answers),
            "each rank and scale is compiled once": answers[-1]["made"] <= regions * (len(combinations) + 1),
            "going back compiles nothing": all(answers[n]["made"] == answers[n - 1]["made"] for n in back),
        }
    )


if __name__ == "__main__":
    main()
