"""CUDA memory that two processes see, for weights that do not fit twice. Whoever maps it only reads it.

torch counts the users of such memory in a file of /dev/shm that belongs to the sender. A receiver that is killed never
gives its memory back: the sender then keeps it, should it ever free it. So share what lasts as long as the sender.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

log = logging.getLogger("compile_cache")

# What `UntypedStorage._share_cuda_` returns, and `UntypedStorage._new_shared_cuda` takes.
Handle = tuple[Any, ...]
# By the address of torch's own record of a storage, which stays taken while there is a weak reference. A handle is used
# again, because each is one of 1,000 events that torch has: without one, sharing waits for the device.
_handles: dict[int, tuple[StorageWeakRef, Handle]] = {}


def share(storage: torch.UntypedStorage) -> Handle:
    """A handle of a whole storage, which stays where it is. It holds as long as the sender keeps the storage.

    Raises:
        RuntimeError: the storage is not CUDA memory of torch's own allocator, or that allocator cannot share
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
    """The storage that a handle of another process names; None where this process cannot map it."""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.UntypedStorage._new_shared_cuda(*handle)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("call.not_mapped error=%s: this process allocates these weights itself", error)
        return None
