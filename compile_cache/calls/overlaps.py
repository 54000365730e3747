"""The tensors of a call: which it can reach, which of them share memory, and whether the call writes there.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compile_cache.calls.torch_call import Call, pytree
from compile_cache.errors import ArtifactError, first_line

OWN_TENSORS = (Tensor, nn.Parameter)


def span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    first = int(tensor.storage_offset())
    shape = tensor.shape
    if 0 in shape:
        return 0, 0
    items = 1 + sum((int(size) - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
    return first * tensor.itemsize, (first + items) * tensor.itemsize


def storage_key(tensor: Tensor) -> int:
    """The identity of a tensor's storage, as long as that exists."""
    return int(tensor.untyped_storage()._cdata)


def overlaps(values: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """The pairs of tensors whose memory overlaps, by number: each tensor that overlaps an earlier one, and the first
    such.

    torch's guards see when two inputs are one object. They do not see whether inputs overlap.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) < 2:
        return ()
    storages = [storage_key(tensor) if is_plain(tensor) else id(tensor) for tensor in tensors]
    if len(set(storages)) == len(storages):
        return ()
    spans = [
        (storage, *(span(tensor) if is_plain(tensor) else (0, 1)))
        for storage, tensor in zip(storages, tensors, strict=True)
    ]
    firsts = [next(first for first, other in enumerate(spans) if _is_overlap(one, other)) for one in spans]
    return tuple([(number, first) for number, first in enumerate(firsts) if number != first])


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, with a storage of its own."""
    return tensor.layout == torch.strided and type(tensor) in OWN_TENSORS and not tensor.is_nested


def _is_overlap(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one is other or (one[0] == other[0] and one[1] < other[2] and other[1] < one[2])


def reachable_tensors(values: Iterable[Any], *others: type) -> list[Tensor]:
    """All tensors that these values can reach, each once: in a call, its module's, its inputs, and those that objects
    among these hold. Not through objects of the `others`. It runs nothing of an object's own, such as `__getattr__`."""
    tensors, seen, values = list[Tensor](), dict[int, Any](), [*values]
    while values:
        value = values.pop()
        kind = type(value)
        if id(value) in seen or issubclass(kind, (type, types.ModuleType, *others)):
            continue
        seen[id(value)] = value
        if issubclass(kind, Tensor) and not value.is_nested:
            tensors.append(value)
        if issubclass(kind, dict):
            values += dict.values(value)
        elif issubclass(kind, list | tuple | set | frozenset):
            values += value
        if kind.__dictoffset__:
            values += vars(value).values()
        for name in slots_of(kind):  # type: ignore[arg-type]
            with contextlib.suppress(AttributeError):  # it is not set
                values.append(object.__getattribute__(value, name))
    return tensors


@functools.cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the slots of a class and of those that it inherits from."""
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def writes_where_tensors_overlap(call: Call) -> bool:
    """Whether this call, which is run for it if tensors of it overlap, writes into memory that they share.

    torch compiles such a call for a base that it finds or makes in place of the tensors (torch/_functorch,
    `merge_view_inputs`), so the code depends on more than its guards say. It takes tensors of one storage for disjoint
    if they are contiguous and have no byte in common.

    Raises:
        ArtifactError: the run failed.
        MemoryError, torch.OutOfMemoryError: memory ran out; the call is not to blame.
    """
    overlapping, spans = set[int](), defaultdict[int, list[tuple[int, int]]](list)
    for tensor in filter(is_plain, reachable_tensors(call)):
        if not tensor.numel():
            continue
        storage, (low, high) = storage_key(tensor), span(tensor)
        if not tensor.is_contiguous():
            low, high = 0, sys.maxsize
        if any(low < other_high and other_low < high for other_low, other_high in spans[storage]):
            overlapping.add(storage)
        spans[storage].append((low, high))
    if not overlapping:
        return False
    try:
        with _Writes() as writes:
            module, args, kwargs = call
            module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # an operator of a higher order, such as flex_attention, refuses the mode
        raise ArtifactError(f"its tensors share memory, and what it writes is unknown: {first_line(error)}") from error
    return not overlapping.isdisjoint(writes.storages)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators write into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = set[int]()

    def __torch_dispatch__(self, operator: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run an operator. What its schema marks as written is noted."""
        arguments, kwargs = operator._schema.arguments, kwargs or {}
        values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        written = [values.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
        tensors = [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Tensor)]
        self.storages.update(storage_key(tensor) for tensor in tensors if tensor.layout == torch.strided)
        return operator(*args, **kwargs)
