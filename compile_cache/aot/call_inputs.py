"""The inputs of a call as JSON, and inputs of the same kind made from it, in another process.

An artifact's header has this description of the call that it was made of:

    null, true, 3, "text"            as they are
    ["float", "0.5"]                 as Python writes it; also ["bytes", "00ff"]
    ["dtype", "float32"]             also ["device", "cuda:0"]
    ["member", module, class, name]  a member of an enumeration
    ["tuple", [...]]                 also ["list", [...]] and ["dict", [[key, value], ...]]
    ["tensor", {...}]                dtype, device, shape, stride, requires_grad, is_inference
    ["same", 0]                      the first tensor of the description once more

A description is text that somebody stored. Each size, count and name in it is checked before memory is taken. Nothing
is unpickled, and no module is imported: an enumeration is looked up in the modules that are there.

This module imports torch.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Of all tensors together that `make_call` makes.
MOST_BYTES = 2 << 30
# No call of a model has more: such sizes are a mistake.
_MOST_DESCRIBED_BYTES = 1 << 42
_MOST_PARTS = 10_000
_MOST_DEPTH = 32
_MOST_CHARACTERS = 1 << 20
_MOST_DIMENSIONS = 32
_LARGEST_INT = 1 << 63
_FLOAT_CHARACTERS = 32
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,3})?")
_FIELDS = frozenset({"dtype", "device", "shape", "stride", "requires_grad", "is_inference"})
_SHOWN_CHARACTERS = 100

_Node = Any


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any | None:
    """The inputs as JSON values, tensors without what they hold.

    None if an input is something else than a plain tensor, a plain constant, or a dictionary, list or tuple of these.
    """
    try:
        describer = _Describer()
        description = [describer.describe(args, 0), describer.describe(dict(kwargs), 0)]
        _Parser(_MOST_DESCRIBED_BYTES).parse_call(description)
    except ValueError:
        return None
    return description


def make_call(description: Any, most_bytes: int = MOST_BYTES) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """New inputs of the kind that `describe_call` described: args and kwargs. Each tensor is full of zeros.

    Raises:
        ValueError: it is no description, its tensors take more than `most_bytes`, or torch cannot make them here.
    """
    parser = _Parser(most_bytes)
    args, kwargs = parser.parse_call(description)
    tensors = [_zeros(layout) for layout in parser.tensors]
    return _filled(args, tensors), _filled(kwargs, tensors)


class _Describer:
    """Describes one call. Raises ValueError for what a description does not have."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}
        self._parts = 0

    def describe(self, value: Any, depth: int) -> _Node:
        self._parts += 1
        if self._parts > _MOST_PARTS or depth > _MOST_DEPTH:
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


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor to be made."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_inference: bool

    @property
    def storage_size(self) -> int:
        """How many elements the tensor's memory holds."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensor of this number belongs."""

    number: int


