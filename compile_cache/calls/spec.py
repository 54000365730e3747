"""`CallSpec`, the one description of a kind of call; and what calls have in common.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compile_cache.calls.description import ADDRESS, Description, NotDescribedError, class_name, describe, structure
from compile_cache.calls.module_state import own_tensors, parts_of
from compile_cache.calls.overlaps import OWN_TENSORS, overlaps
from compile_cache.calls.torch_call import Args, Call, Kwargs, pytree

# So many kinds of calls, and graphs of one function, are kept. Dynamo's own limit is 8; a class compiled for several
# image sizes and input strides needs more.
RECOMPILE_LIMIT = 64
_MOST_SIZES_SHOWN = 6
_NUMBERS = (int, float, complex)
# What calls are told apart by as it is.
_PLAIN = frozenset({*_NUMBERS, bool, str, bytes, type(None)})


class TensorSpec(NamedTuple):
    """A tensor without its values. `strides` leaves out dimensions of size 1, where no address depends on them. `first`
    is the number of the first leaf that is the same object."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: type
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    flags: tuple[bool, ...]
    first: int

    @property
    def without_sizes(self) -> TensorSpec:
        """The same with the number of dimensions in place of sizes and strides."""
        return self._replace(shape=(len(self.shape),), strides=())


@dataclass(frozen=True, slots=True)
class CallSpec:
    """A kind of call of a class: the nesting of its inputs, its tensors without values, its other inputs, the tensors
    that overlap among these and the module's own, the module's `structure`, and the modes of torch.

    `numbers` has the call's numbers as text, because NaN is not equal to itself, and 1 is equal to 1.0 and True. They
    are no part of the kind: each call may have others. `open` has the (tensor, dimension) pairs whose sizes code for
    the kind leaves open; it is no part of the kind either.

    The modes that matter in another process are parts of an artifact's name: see `Artifacts`.
    """

    nesting: str
    leaves: tuple[TensorSpec | str, ...]
    overlaps: tuple[tuple[int, int], ...]
    structure: tuple[Any, ...]
    modes: tuple[Hashable, ...]
    numbers: tuple[str, ...] = field(compare=False)
    open: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, call: Call) -> CallSpec:
        """The kind of this call. Takes some tens of microseconds, and some for each part of the module."""
        module = call[0]
        leaves, spec = pytree.tree_flatten(call[1:])
        first: dict[int, int] = {}
        described = tuple(_described(leaf, first.setdefault(id(leaf), number)) for number, leaf in enumerate(leaves))
        numbers = tuple(repr(leaf) for leaf in leaves if isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool))
        overlapping = overlaps([*leaves, *own_tensors(parts_of(module))])
        return cls(str(spec), described, overlapping, structure(module), modes(), numbers)

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The sizes of all tensors."""
        return tuple(leaf.shape for leaf in self.leaves if isinstance(leaf, TensorSpec))

    @property
    def without_sizes(self) -> CallSpec:
        """The same with the numbers of dimensions in place of sizes and strides of tensors."""
        leaves = (leaf.without_sizes if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves)
        return replace(self, leaves=tuple(leaves))

    @property
    def stored(self) -> Description:
        """The inputs in JSON's types, equal in all processes.

        Raises:
            NotDescribedError: only this process can tell a dictionary's key from others.
        """
        if ADDRESS.search(self.nesting):
            raise NotDescribedError("a dictionary with keys that cannot be described")
        return [self.nesting, [str(leaf) for leaf in self.leaves], [list(pair) for pair in self.overlaps]]

    def __str__(self) -> str:
        """The sizes in words: `4x16, scalar`."""
        shown = ["x".join(map(str, size)) or "scalar" for size in self.sizes[:_MOST_SIZES_SHOWN]]
        return ", ".join(shown + ["…"] * (len(self.sizes) > _MOST_SIZES_SHOWN)) or "inputs without sizes"


def modes() -> tuple[Hashable, ...]:
    """The modes of torch in this thread that a model's code may enter."""
    autocast = autocast_dtype("cpu"), autocast_dtype("cuda")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast, torch.get_default_dtype()


