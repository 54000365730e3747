"""A shadow: a copy of a call, on which new code can run without changing anything that the model sees.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import pickle
import threading
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from compile_cache.calls.overlaps import is_plain, reachable_tensors, span, storage_key
from compile_cache.calls.pickling import CallPickler, CallUnpickler, known_object
from compile_cache.calls.tensors import STORAGE_ALIGNMENT_BYTES, MadeStorage, UsedStorage
from compile_cache.calls.torch_call import Call
from compile_cache.errors import Failure, NotHandedOver

# These are the same in all of the process.
OF_PROCESS = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    type(threading.Lock()),
    type(threading.RLock()),
)
# A tensor's memory is looked at as rows of so many integers, as long as its place and size allow.
_ROW = 1024
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Shadow:
    """A copy of a call: its module, args and kwargs together, so that what is one object there is one object here.

    Shared with the call are parameters, modules outside the region, functions and classes. An object that its class's
    module or the model's has by name is shared too, because the model may ask whether it is this object. Once a call
    has changed such an object, no code runs on the copy. Every other object is copied, and every storage once. So views
    of one storage stay views of one storage, and an input that a buffer or a cache has too stays so.

    `named` has the shared objects with a name: the name, the object, and a copy of its `state_of`.
    """

    def __init__(self, call: Call) -> None:
        """Copy a call. It runs nothing of it.

        Raises:
            NotHandedOver: an object cannot be copied.
            MemoryError, torch.OutOfMemoryError: the copies do not fit.
        """
        self.named: list[tuple[str, Any, list[Any]]] = []
        self._module = call[0]
        try:
            pickler = _Pickler(call[0])
            pickler.dump(call)
            pickler.content.seek(0)
            with torch.inference_mode(False), torch.no_grad():
                storages = [_copied(used) for used in pickler.tensors.storages]

            def known(key: Any) -> Any:
                if isinstance(key, int):
                    return storages[key]
                number, *named = key
                self.named += [(name, pickler.shared[number], state) for name, state in named]
                return pickler.shared[number]

            self.call: Call = CallUnpickler(pickler.content, known).load()
            shared = filter(is_plain, reachable_tensors(pickler.shared))
            self._shared = [(tensor, _content(tensor)) for tensor in shared if tensor.numel()]
        except (NotHandedOver, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever an object's own methods raise
            raise NotHandedOver(f"the call cannot be copied: {Failure(error).reason}") from error

    def copied(self) -> Call:
        """The `call` of another copy, for a run that must not change this one. Raises as the constructor does."""
        return Shadow(self.call).call

    def changed(self) -> str:
        """The name of a tensor that the copy shares and that has changed since; empty if there is none."""
        for tensor, before in self._shared:
            now = _content(tensor)
            if now[0] != before[0] or not all(map(torch.equal, now[1], before[1])):
                names = (name for name, weight in self._module.named_parameters() if weight is tensor)
                return f"its parameter {next(names, 'of another module')}"
        return ""


def _content(tensor: torch.Tensor) -> tuple[Any, list[torch.Tensor]]:
    """What tells whether a tensor was written, by whatever code: where its memory is, sums of the rows and of the
    columns of that, and its end. A copy might not fit; to read a weight takes as long as a small part of its use."""
    low, high = span(tensor)
    place = storage_key(tensor), low, tensor.shape, tensor.stride()
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())[low:high]
        numbers = memory.view(next(dtype for dtype in _INTEGERS if not (low | high) % dtype.itemsize))
        in_rows = len(numbers) // _ROW * _ROW
        rows = numbers[:in_rows].view(-1, _ROW)
        return place, [rows.sum(0), rows.sum(1), numbers[in_rows:].clone()]


def state_of(value: Any) -> list[Any]:
    """All that pickle would store of an object; nothing if that is a name."""
    reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return [list(part) if isinstance(part, Iterator) else part for part in reduced if not isinstance(reduced, str)]


class _Pickler(CallPickler):
    """Pickles a call. `shared` has what is not pickled."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.shared: list[Any] = []
        self._inside = {id(part) for part in module.modules()}

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` again; NotImplemented where pickle knows how.

        Raises:
            NotHandedOver: `value` cannot be made again.
        """
        if value is known_object:
            return NotImplemented
        if type(value) is not OrderedDict and self._is_shared(value):  # most values are a module's empty hooks
            return self._kept(value)
        if not isinstance(value, OrderedDict | nn.Module | torch.Tensor) and (name := self.name(value)):
            is_known = any(value is other for other in self.shared)
            return self._kept(value) if is_known else self._kept(value, (name, state_of(value)))
        if isinstance(value, torch.Generator):
            return self._kept(value.clone_state())
        try:
            return super().reducer_override(value)
        except NotHandedOver:
            # A tensor without a plain storage. torch.compile runs a call with strided nested tensors as it is.
            if isinstance(value, torch.Tensor) and not (value.is_nested and value.layout == torch.strided):
                return self._kept(value.detach().clone().requires_grad_(value.requires_grad))
            raise

    def _kept(self, value: Any, *named: tuple[str, list[Any]]) -> Any:
        self.shared.append(value)
        return known_object, ((len(self.shared) - 1, *named),)

    def _is_shared(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return id(value) not in self._inside
        if isinstance(value, torch.Tensor):
            return isinstance(value, nn.Parameter)
        return isinstance(value, OF_PROCESS)


def _copied(used: UsedStorage) -> MadeStorage:
    """A copy of the part of a storage that the call uses."""
    start = used.low - used.low % STORAGE_ALIGNMENT_BYTES
    whole = torch.empty(0, dtype=torch.uint8, device=used.storage.device).set_(used.storage)
    return MadeStorage(whole[start : used.high].clone().untyped_storage(), -start)