class _Parser:
    """Checks one description, and gives its values with a `_Place` for each tensor. Raises ValueError."""

    def __init__(self, most_bytes: int) -> None:
        self.tensors: list[_Layout] = []
        self._most_bytes = self._left_bytes = most_bytes
        self._left_parts = _MOST_PARTS
        self._left_characters = _MOST_CHARACTERS
        self._parsers: dict[str, Callable[[Any], Any]] = {
            "float": self._parse_float,
            "bytes": lambda value: bytes.fromhex(self._text(value)),
            "dtype": lambda value: _parse_dtype(self._text(value)),
            "device": lambda value: _parse_device(self._text(value)),
            "tensor": self._parse_tensor,
            "same": self._parse_same,
        }

    def parse_call(self, description: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Args and kwargs."""
        if not isinstance(description, list) or len(description) != 2:
            raise ValueError("it is not a list of args and kwargs")
        args, kwargs = (self._parse(node, 0) for node in description)
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise ValueError("its args are no tuple, or its kwargs no dictionary")
        if not all(isinstance(name, str) for name in kwargs):
            raise ValueError("a keyword is no text")
        return args, kwargs

    def _parse(self, node: _Node, depth: int) -> Any:
        self._left_parts -= 1
        if self._left_parts < 0:
            raise ValueError(f"it has more than {_MOST_PARTS} parts")
        if depth > _MOST_DEPTH:
            raise ValueError(f"it is nested more than {_MOST_DEPTH} deep")
        if node is None or type(node) is bool:
            return node
        if type(node) is int:
            return _int(node, -_LARGEST_INT, _LARGEST_INT)
        if type(node) is str:
            return self._text(node)
        if not isinstance(node, list) or not node or not isinstance(node[0], str):
            raise ValueError(f"{_shown(node)} is no value")
        kind, *values = node
        if kind == "member":
            return _parse_member([self._text(value) for value in values])
        if len(values) != 1:
            raise ValueError(f"a {_shown(kind)} has {len(values)} values")
        return self._parse_kind(kind, values[0], depth)

    def _parse_kind(self, kind: str, value: Any, depth: int) -> Any:
        if kind in self._parsers:
            return self._parsers[kind](value)
        if kind not in ("tuple", "list", "dict"):
            raise ValueError(f"{_shown(kind)} is no kind of value")
        if not isinstance(value, list):
            raise ValueError(f"a {kind} is not described by a list")
        if kind == "dict":
            return self._parse_dict(value, depth)
        parts = [self._parse(part, depth + 1) for part in value]
        return tuple(parts) if kind == "tuple" else parts

    def _parse_dict(self, pairs: list[Any], depth: int) -> dict[Any, Any]:
        parsed: dict[Any, Any] = {}
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise ValueError(f"{_shown(pair)} is no key with its value")
            key = self._parse(pair[0], depth + 1)
            if type(key) not in (str, int, bool, type(None)) or key in parsed:
                raise ValueError(f"the key {_shown(key)} is no constant, or there twice")
            parsed[key] = self._parse(pair[1], depth + 1)
        return parsed

    def _parse_float(self, value: Any) -> float:
        text = self._text(value)
        if len(text) > _FLOAT_CHARACTERS:
            raise ValueError(f"{_shown(text)} is no number")
        return float(text)

    def _parse_same(self, value: Any) -> _Place:
        return _Place(_int(value, 0, len(self.tensors)))

    def _parse_tensor(self, value: Any) -> _Place:
        if not isinstance(value, dict) or value.keys() != _FIELDS:
            raise ValueError(f"a tensor is not described by {', '.join(sorted(_FIELDS))}")
        shape, stride = (self._ints(value[name]) for name in ("shape", "stride"))
        if len(shape) != len(stride):
            raise ValueError("a tensor has more sizes than strides, or fewer")
        flags = value["requires_grad"], value["is_inference"]
        if not all(type(flag) is bool for flag in flags):
            raise ValueError("a tensor's flag is neither true nor false")
        dtype, device = _parse_dtype(self._text(value["dtype"])), _parse_device(self._text(value["device"]))
        if flags[0] and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"a tensor of {dtype} has no gradient")
        layout = _Layout(dtype, device, shape, stride, *flags)
        # An expanded tensor takes little memory; what is computed from it takes more.
        self._left_bytes -= max(layout.storage_size, math.prod(shape)) * dtype.itemsize
        if self._left_bytes < 0:
            raise ValueError(f"its tensors take more than {self._most_bytes} bytes")
        self.tensors.append(layout)
        return _Place(len(self.tensors) - 1)

    def _ints(self, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor's sizes or strides are no list of at most {_MOST_DIMENSIONS}")
        return tuple(_int(number, 0, _LARGEST_INT) for number in value)

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{_shown(value)} is no text")
        self._left_characters -= len(value)
        if self._left_characters < 0:
            raise ValueError(f"its texts have more than {_MOST_CHARACTERS} characters")
        return value


def _int(value: Any, least: int, end: int) -> int:
    if type(value) is not int or not least <= value < end:
        raise ValueError(f"{_shown(value)} is no whole number from {least} to {end - 1}")
    return value


def _shown(value: Any) -> str:
    """Somebody else's value as a part of a message. A nested one is not written out."""
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARACTERS])
    is_short = value is None or isinstance(value, bool | float) or (type(value) is int and abs(value) < _LARGEST_INT**2)
    return repr(value) if is_short else f"a value of type {type(value).__name__}"


def _parse_dtype(name: str) -> torch.dtype:
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{_shown(name)} is no dtype of torch {torch.__version__}")
    return dtype


def _parse_device(name: str) -> torch.device:
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"{_shown(name)} is no device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{_shown(name)} is no device of torch {torch.__version__}") from error


def _parse_member(names: list[str]) -> enum.Enum:
    """Looked up without running any code: `getattr` of a module may import another one."""
    if len(names) != 3:
        raise ValueError("a member of an enumeration is not described by module, class and name")
    module, qualified, name = names
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)) or name not in found.__members__:
        raise ValueError(f"{_shown('.'.join(names))} is no member of an enumeration that is imported here")
    return found.__members__[name]


def _zeros(layout: _Layout) -> torch.Tensor:
    """Raises ValueError where torch cannot make it: the device is not there, or its memory is full."""
    try:
        with torch.inference_mode(layout.is_inference), torch.no_grad():
            tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
            # In one piece: torch does not write an expanded tensor.
            tensor.as_strided((layout.storage_size,), (1,)).zero_()
            return tensor.requires_grad_() if layout.requires_grad else tensor
    except Exception as error:  # of many types, such as AssertionError without CUDA
        line = (str(error).splitlines() or [""])[0][:_SHOWN_CHARACTERS]
        text = f"{_dtype_name(layout.dtype)}{list(layout.shape)} on {layout.device}"
        raise ValueError(f"torch cannot make a tensor {text}: {type(error).__name__}: {line}") from error


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with the tensors in their places."""
    if isinstance(value, _Place):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _filled(part, tensors) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(part, tensors) for part in value)
    return value
