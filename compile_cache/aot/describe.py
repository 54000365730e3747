"""What compiled code depends on, described so that it means the same in another process: functions, classes, a model's
structure, a call's inputs, and torch's switches.
"""

from __future__ import annotations

import enum
import functools
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from compile_cache.aot.adapter import INPUT_ALIGNMENT_BYTES, OPERATORS, pytree
from compile_cache.aot.files import digest

# What `describe` gives: nested lists of text, numbers and None, which JSON keeps as they are.
Description = Any

# What `typing.Union` and `typing.Literal` are.
_SPECIAL_FORM = type(typing.ClassVar)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_DESCRIPTORS = (types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)


class NotDescribedError(TypeError):
    """A value that only this process can tell from another one of its type."""


def class_name(kind: type) -> str:
    """`module.qualified.name`."""
    return f"{kind.__module__}.{kind.__qualname__}"


def describe(value: Any) -> Description:
    """What `value` is: constants by value; functions and code by what they do; classes, modules, builtins and the
    members of an enumeration by name; tuples, lists, sets, unions and generic types of these by their parts.

    Raises:
        NotDescribedError: it is none of them.
    """
    if isinstance(value, enum.Enum):
        return ["member", class_name(type(value)), value.name]
    if type(value) in _PLAIN or isinstance(value, _TORCH_CONSTANTS):
        return [type(value).__name__, repr(value)]
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
    if isinstance(value, _DESCRIPTORS):
        return ["descriptor", class_name(value.__objclass__), value.__name__]
    if isinstance(value, property):
        return ["property", *(describe(part) for part in (value.fget, value.fset))]
    if isinstance(value, staticmethod | classmethod):
        return [type(value).__name__, describe(value.__func__)]
    if isinstance(value, _BUILTINS):
        owner = getattr(value, "__self__", None)
        owner = getattr(value, "__objclass__", None) if owner is None else owner
        if owner is None or isinstance(owner, type | types.ModuleType):
            return ["builtin", describe(owner), value.__qualname__]
        # pybind11's functions belong to a record of this process, and are their module's all the same.
        name = getattr(value, "__name__", "")
        if getattr(sys.modules.get(value.__module__ or ""), name, None) is value:
            return ["builtin", value.__module__, name]
    if isinstance(value, OPERATORS):
        return ["operator", str(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        return ["cached", describe(value.__wrapped__)]
    raise NotDescribedError(class_name(type(value)))


def code_digest(code: types.CodeType) -> str:
    """Of everything that code does, and of nothing that differs between two processes that do the same."""
    return digest(_code_parts(code))


def _code_parts(code: types.CodeType) -> Description:
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return [code.co_code.hex(), [*counts], [[*group] for group in names], [_constant(part) for part in code.co_consts]]


def _constant(value: Any) -> Description:
    if isinstance(value, types.CodeType):
        return _code_parts(value)
    if isinstance(value, tuple):
        return [_constant(part) for part in value]
    return describe(value)


def structure(module: nn.Module) -> tuple[Any, ...]:
    """The tree of a module: classes, and of parameters and buffers all but the values. Alignment is part of it: kernels
    compiled for aligned weights read 16 bytes at a time, and nobody asks again."""
    return tuple(
        (name, type(part), part.training, tuple((key, _weight(value)) for key, value in _tensors_of(part)))
        for name, part in module.named_modules(remove_duplicate=False)
    )


@functools.cache
def structure_digest(tree: tuple[Any, ...]) -> str:
    """What names a `structure` in other processes as well."""
    return digest([[name, class_name(kind), training, str(tensors)] for name, kind, training, tensors in tree])


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from module._parameters.items()
    yield from module._buffers.items()


def _weight(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    kind = type(tensor).__qualname__, tensor.dtype, tensor.device, tensor.requires_grad
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
        return *kind, tuple(tensor.shape), str(tensor.layout)
    return *kind, tuple(tensor.shape), tensor.stride(), tensor.data_ptr() % INPUT_ALIGNMENT_BYTES == 0


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any], with_sizes: bool) -> Description:
    """The inputs of a call: nesting, tensors without their values (and, unless `with_sizes`, without their sizes),
    constants with theirs, other objects by class, and which leaves are the same object.

    Raises:
        NotDescribedError: a dictionary has a key that only this process can tell from another one.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    if _ADDRESS.search(str(spec)):
        raise NotDescribedError("a dictionary with keys that cannot be described")
    first: dict[int, int] = {}
    described = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            described.append(["tensor", first.setdefault(id(leaf), number), _tensor(leaf, with_sizes)])
        else:
            described.append(_described_leaf(leaf))
    return [str(spec), described]


def _described_leaf(leaf: Any) -> Description:
    try:
        return describe(leaf)
    except NotDescribedError:
        return ["object", class_name(type(leaf))]


def _tensor(tensor: torch.Tensor | None, with_sizes: bool) -> Description:
    if tensor is None:
        return None
    sizes = [list(tensor.shape), list(_strides(tensor))] if with_sizes and tensor.layout == torch.strided else []
    flags = [tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()]
    return [
        class_name(type(tensor)),
        str(tensor.dtype),
        str(tensor.device),
        str(tensor.layout),
        tensor.dim(),
        *sizes,
        flags,
    ]


def _strides(tensor: torch.Tensor) -> Iterator[int]:
    """The strides, without those of dimensions of size 1, which no address depends on."""
    return (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def is_inference(described: Any) -> bool:
    """Whether inference mode was on, in what `describe_switches` gave and was read from a file."""
    return isinstance(described, Mapping) and described.get("inference mode") == "True"