def autocast_dtype(device: str) -> str:
    """The type that autocast computes with; empty if it is off."""
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.") if torch.is_autocast_enabled(device) else ""


def _described(leaf: Any, first: int) -> TensorSpec | str:
    """A tensor without values; a number's class; a constant, a function or a class; the class of any other object."""
    if isinstance(leaf, Tensor) and not leaf.is_nested:
        shape = tuple(leaf.shape)
        strides = leaf.stride() if leaf.layout == torch.strided else ()
        strides = tuple([stride for size, stride in zip(shape, strides, strict=False) if size != 1])
        flags = leaf.requires_grad, leaf.is_inference(), leaf.is_conj(), leaf.is_neg()
        return TensorSpec(shape, strides, type(leaf), leaf.dtype, leaf.device, leaf.layout, flags, first)
    if type(leaf) in _NUMBERS:
        return class_name(type(leaf))
    try:
        return str(describe(leaf))
    except NotDescribedError:
        return f"object {class_name(type(leaf))}"


def likeness(values: Iterable[Any]) -> tuple[Any, ...]:
    """What two calls of a module have in common that are served alike: each tensor's class, type, shape, strides and
    device, nested ones too; numbers, texts and flags; other objects by identity. Takes about a microsecond a tensor."""
    return tuple([_like(value) for value in values])


def _like(value: Any) -> Hashable:
    kind = type(value)
    if kind in _PLAIN:
        return kind, repr(value) if kind in (float, complex) else value  # 0.0 is equal to -0.0
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        flags = value.requires_grad, value.is_inference()
        return kind, value.dtype, value.shape, value.stride(), value.device, flags
    if isinstance(value, list | tuple):
        return kind, likeness(value)
    if isinstance(value, dict):
        return kind, likeness(value), likeness(value.values())
    return kind, id(value)


def top_sizes(args: Args, kwargs: Kwargs) -> tuple[torch.Size, ...]:
    """The sizes of the tensors that are inputs themselves. Takes about a microsecond."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return tuple([tensor.shape for tensor in tensors if not tensor.is_nested])


def growth(args: Args, kwargs: Kwargs) -> Hashable:
    """What calls have in common that make one cache larger: the size of the first input, and all inputs' classes. None
    if the first input is no tensor of torch's own."""
    values = (*args, *kwargs.values())
    if not values or type(values[0]) not in OWN_TENSORS or values[0].is_nested:
        return None
    return values[0].shape, *map(type, values)


def with_plain_strides(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The same arguments; in dimensions of size 1, tensors have the strides of a contiguous tensor.

    No address depends on these strides, but torch would compile and guard each variant separately. A slice of a batch
    of one is such a variant. While gradients are recorded nothing changes, because torch would record the view. What
    was one tensor stays one, and a tensor with attributes stays as it is.
    """
    if torch.is_grad_enabled():
        return args, kwargs
    values = (*args, *kwargs.values())
    strided = [_plain(value) for value in values]
    if all(map(operator.is_, strided, values)):
        return args, kwargs
    plain = dict(zip(map(id, values), strided, strict=True))
    return tuple(plain[id(value)] for value in args), {name: plain[id(value)] for name, value in kwargs.items()}


def _plain(value: Any) -> Any:
    if type(value) is not Tensor or value.is_nested or value.layout != torch.strided:
        return value
    # Of more dimensions, strides tell whether a picture is stored channels first or last.
    if 1 not in value.shape or value.dim() > 3 or vars(value):
        return value
    strides, plain = value.stride(), []
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        plain.append(step if size == 1 else stride)
        step = size * plain[-1]
    plain.reverse()
    return value if tuple(plain) == strides else value.as_strided(value.shape, plain)


def on_gpu(call: Call) -> bool:
    """Whether a call has tensors, none of them on the CPU. Then the host's processor does not matter."""
    own = [tensors for part in parts_of(call[0]) for tensors in (part._parameters, part._buffers)]
    leaves = [*pytree.tree_leaves(call[1:]), *(tensor for tensors in own for tensor in tensors.values())]
    devices = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return bool(devices) and "cpu" not in devices
