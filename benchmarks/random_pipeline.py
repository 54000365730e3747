"""What the writers of pipelines with random weights share: making and checking them, saving, the command line."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

_SEED = 0
_DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`checked_size` is the width and height in pixels of the picture that is drawn before the pipeline is saved."""

    max_shard_size: str
    checked_size: int


@contextlib.contextmanager
def random_weights(device: torch.device) -> Iterator[None]:
    """Modules that are built in the context have the random weights that their classes begin with, in bf16."""
    torch.manual_seed(_SEED)
    torch.set_default_dtype(_DTYPE)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def networks(pipeline: DiffusionPipeline) -> dict[str, nn.Module]:
    """The parts of a pipeline that have weights, by name."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def check_picture(pipeline: DiffusionPipeline, size: int) -> float:
    """The standard deviation of a picture's pixels (0 to 1) after two steps.

    Raises:
        ValueError: the latents or the pixels are not finite, or the picture is one flat colour.
    """
    pipeline.set_progress_bar_config(disable=True)
    arguments = {"prompt": "a check", "width": size, "height": size, "num_inference_steps": 2}
    with torch.inference_mode():
        latents = pipeline(output_type="latent", **arguments).images
        # [1, 3, size, size]
        pixels = pipeline(output_type="pt", **arguments).images
    deviation = pixels.float().std().item()
    if not (latents.isfinite().all() and pixels.isfinite().all() and deviation > 0):
        raise ValueError(f"random weights give no usable picture: latents {latents.std()}, pixels {deviation}")
    return deviation


def save(pipeline: DiffusionPipeline, folder: Path, max_shard_size: str) -> None:
    """Write the folder as `save_pretrained` does, but its models at the same time."""
    models = networks(pipeline)
    for name, part in pipeline.components.items():
        if part is not None and name not in models:
            part.save_pretrained(folder / name)
    with ThreadPoolExecutor(len(models)) as threads:
        jobs = [
            threads.submit(model.save_pretrained, folder / name, max_shard_size=max_shard_size)
            for name, model in models.items()
        ]
        for job in jobs:
            job.result()
    pipeline.save_config(folder)  # last: a folder that has it is complete


def parameters(model: nn.Module) -> float:
    """Parameters in billions."""
    return sum(parameter.numel() for parameter in model.parameters()) / 1e9


def gigabytes_in(folder: Path) -> float:
    """The size of the weights in it, in units of 10⁹ bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e9


def main(
    description: str | None,
    shapes: Mapping[str, Shape],
    build: Callable[[Any, Path, torch.device], DiffusionPipeline],
) -> None:
    """The command line of a writer: build, check and write the pipeline, and print what each took."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes, required=True)
    parser.add_argument("--tokenizers", type=Path, default=Path("demo/flux-digits"), help="folder to take them from")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    shape, device = shapes[args.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")

    started = time.perf_counter()
    pipeline = build(shape, args.tokenizers, device)
    built = time.perf_counter()
    deviation = check_picture(pipeline, shape.checked_size)
    checked = time.perf_counter()
    save(pipeline, args.out, shape.max_shard_size)
    saved = time.perf_counter()

    for name, model in networks(pipeline).items():
        print(f"{name}: {parameters(model):.3f} B parameters")
    print(
        f"{gigabytes_in(args.out):.2f} GB in {args.out}: built in {built - started:.1f} s on {device}, "
        f"checked in {checked - built:.1f} s (pixels deviate by {deviation:.3f}), written in {saved - checked:.1f} s"
    )
