"""Describes values so that the description means the same in another process: functions, classes, a model's structure,
a call's inputs, and torch's switches.
"""

from __future__ import annotations

import contextlib
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

from compile_cache.inductor.adapter import INPUT_ALIGNMENT_BYTES, OPERATORS, pytree
from compile_cache.inductor.files import digest
from compile_cache.inductor.spec import autocast_dtype, overlaps
from compile_cache.inductor.switches import AUTOCAST, set_autocast

# Nested lists of text, numbers and None. JSON keeps them unchanged.
Description = Any

# The type of `typing.Union` and `typing.Literal`.
_SPECIAL_FORM = type(typing.ClassVar)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes)
_TORCH_CONSTANTS = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTINS = (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
_DESCRIPTORS = (types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType)


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
        # pybind11's functions are methods of an object of this process, but their module has them too.
        name = getattr(value, "__name__", "")
        if getattr(sys.modules.get(value.__module__ or ""), name, None) is value:
            return ["builtin", value.__module__, name]
    if isinstance(value, OPERATORS):
        return ["operator", str(value)]
    if isinstance(value, functools._lru_cache_wrapper):
        return ["cached", describe(value.__wrapped__)]
    raise NotDescribedError(class_name(type(value)))


def code_digest(code: types.CodeType) -> str:
    """The digest of what the code does, equal in two processes with the same code."""
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
    """The tree of a module: its classes, and its parameters and buffers without their values. Alignment counts: kernels
    compiled for aligned weights read 16 bytes at a time, and check nothing."""
    return tuple(
        (name, type(part), part.training, tuple((key, _weight(value)) for key, value in _tensors_of(part)))
        for name, part in module.named_modules(remove_duplicate=False)
    )


@functools.cache
def structure_digest(tree: tuple[Any, ...]) -> str:
    """The digest of a `structure`, equal in all processes."""
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
    """The description of a call's inputs: their nesting, tensors without values (and without sizes, unless
    `with_sizes`), constants with values but for numbers, other objects by class, and which leaves are the same object
    or overlap.

    Raises:
        NotDescribedError: only this process can tell a dictionary's key from others.
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
    return [str(spec), described, list(overlaps(leaves))]


def _described_leaf(leaf: Any) -> Description:
    if type(leaf) in (int, float, complex):
        return ["number", class_name(type(leaf))]
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
    """The strides, except in dimensions of size 1, where no address depends on them."""
    return (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


@contextlib.contextmanager
def modes_of(described: Any) -> Iterator[None]:
    """The modes of `described`, a result of `describe_switches` that was read from a file: those of which a call has
    guards."""
    modes = described if isinstance(described, Mapping) else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.inference_mode(modes.get("inference mode") == "True"))
        for name, device in AUTOCAST.items():
            stack.callback(set_autocast, device, autocast_dtype(device))
            set_autocast(device, str(modes.get(name) or ""))
        yield
