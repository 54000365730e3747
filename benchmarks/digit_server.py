"""Real Cog servers of the demo model, and the pictures that they should draw."""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy
from fresh_boot import ROOT, boot_environment, end
from load import Client
from PIL import Image
from processes import MARK

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, files

# Width and height. The first is warmed up.
SIZES = ((64, 64), (96, 64), (64, 96))
SEEDS = 3
READY_S = 180.0
ANSWER_S = 60.0


def start(work: Path, scope: str, store: Path, mark: str) -> CogServer:
    """A server of the demo model, not READY yet."""
    log = work / f"{time.monotonic_ns()}.log"
    sizes = [f"{width}x{height}" for width, height in SIZES]
    environ = boot_environment(work, "eager" if scope == "off" else "cold", store, scope)
    environ |= {"MODEL": "demo/flux-digits", "IMAGE_SIZES": ",".join(sizes), "WARM_UP_SIZES": sizes[0]}
    environ |= {"COMPILE_CACHE_COLD_START": "background", "HF_HUB_OFFLINE": "1", MARK: mark}
    server = CogServer("predict.py:Predictor", log, environ)
    server.start()
    return server


def inputs(size: tuple[int, int], seed: int) -> dict[str, Any]:
    """A request for a picture."""
    picture = {"prompt": "a handwritten three", "num_inference_steps": 2, "output_format": "png"}
    return {**picture, "width": size[0], "height": size[1], "seed": seed}


def pixels(answer: dict[str, Any]) -> Any:
    """The picture of an answer: [height, width, 3], from 0 to 255."""
    with Image.open(io.BytesIO(files(answer)[0])) as image:
        return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def difference(one: Any, other: Any) -> int:
    """The largest of any pixel; 255 if the sizes differ."""
    return int(abs(one - other).max()) if one.shape == other.shape else 255


def make_references(folder: Path) -> dict[tuple[int, int, int], Any]:
    """What an eager server draws, by width, height and seed."""
    folder.mkdir(parents=True)
    server = start(folder, "off", folder / "no-store", f"{os.getpid()}-eager")
    try:
        server.wait_ready(READY_S)
        return {
            (*size, seed): pixels(Client(server, inputs(size, seed), ANSWER_S).ask())
            for size in SIZES
            for seed in range(SEEDS)
        }
    finally:
        end(server.process)
