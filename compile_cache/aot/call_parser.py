"""Checks a description of a call's inputs (call_inputs.py) before anything is made from it.

A description is text of unknown origin. Each size, count and name in it is checked before memory is taken. Nothing is
unpickled, and no module is imported: an enumeration must be in a module that is already imported.

This module imports torch.
"""

from __future__ import annotations

import enum
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

MOST_PARTS = 10_000
MOST_DEPTH = 32
SHOWN_CHARACTERS = 100

_MOST_CHARACTERS = 1 << 20
_MOST_DIMENSIONS = 32
_LARGEST_INT = 1 << 63
_FLOAT_CHARACTERS = 32
_DEVICE = re.compile(r"[a-z]{1,16}(:\d{1,3})?")
_FIELDS = frozenset({"dtype", "device", "shape", "stride", "requires_grad", "is_inference"})


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor to be made."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    is_inference: bool

    @property
    def storage_size(self) -> int:
        """The number of elements in the tensor's storage."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the tensor with this number."""

    number: int


class Parser:
    """Checks one description, and makes its values, with a `Place` for each tensor. Raises ValueError."""

    def __init__(self, most_bytes: int) -> None:
        self.tensors: list[Layout] = []
        self._most_bytes = self._left_bytes = most_bytes
        self._left_parts = MOST_PARTS
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
            raise ValueError("its args are no tuple, or its kwargs are no dictionary")
        if not all(isinstance(name, str) for name in kwargs):
            raise ValueError("a keyword is no text")
        return args, kwargs

    def _parse(self, node: Any, depth: int) -> Any:
        self._left_parts -= 1
        if self._left_parts < 0:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        if depth > MOST_DEPTH:
            raise ValueError(f"it is nested more than {MOST_DEPTH} deep")
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
                raise ValueError(f"the key {_shown(key)} is no constant, or occurs twice")
            parsed[key] = self._parse(pair[1], depth + 1)
        return parsed

    def _parse_float(self, value: Any) -> float:
        text = self._text(value)
        if len(text) > _FLOAT_CHARACTERS:
            raise ValueError(f"{_shown(text)} is no number")
        return float(text)

    def _parse_same(self, value: Any) -> Place:
        return Place(_int(value, 0, len(self.tensors)))

    def _parse_tensor(self, value: Any) -> Place:
        if not isinstance(value, dict) or value.keys() != _FIELDS:
            raise ValueError(f"a tensor is not described by {', '.join(sorted(_FIELDS))}")
        shape, stride = (self._ints(value[name]) for name in ("shape", "stride"))
        if len(shape) != len(stride):
            raise ValueError("a tensor has different numbers of sizes and strides")
        flags = value["requires_grad"], value["is_inference"]
        if not all(type(flag) is bool for flag in flags):
            raise ValueError("a tensor's flag is neither true nor false")
        dtype, device = _parse_dtype(self._text(value["dtype"])), _parse_device(self._text(value["device"]))
        if flags[0] and not (dtype.is_floating_point or dtype.is_complex):
            raise ValueError(f"a tensor of {dtype} has no gradient")
        layout = Layout(dtype, device, shape, stride, *flags)
        # An expanded tensor takes little memory, but results computed from it take more.
        self._left_bytes -= max(layout.storage_size, math.prod(shape)) * dtype.itemsize
        if self._left_bytes < 0:
            raise ValueError(f"its tensors take more than {self._most_bytes} bytes")
        self.tensors.append(layout)
        return Place(len(self.tensors) - 1)

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
    """A foreign value as a part of a message. A nested value is only named by its type."""
    if isinstance(value, str):
        return repr(value[:SHOWN_CHARACTERS])
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
    """Look up a member without running code: `getattr` on a module may import another module."""
    if len(names) != 3:
        raise ValueError("a member of an enumeration is not described by module, class and name")
    module, qualified, name = names
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    if not (isinstance(found, type) and issubclass(found, enum.Enum)) or name not in found.__members__:
        raise ValueError(f"{_shown('.'.join(names))} is no member of an enumeration that is imported here")
    return found.__members__[name]
