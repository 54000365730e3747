"""Tensors without their contents, from which another process makes tensors of the same layout.

The description of a tensor is its class, type, shape, strides and flags, and its place in a storage. The description
of a storage is the range of bytes that its tensors use. Views of one storage therefore stay views of one storage.

Nothing here reads, moves or writes the contents of a described tensor, and nothing waits for a device.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from compile_cache.calls.overlaps import OWN_TENSORS, span, storage_key
from compile_cache.errors import NotHandedOver, log

# A copy of a storage begins at the original's address modulo this. No item and no vector load of a kernel is larger.
STORAGE_ALIGNMENT_BYTES = 64
# Where torch's allocator begins storages on a GPU.
_PLACE_BYTES = 512
# The most that the weights of one type take together, unless one of them is larger: then they take as much as it. So
# the weights of a block of FLUX.1 take 0.27 GB, not 0.68 GB. It is larger than a GPU's cache: code is tuned with
# weights that come from memory, as in the server.
_WEIGHTS_BYTES = 256 << 20
# Weights on a GPU are random numbers between -_LARGEST and _LARGEST.
_LARGEST = 0.05
# In every type of 8 bits, these bytes are small positive numbers.
_SMALL_BYTES = 1, 48
# A result of `tensor.__reduce_ex__`: a function, its arguments, attributes, and a function that sets them.
Reduced = tuple[Any, ...]
# The result of `UntypedStorage._share_cuda_`, and the arguments of `UntypedStorage._new_shared_cuda`.
Handle = tuple[Any, ...]


@dataclass(slots=True)
class UsedStorage:
    """A storage and the bytes that its tensors use so far, from `low` to `high`."""

    index: int
    storage: torch.UntypedStorage = field(repr=False)
    dtype: torch.dtype | None
    low: int = 0
    high: int = 0
    is_shared: bool = True
    is_weight: bool = True

    def use(self, low: int, high: int, dtype: torch.dtype, is_shared: bool, is_weight: bool) -> None:
        """Add a tensor. The storage is shared, or a weight's, only if all its tensors are."""
        if high > low:
            self.low = min(self.low, low) if self.high else low
            self.high = max(self.high, high)
        self.dtype = dtype if dtype == self.dtype else None
        self.is_shared = self.is_shared and is_shared
        self.is_weight = self.is_weight and is_weight


@dataclass(frozen=True, slots=True)
class StorageLayout:
    """The description of a storage: `size_bytes` from byte `start` on, at an address that is `skew` modulo 64.

    `dtype` is None if tensors of several types use the storage. A `handle` names the storage itself, to share it.
    `is_weight` says that only floating-point parameters use it. Their values do not matter.
    """

    device: str
    start: int
    size_bytes: int
    skew: int
    dtype: torch.dtype | None
    handle: Handle | None
    is_weight: bool


class TensorDescriber:
    """Describes the tensors of one call for a pickler, and collects their storages."""

    def __init__(self, shares_weights: bool = False) -> None:
        self._shares_weights = shares_weights
        self._used: dict[int, UsedStorage] = {}
        # The parts of shared tensors, by identity.
        self._shared_parts: set[int] = set()

    @property
    def storages(self) -> list[UsedStorage]:
        """The storages of all described tensors, by index."""
        return list(self._used.values())

    def reduce(self, tensor: Tensor) -> Reduced:
        """The function and arguments that make a tensor again.

        Raises:
            NotHandedOver: the tensor has no plain storage.
        """
        kind = type(tensor)
        if tensor.is_nested:
            raise NotHandedOver("a nested tensor cannot be handed over")
        if kind not in OWN_TENSORS and hasattr(kind, "__tensor_flatten__"):
            return self._reduce_parts(tensor)
        _check(tensor)
        flags = tensor.requires_grad, tensor.is_inference(), tensor.is_conj(), tensor.is_neg()
        place = self._use(tensor), tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return _with_attributes((build_tensor, (kind, place, flags)), tensor.__dict__)

    def _use(self, tensor: Tensor) -> UsedStorage:
        low, high = span(tensor)
        is_shared = self._may_share(tensor)
        is_weight = isinstance(tensor, nn.Parameter) and tensor.dtype.is_floating_point
        new = UsedStorage(len(self._used), tensor.untyped_storage(), tensor.dtype)
        used = self._used.setdefault(storage_key(tensor), new)
        used.use(low, high, tensor.dtype, is_shared, is_weight)
        return used

    def _may_share(self, tensor: Tensor) -> bool:
        is_weight = self._shares_weights and tensor.is_cuda and isinstance(tensor, nn.Parameter)
        return is_weight or id(tensor) in self._shared_parts

    def _reduce_parts(self, tensor: Any) -> Reduced:
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        if self._may_share(tensor):
            self._shared_parts.update(map(id, parts.values()))
        flags = tensor.requires_grad, tensor.is_inference()
        form = context, tuple(tensor.shape), tensor.stride()
        attributes = {name: value for name, value in tensor.__dict__.items() if name not in parts}
        return _with_attributes((build_of_parts, (type(tensor), parts, form, flags)), attributes)


