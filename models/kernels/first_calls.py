"""Makes a model's slow first calls while its weights load.

CUDA loads each kernel at its first call, and cuDNN plans each shape of an attention or a convolution: 0.5 of the 0.8 s
of an SDXL's warm-up on an H200. So the first boot of a version writes down which calls of operators were slow, in a
file that is stored with the version's code. Later boots make these calls with zeros, on the model's thread, which keeps
cuDNN's plans.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache import Boot
from compile_cache.importable import find

_NAME = "first_calls.json"
# What is faster takes longer to make beside Python.
_LEAST_S = 0.005


def make(boot: Boot) -> None:
    """Make the calls that an earlier boot has written down, until the phase `weights` has ended. If that fails, let
    `note` write them anew.

    Raises:
        Exception: as `make_calls`. The warm-up makes them anyway.
    """
    path = boot.kept_file(_NAME)
    if path is not None and path.exists():
        try:
            make_calls(path.read_text(), lambda: "weights" in boot.report.phases)
        except Exception:
            path.unlink()
            raise


@torch.inference_mode()
def make_calls(noted: str, is_over: Callable[[], bool] = lambda: False) -> None:
    """Make calls of torch's own operators with zeros, unless it `is_over`.

    Raises:
        Exception: any of a call, or these are none.
    """
    for name, *inputs in json.loads(noted):
        if not is_over():
            args, kwargs = _made(inputs)
            find(f"torch.ops:aten.{name}")(*args, **kwargs)


def note(boot: Boot, run: Callable[[Any], object], plan: Iterable[Any]) -> None:
    """On a GPU, run the plan of the warm-up and write down its slow calls, unless an earlier boot has done so. Do this
    before anything is compiled.

    Raises:
        Exception: any of `run`, which the warm-up meets too, or of the noting alone, such as a full disk.
    """
    path = boot.kept_file(_NAME)
    if path is not None and not path.exists() and torch.cuda.is_available():
        path.write_text(slow_calls(run, plan))


def slow_calls(run: Callable[[Any], object], plan: Iterable[Any], least_s: float = _LEAST_S) -> str:
    """The calls of operators in a plan's runs that kept the host for `least_s` or more, slowest first, as JSON: names,
    arguments, and of tensors their sizes and strides."""
    with _Noting(least_s) as noting:
        for inputs in plan:
            run(inputs)
    return f"[{', '.join(sorted(noting.seconds, key=noting.seconds.__getitem__, reverse=True))}]"


class _Noting(TorchDispatchMode):
    """The slow calls, as JSON, and their seconds on the host."""

    def __init__(self, least_s: float) -> None:
        super().__init__()
        self._least_s = least_s
        self.seconds: dict[str, float] = {}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make a call, and note it if it was slow and can be made again."""
        began = time.perf_counter()
        result = operator(*args, **(kwargs or {}))
        seconds = time.perf_counter() - began
        space, _, name = str(operator).partition(".")
        # Attention has this tag for its dropout, which no inference has.
        is_random = torch.Tag.nondeterministic_seeded in operator.tags and "dot_product" not in name
        if seconds >= self._least_s and space == "aten" and not (is_random or name.startswith("_assert")):
            with contextlib.suppress(TypeError):  # it has a generator, or another object
                self.seconds.setdefault(json.dumps([name, args, kwargs or {}], default=_described), seconds)
        return result


def _described(value: object) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor):
        raise TypeError
    dtype, device = str(value.dtype).removeprefix("torch."), value.device.type
    return {"sizes": value.shape, "strides": value.stride(), "dtype": dtype, "device": device}


def _made(value: Any) -> Any:
    """Zeros in place of each description."""
    if isinstance(value, list):
        return [_made(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "strides" not in value:
        return {name: _made(each) for name, each in value.items()}
    sizes, strides = value["sizes"], value["strides"]
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    memory = torch.zeros(max(length, 0), dtype=getattr(torch, value["dtype"]), device=value["device"])
    return memory.as_strided(sizes, strides)
