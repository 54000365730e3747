"""Describes values so that the description means the same in another process: functions, classes, a model's structure.

This module imports torch, but not its compiler.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
import types
import typing
from typing import Any

import torch
from torch import nn

from compile_cache.key.environment import digest

# torch's operators, and those of one overload each.
OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.default))
# Generated GPU code assumes this alignment of its inputs (torch/_inductor/utils.py).
INPUT_ALIGNMENT_BYTES = 16

# Nested lists of text, numbers and None. JSON keeps them unchanged.
Description = Any

# The type of `typing.Union` and `typing.Literal`.
_SPECIAL_FORM = type(typing.ClassVar)
# In a text, a sign of an object that only this process has.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DESCRIPTORS = (types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType, *_DESCRIPTORS)


class NotDescribedError(TypeError):
    """Only this process can tell a value from others of its type."""


def class_name(kind: type) -> str:
    """`module.qualified.name`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(value: Any) -> Description:
    """The description of `value`.

    | value | described by |
    | --- | --- |
    | constant | its value |
    | function, code | its code |
    | class, module, builtin, member of an enumeration | its name |
    | tuple, list, set, union or generic type of these | its parts |

    Raises:
        NotDescribedError: `value` is none of these.
    """
    if isinstance(value, enum.Enum):
        return ["member", class_name(type(value)), value.name]
    if type(value) in _PLAIN or isinstance(value, _TORCH_CONSTANTS):
        return [type(value).__name__, repr(value)]
    if isinstance(value, str):  # of a class of its own
        return [class_name(type(value)), str.__repr__(value)]
    if isinstance(value, type):
        return ["class", class_name(value)]
    if (origin := typing.get_origin(value)) is not None:  # `int | None`, `list[int]`, `typing.Optional[int]`
        kind = class_name(type(value))
        return ["generic", kind, describe(origin), *(describe(part) for part in typing.get_args(value))]
    if isinstance(value, _SPECIAL_FORM):
        return ["special form", repr(value)]
    if isinstance(value, types.ModuleType):
        return ["module", value.__name__]
    if isinstance(value, types.CodeType):
        return ["code", code_digest(value)]
    if isinstance(value, types.FunctionType):
        return ["function", value.__module__, value.__qualname__, code_digest(value.__code__)]
    if isinstance(value, tuple | list):
        return [class_name(type(value)), [describe(part) for part in value]]
    if isinstance(value, set | frozenset):
        return [type(value).__name__, sorted((describe(part) for part in value), key=repr)]
    return _describe_callable(value)


def _describe_callable(value: Any) -> Description:
    if isinstance(value, types.MethodType):
        owner = value.__self__
        return ["method", describe(value.__func__), class_name(owner if isinstance(owner, type) else type(owner))]
    if isinstance(value, property):
        return ["property", *(describe(part) for part in (value.fget, value.fset))]
    if isinstance(value, staticmethod | classmethod):
        return [type(value).__name__, describe(value.__func__)]
    if isinstance(value, _BUILTINS):
        owner = getattr(value, "__self__", None)
        owner = getattr(value, "__objclass__", None) if owner is None else owner
        if owner is None or isinstance(owner, type | types.ModuleType):
            return ["builtin", describe(owner), value.__qualname__]
        # pybind11's functions are methods of an object of this process, but their module has them too.
        name = getattr(value, "__name__", "")
        if getattr(sys.modules.get(value.__module__ or ""), name, None) is value:
            return ["builtin", value.__module__, name]
    if isinstance(value, OPERATORS):
        return ["operator", str(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        return ["cached", describe(value.__wrapped__)]
    raise NotDescribedError(class_name(type(value)))


@functools.cache
def code_digest(code: types.CodeType) -> str:
    """The digest of what the code does, equal in two processes with the same code."""
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return digest([code.co_code.hex(), counts, names, [describe(part) for part in code.co_consts]])


def structure(module: nn.Module) -> tuple[Any, ...]:
    """The tree of a module: its classes and their `forward`, and its parameters and buffers without their values.
    Alignment counts: kernels compiled for aligned weights read 16 bytes at a time, and check nothing."""
    return tuple(
        (name, type(part), type(part).forward, part.training, tuple((key, _weight(t)) for key, t in tensors))
        for name, part in module.named_modules(remove_duplicate=False)
        for tensors in [(*part._parameters.items(), *part._buffers.items())]
    )


@functools.cache
def structure_digest(tree: tuple[Any, ...]) -> str:
    """The digest of a `structure`, equal in all processes."""
    return digest([[name, class_name(kind), training, str(tensors)] for name, kind, _, training, tensors in tree])


def _weight(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    kind = type(tensor).__qualname__, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return *kind, tuple(tensor.shape), str(tensor.layout)
    return *kind, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % INPUT_ALIGNMENT_BYTES == 0
