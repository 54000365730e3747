"""Predictions with LoRAs, pictures, masks and sizes in random order: is all precompiled, and is each picture right?

    python benchmarks/lora_predictions.py --store /tmp/lora --predictions 200 --fresh 40

A first boot compiles every size and fills the store. A warm boot then serves the predictions: without a LoRA, with one
of ten (ranks 1 to 32, some on all layers), or with two, at several scales; from a prompt, a picture, or a picture with
a mask; with and without go_fast, and a negative prompt, which asks the network twice. Then fresh processes, with the
same store, each serve one of them alone. Exits with 1 if anything was compiled or served eager, if a picture differs
from that of a fresh process by one bit, or if the base model's picture has changed in the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fresh_boot import ROOT, SEED, boot_environment, conclude, new_log, prepare, run_process
from served import Answer

_RANKS = (1, 2, 4, 4, 8, 8, 16, 16, 32, 32)
_SCALES = (1.0, 0.5, -0.7, 1.3)
_STEPS = 3
_BASE: dict[str, Any] = {"prompt": "a handwritten seven", "num_inference_steps": _STEPS, "seed": 1, "go_fast": False}


def write_loras(model: Path, folder: Path) -> list[str]:
    """Random LoRAs of the attention, every second one of the other linear layers too."""
    import torch
    from diffusers import DiffusionPipeline
    from safetensors.torch import save_file

    pipeline = DiffusionPipeline.from_pretrained(model)
    component = "unet" if hasattr(pipeline, "unet") else "transformer"
    modules = getattr(pipeline, component).named_modules()
    linear = {f"{component}.{name}": layer for name, layer in modules if isinstance(layer, torch.nn.Linear)}
    files = []
    for number, rank in enumerate(_RANKS):
        generator, state = torch.Generator().manual_seed(number), {}
        for name, layer in linear.items():
            if number % 2 or ".attn" in name:
                state[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=generator) * 0.05
                state[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * 0.05
        files.append(str(folder / f"{number}.safetensors"))
        save_file(state, files[-1])
    return files


def write_pictures(folder: Path) -> tuple[str, str]:
    """A picture of noise, and a mask of its middle."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(SEED).integers(0, 256, (120, 100, 3), dtype=numpy.uint8)
    mask = numpy.zeros((120, 100), dtype=numpy.uint8)
    mask[40:80, 30:70] = 255
    paths = str(folder / "start.png"), str(folder / "mask.png")
    Image.fromarray(pixels).save(paths[0])
    Image.fromarray(mask).save(paths[1])
    return paths


def requests(sizes: Sequence[str], loras: Sequence[str], pictures: tuple[str, str], count: int) -> list[dict[str, Any]]:
    """The inputs of `count` predictions; the last one is the first again, which has no LoRA."""
    rng = random.Random(SEED)
    found = [_BASE]
    while len(found) < count - 1:
        request = {**_BASE, "seed": rng.randint(0, 3)}
        names = ("lora_weights", "extra_lora")[: rng.choice((0, 1, 1, 2))]
        for name, lora in zip(names, rng.sample(loras, len(names)), strict=True):
            scale = "lora_scale" if name == "lora_weights" else "extra_lora_scale"
            request |= {name: lora, scale: rng.choice(_SCALES)}
        width, height = map(int, rng.choice(sizes).split("x"))
        start = rng.choice(({"width": width, "height": height}, {"image": pictures[0]}, {"mask": pictures[1]}))
        request |= {"image": pictures[0], **start} if "mask" in start else start
        if rng.random() < 0.25:
            request["negative_prompt"] = "a handwritten one"
        request["go_fast"] = rng.random() < 0.5
        found.append({**request, **rng.choice(({}, {"guidance_scale": 2.0}))})
    return [*found, _BASE]


def serve(asked: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Boot in this process, and answer."""
    from served import InProcess

    from predict import Predictor

    predictor = Predictor()
    predictor.setup()
    served, before = InProcess(predictor), predictor.boot.counts()
    answers = [dataclasses.asdict(served.answer(**inputs)) for inputs in asked]
    graphs = predictor.boot.counts().since(before).graphs
    predictor.boot.wait_published(60)
    return {"answers": answers, "graphs": graphs}


def boot(kind: str, asked: Sequence[dict[str, Any]], args: Any) -> tuple[list[Answer], int]:
    """The answers of a boot in a process of its own, and the graphs that it compiled for them."""
    work = args.store
    environ = boot_environment(work, kind, work / "store") | {
        "MODEL": str(args.model),
        "IMAGE_SIZES": args.sizes,
        "GO_FAST": "on",
        "LORA_LOCAL": str(work),
    }
    environ |= {"WARM_UP_SIZES": "all", "COMPILE_CACHE_COLD_START": "block" if kind == "cold" else "background"}
    environ |= {"COMPILE_CACHE_SETUP_BUDGET_S": "0"}
    log = new_log(work, kind)
    file = log.with_suffix(".json")
    file.write_text(json.dumps(asked))
    line = run_process(kind, [sys.executable, __file__, "--serve", str(file)], environ, log, 3600.0)
    told = json.loads(line)
    return [Answer(**answer) for answer in told["answers"]], told["graphs"]


def main() -> None:
    """Fill, serve, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="new folder for LoRAs, the store and logs")
    parser.add_argument("--model", type=Path, default=ROOT / "demo/flux-digits", help="a pipeline's folder")
    parser.add_argument("--sizes", default="64x64,96x64,64x96")
    parser.add_argument("--predictions", type=int, default=200)
    parser.add_argument("--fresh", type=int, default=40, help="predictions that a process of their own repeats")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        print(json.dumps(serve(json.loads(args.serve.read_text()))), flush=True)
        return
    work = prepare(args.store)
    loras, pictures = write_loras(args.model, work), write_pictures(work)
    asked = requests(args.sizes.split(","), loras, pictures, args.predictions)
    boot("cold", [], args)
    answers, graphs = boot("warm", asked, args)
    chosen = random.Random(SEED).sample(range(len(asked)), min(args.fresh, len(asked)))
    same = []
    for number in chosen:
        (alone,), _ = boot("fresh", [asked[number]], args)
        same.append(alone.sha256 == answers[number].sha256)
    different = len({answer.sha256 for answer in answers})
    print(
        f"{len(answers)} predictions, {different} different pictures, {sum(same)} of {len(same)} as in a fresh process"
    )
    conclude(
        {
            "nothing is compiled": not graphs and not any(answer.compiled_now for answer in answers),
            "all is precompiled": all(answer.is_precompiled for answer in answers),
            "each picture is that of a fresh process": all(same),
            "the base model's picture is as before": answers[0].sha256 == answers[-1].sha256,
            "LoRAs change pictures": different > len(answers) // 4,
        }
    )


if __name__ == "__main__":
    main()