def layout(used: UsedStorage, handle: Handle | None = None) -> StorageLayout:
    """The description of a storage: all of it with a `handle`, else the part that is used."""
    device, address = str(used.storage.device), used.storage.data_ptr()
    if handle is not None:
        return StorageLayout(device, 0, used.storage.nbytes(), 0, used.dtype, handle, used.is_weight)
    start = used.low - used.low % STORAGE_ALIGNMENT_BYTES
    skew = address % STORAGE_ALIGNMENT_BYTES
    return StorageLayout(device, start, used.high - start, skew, used.dtype, None, used.is_weight)


def _check(tensor: Tensor) -> None:
    kind = f"a {type(tensor).__name__}"
    if tensor.layout != torch.strided:
        raise NotHandedOver(f"a tensor of the layout {tensor.layout} cannot be handed over")
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise NotHandedOver(f"{kind} cannot be handed over: its class defines operators and no parts")
    if nn.parameter.is_lazy(tensor):
        raise NotHandedOver(f"{kind} cannot be handed over: it has no shape yet")
    if tensor.device.type == "meta":
        raise NotHandedOver("a tensor on the device meta cannot be handed over: it has no storage")
    if tensor.is_quantized:
        raise NotHandedOver(f"a tensor of the type {tensor.dtype} cannot be handed over")


def _with_attributes(reduced: Reduced, attributes: dict[str, Any]) -> Reduced:
    # Tensor.__setstate__ expects another kind of state.
    return (*reduced, dict(attributes), None, None, set_attributes) if attributes else reduced


def set_attributes(tensor: Tensor, attributes: dict[str, Any]) -> None:
    """Set the attributes that Python code has set on the original tensor."""
    tensor.__dict__.update(attributes)


@dataclass(frozen=True, slots=True)
class MadeStorage:
    """A storage in place of the described one, whose byte `b` is byte `b + shift` here."""

    storage: torch.UntypedStorage
    shift: int


