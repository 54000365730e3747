"""Predictions of a predictor in this process, as Cog's worker calls it: how long each took, and what served it.

Imports no torch: the boot does, after its restore has started.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from cog.input import FieldInfo


@dataclass(frozen=True, slots=True)
class Answer:
    """One prediction. `arrivals_s` are the seconds from its begin to each piece of text.

    `sha256` is of the picture's pixels or of the text. `regions` are the steps of the boot's regions when it ended,
    `served` the steps that served this prediction alone; CUDA graphs that are replayed are in `regions` only.
    """

    seconds: float
    sha256: str
    regions: dict[str, str]
    served: dict[str, str]
    compiling: int
    compiled_now: int
    arrivals_s: tuple[float, ...] = ()

    @property
    def is_precompiled(self) -> bool:
        """Whether nothing is left to compile, and precompiled code served all of it."""
        steps = {*self.regions.values(), *self.served.values()}
        return bool(self.regions) and steps == {"precompiled"} and not self.compiling

    @property
    def is_eager(self) -> bool:
        """Whether no precompiled or compiled code served any of it."""
        return not {"precompiled", "graphs"} & {
            step for steps in (*self.served.values(), *self.regions.values()) for step in steps.split(", ")
        }


class InProcess:
    """A predictor of this process, after its setup."""

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor
        self._metrics: dict[str, Any] = {}
        predictor.record_metric = self._metrics.__setitem__

    def answer(self, **inputs: Any) -> Answer:
        """One prediction; inputs that are left out have their defaults."""
        self._metrics.clear()
        pieces, arrivals_s = list[str](), list[float]()
        begun_s = time.monotonic()
        output = self._predictor.run(**{**self._defaults(), **inputs})
        if not isinstance(output, list):
            for piece in output:
                pieces.append(piece)
                arrivals_s.append(time.monotonic() - begun_s)
        seconds = time.monotonic() - begun_s
        content = pixels(str(output[0])) if isinstance(output, list) else "".join(pieces).encode()
        ours = _nested(self._metrics)["compile_cache"]
        return Answer(
            seconds=seconds,
            sha256=hashlib.sha256(content).hexdigest(),
            regions=ours.get("regions") or {},
            served=ours.get("served") or {},
            compiling=ours["compiling"],
            compiled_now=ours["compiled_now"],
            arrivals_s=tuple(arrivals_s),
        )

    def _defaults(self) -> dict[str, Any]:
        """The value of every input that a request leaves out, as Cog fills them in."""
        inputs = inspect.signature(self._predictor.run).parameters.items()
        given = {name: input.default.default for name, input in inputs if isinstance(input.default, FieldInfo)}
        return {**given, "output_format": "png"} if "output_format" in given else given


def pixels(file: str) -> bytes:
    """The RGB pixels of a picture.

    Raises:
        ValueError: they have one colour, as those of a picture of NaN.
    """
    from PIL import Image

    with Image.open(file) as image:
        picture = image.convert("RGB")
    if picture.getcolors(maxcolors=1):
        raise ValueError(f"{file} has one colour")
    return picture.tobytes()


def _nested(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics whose names have dots, as Cog's server gives them: a dictionary for each part of a name."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        *path, last = name.split(".")
        place = found
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return found


def describe_machine() -> dict[str, str]:
    """Hardware and versions."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else f"none, {torch.get_num_threads()} CPU threads",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version("triton") if on_gpu else "",
        "diffusers": version("diffusers"),
        "transformers": version("transformers"),
    }
