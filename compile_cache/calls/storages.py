"""torch's private names for storages, and CUDA memory that two processes share, for weights that do not fit twice. The
receiver only reads it.

torch counts the users of such memory in a file of the sender in /dev/shm. A killed receiver is never subtracted, so the
sender could not free that memory again. Share only memory that lasts as long as the sender.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

log = logging.getLogger("compile_cache")

# The result of `UntypedStorage._share_cuda_`, and the arguments of `UntypedStorage._new_shared_cuda`.
Handle = tuple[Any, ...]
# By the address of torch's record of a storage. A weak reference keeps that address taken. Handles are reused because
# each takes one of torch's 1,000 events: when these are used up, sharing waits for the device.
_handles: dict[int, tuple[StorageWeakRef, Handle]] = {}


def share(storage: torch.UntypedStorage) -> Handle:
    """A handle of a whole storage. It is valid as long as the sender keeps the storage.

    Raises:
        RuntimeError: torch's allocator did not allocate the storage on a CUDA device, or cannot share it
            (`expandable_segments`).
    """
    if storage.device.type != "cuda":
        raise RuntimeError(f"it is on the device {storage.device}")
    known = _handles.get(storage._cdata)
    if known is None:
        known = StorageWeakRef(storage), storage._share_cuda_()  # type: ignore[no-untyped-call]
        _handles[storage._cdata] = known
    return known[1]


def forget_freed() -> None:
    """Forget the handles of storages that this process has freed."""
    for address, (reference, _) in list(_handles.items()):
        if reference.expired():  # type: ignore[no-untyped-call]
            _handles.pop(address, None)


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


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, as long as that exists."""
    return int(tensor.untyped_storage()._cdata)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor of the same type that this one is a view of, if torch keeps it. Compiled code for tensors that
    overlap depends on it."""
    base = tensor._base
    if base is None or type(tensor) is not torch.Tensor or type(base) is not torch.Tensor or tensor.requires_grad:
        return None
    return None if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg() else base


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a tensor that torch reads with the opposite sign."""
    return torch._neg_view(tensor)


def with_class(kind: type, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """The same tensor as one of a subclass, such as a parameter."""
    return torch.Tensor._make_subclass(kind, tensor, requires_grad)