def build_tensor(kind: type, place: tuple[Any, ...], flags: tuple[bool, bool, bool, bool]) -> Tensor:
    """The tensor that `TensorDescriber.reduce` described, in a storage of this process."""
    made, dtype, offset, shape, strides = place
    requires_grad, is_inference, is_conj, is_neg = flags
    with torch.inference_mode(is_inference), torch.no_grad():
        tensor = torch.empty(0, dtype=dtype, device=made.storage.device)
        # An empty tensor may lie before the part that is used.
        tensor.set_(made.storage, max(0, offset + made.shift // dtype.itemsize), shape, strides)
        if is_conj:
            tensor = tensor.conj()
        if is_neg:
            tensor = torch._neg_view(tensor)
        if kind is not Tensor:
            return Tensor._make_subclass(kind, tensor, requires_grad)
        return tensor.requires_grad_(requires_grad)


def build_of_parts(kind: Any, parts: dict[str, Any], form: tuple[Any, ...], flags: tuple[bool, bool]) -> Tensor:
    """A tensor of a class that consists of other tensors, from `parts` made by `build_tensor`."""
    requires_grad, is_inference = flags
    with torch.inference_mode(is_inference), torch.no_grad():
        tensor: Tensor = kind.__tensor_unflatten__(parts, *form)
        return tensor if tensor.requires_grad == requires_grad else tensor.requires_grad_(requires_grad)


def allocate(layouts: Sequence[StorageLayout]) -> list[MadeStorage]:
    """A storage for each layout.

    Integers and booleans are 0, because they may be indices. Floating-point numbers on a GPU are small and random:
    tuning measures kernels, and their speed depends on how many bits flip. The global generators are not used.
    Floating-point numbers on a CPU are 0, in pages that take no memory until they are written. A storage of several
    types is 0. Weights of one device and type overlap if together they take more than `_WEIGHTS_BYTES`.

    Raises:
        RuntimeError: the device does not exist, or has no memory left (`torch.OutOfMemoryError`).
        OSError: the CPU has no memory left.
    """
    with torch.inference_mode(False), torch.no_grad():
        mappings = [None if layout.handle is None else mapped(layout.handle) for layout in layouts]
        pairs = list(zip(layouts, mappings, strict=True))
        buffers = _buffers([layout for layout, mapping in pairs if mapping is None and layout.is_weight])
        return [_storage(layout, mapping, buffers) for layout, mapping in pairs]


def mapped(handle: Handle) -> torch.UntypedStorage | None:
    """The storage that another process's handle names; None if this process cannot map it."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.UntypedStorage._new_shared_cuda(*handle)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("call.not_mapped error=%s This process allocates its own copy of these weights.", error)
        return None


def _buffers(weights: Sequence[StorageLayout]) -> dict[Any, _Buffer]:
    """By device and type, one buffer for all weights."""
    rooms = defaultdict[Any, list[int]](list)
    for layout in weights:  # each takes this much at most
        room_bytes = layout.size_bytes + STORAGE_ALIGNMENT_BYTES + _PLACE_BYTES
        rooms[layout.device, layout.dtype].append(room_bytes)
    bytes_of = {key: min(sum(sizes), max(_WEIGHTS_BYTES, *sizes)) for key, sizes in rooms.items()}
    return {(device, dtype): _Buffer(_allocate(device, dtype, size)) for (device, dtype), size in bytes_of.items()}


def _storage(layout: StorageLayout, mapping: torch.UntypedStorage | None, buffers: dict[Any, _Buffer]) -> MadeStorage:
    if mapping is not None:
        return MadeStorage(mapping, 0)
    if not layout.size_bytes:
        return MadeStorage(torch.empty(0, dtype=torch.uint8, device=layout.device).untyped_storage(), 0)
    if layout.is_weight:
        return MadeStorage(buffers[layout.device, layout.dtype].reserve(layout), -layout.start)
    memory = _allocate(layout.device, layout.dtype, layout.size_bytes + layout.skew)
    return MadeStorage(memory.untyped_storage(), layout.skew - layout.start)


def _allocate(device: str, dtype: torch.dtype | None, size_bytes: int) -> Tensor:
    """Bytes on a device, with numbers of this type."""
    if device == "cpu":
        # One private mapping, whose pages take memory only when they are written.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=torch.uint8)
    memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    if dtype is not None:
        _draw(memory, dtype)
    return memory


@dataclass(slots=True)
class _Buffer:
    """Memory in which storages have places, one behind the other. Behind the last place comes the first again."""

    memory: Tensor
    taken_bytes: int = 0

    def reserve(self, layout: StorageLayout) -> torch.UntypedStorage:
        """The next place, as a storage of its own: torch takes tensors of one storage for views of each other."""
        first = -(-self.taken_bytes // _PLACE_BYTES) * _PLACE_BYTES + layout.skew
        if first + layout.size_bytes > self.memory.nbytes:
            first = layout.skew
        self.taken_bytes = first + layout.size_bytes
        # DLPack, because the storage of a slice would be the whole memory's. A capsule may be of any device; the slice
        # itself would be refused if it is not on the current one.
        return from_dlpack(to_dlpack(self.memory[first : self.taken_bytes])).untyped_storage()


def _draw(memory: Tensor, dtype: torch.dtype) -> None:
    """Fill bytes with random numbers of `dtype`, if that is a floating-point type."""
    generator = torch.Generator(memory.device).manual_seed(0)
    if dtype.is_complex:
        dtype = dtype.to_real()
    values = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    if dtype.is_floating_point and dtype.itemsize == 1:
        memory.random_(*_SMALL_BYTES, generator=generator)
    elif dtype.is_floating_point:
        values.uniform_(-_LARGEST, _LARGEST, generator=generator)
