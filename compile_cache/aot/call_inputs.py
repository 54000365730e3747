"""Describes the inputs of a call as JSON, and makes inputs of the same kind in another process.

An artifact's header has this description of the call that it was made from:

    null, true, 3, "text"            as they are ["float", "0.5"]                 as Python writes it; also ["bytes",
    "00ff"] ["dtype", "float32"]             also ["device", "cuda:0"] ["member", module, class, name]  a member of an
    enumeration ["tuple", [...]]                 also ["list", [...]] and ["dict", [[key, value], ...]] ["tensor",
    {...}]                dtype, device, shape, stride, requires_grad, is_inference ["same", 0]                      the
    first tensor of the description again

call_parser.py checks a description before anything is made from it. This module imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import torch

from compile_cache.aot.call_parser import MOST_DEPTH, MOST_PARTS, SHOWN_CHARACTERS, Layout, Parser, Place

# The limit for all tensors together that `make_call` makes.
MOST_BYTES = 2 << 30
# No call of a model has larger tensors: such sizes are a mistake.
_MOST_DESCRIBED_BYTES = 1 << 42

_Node = Any


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any | None:
    """The inputs as JSON values, tensors without their contents.

    None if an input is not a plain tensor, a plain constant, or a dictionary, list or tuple of these.
    """
    try:
        describer = _Describer()
        description = [describer.describe(args, 0), describer.describe(dict(kwargs), 0)]
        Parser(_MOST_DESCRIBED_BYTES).parse_call(description)
    except ValueError:
        return None
    return description


def make_call(description: Any, most_bytes: int = MOST_BYTES) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """New inputs of the kind that `describe_call` described: args and kwargs. Each tensor is full of zeros.

    Raises:
        ValueError: the description is invalid, its tensors take more than `most_bytes`, or torch cannot make them here.
    """
    parser = Parser(most_bytes)
    args, kwargs = parser.parse_call(description)
    tensors = [_zeros(layout) for layout in parser.tensors]
    return _filled(args, tensors), _filled(kwargs, tensors)


class _Describer:
    """Describes one call. Raises ValueError for an input that cannot be described."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}
        self._parts = 0

    def describe(self, value: Any, depth: int) -> _Node:
        self._parts += 1
        if self._parts > MOST_PARTS or depth > MOST_DEPTH:
            raise ValueError("it has too many parts")
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) in (tuple, list):
            return [type(value).__name__, [self.describe(part, depth + 1) for part in value]]
        if type(value) is dict:
            pairs = [(self.describe(key, depth + 1), self.describe(part, depth + 1)) for key, part in value.items()]
            return ["dict", [[key, part] for key, part in pairs]]
        if isinstance(value, torch.Tensor):
            return self._describe_tensor(value)
        return _describe_constant(value)

    def _describe_tensor(self, tensor: torch.Tensor) -> _Node:
        if id(tensor) in self._tensors:
            return ["same", self._tensors[id(tensor)]]
        if not _is_plain(tensor):
            raise ValueError("it has a tensor of another kind")
        self._tensors[id(tensor)] = len(self._tensors)
        return [
            "tensor",
            {
                "dtype": _dtype_name(tensor.dtype),
                "device": str(tensor.device),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "requires_grad": tensor.requires_grad,
                "is_inference": tensor.is_inference(),
            },
        ]


def _is_plain(tensor: torch.Tensor) -> bool:
    is_strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return type(tensor) is torch.Tensor and is_strided and not tensor.is_conj() and not tensor.is_neg()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_constant(value: Any) -> _Node:
    if isinstance(value, enum.Enum):
        kind = type(value)
        return ["member", kind.__module__, kind.__qualname__, value.name]
    if type(value) is float:
        return ["float", repr(value)]
    if type(value) is bytes:
        return ["bytes", value.hex()]
    if isinstance(value, torch.dtype):
        return ["dtype", _dtype_name(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    raise ValueError("it has an object that is no constant")


def _zeros(layout: Layout) -> torch.Tensor:
    """A tensor of zeros. Raises ValueError if torch cannot make it: the device is missing, or its memory is full."""
    try:
        with torch.inference_mode(layout.is_inference), torch.no_grad():
            tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
            # Fill the whole storage, because torch does not write to an expanded tensor.
            tensor.as_strided((layout.storage_size,), (1,)).zero_()
            return tensor.requires_grad_() if layout.requires_grad else tensor
    except Exception as error:  # many types, such as AssertionError without CUDA
        line = (str(error).splitlines() or [""])[0][:SHOWN_CHARACTERS]
        text = f"{_dtype_name(layout.dtype)}{list(layout.shape)} on {layout.device}"
        raise ValueError(f"torch cannot make a tensor {text}: {type(error).__name__}: {line}") from error


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with the tensors in their places."""
    if isinstance(value, Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, tensors) for part in value)
    return value
