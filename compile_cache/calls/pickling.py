"""Hands a call of a region to another process: the module and its inputs, without the contents of tensors.

Tensors travel as layouts, classes and functions as names, every other attribute as a value. Classes and functions of
the main program, and those that a function made, travel by value too. The receiver makes its own tensors, so this
process never sees what the receiver writes. Objects of one process cannot travel: locks, threads, files, sockets,
streams, events and recorded graphs.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import types
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Sequence
from io import BytesIO, TextIOWrapper
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from compile_cache.calls.description import OPERATORS
from compile_cache.calls.overlaps import reachable_tensors
from compile_cache.calls.tensors import Handle, TensorDescriber, UsedStorage, allocate, layout
from compile_cache.calls.torch_call import Call
from compile_cache.errors import Failure, NotHandedOver, first_line, log
from compile_cache.importable import OWN_MODULES, find, named_objects, why_not

# The handles of CUDA memory that another process maps, by the address of torch's record of a storage. A weak reference
# keeps that address taken. Handles are reused because each takes one of torch's 1,000 events: when these are used up,
# sharing waits for the device.
#
# torch counts the users of such memory in a file of the sender in /dev/shm. A killed receiver is never subtracted, so
# the sender could not free that memory again. Only memory that lasts as long as the sender is shared.
_shared: dict[int, tuple[StorageWeakRef, Handle]] = {}
# The dictionaries in which a module keeps its parts.
_INNER = ("_parameters", "_buffers", "_modules")


def hand_over(call: Call, shares_weights: bool = False) -> bytes:
    """A call in bytes, for `receive` in another process. It does not read or change the call's tensors.

    If the call `shares_weights`, the receiver maps the memory of CUDA parameters. Nobody may write to these, and they
    must last until the receiver has ended. A storage is shared whole, and only if all its tensors in the call are
    parameters. The receiver makes all other tensors itself, unfilled.

    Dictionaries that the classes' own code reads as globals travel too: `__init__` may have filled them, which the
    receiver does not call.

    Takes about 1 ms for a block of 50 parameters, and waits for no device.

    Raises:
        NotHandedOver: names the attribute that cannot travel, and says why.
    """
    try:
        pickler = CallPickler(call[0], shares_weights)
        pickler.dump(call)
    except Exception as error:
        raise NotHandedOver(_obstacle(call, error)) from error
    storages = pickler.tensors.storages
    handles = _handles([used for used in storages if used.is_shared])
    layouts = [layout(used, handles.get(used.index)) for used in storages]
    head = layouts, _global_dictionaries(call[0])
    return pickle.dumps(head, pickle.HIGHEST_PROTOCOL) + pickler.content.getvalue()


def _global_dictionaries(module: nn.Module) -> dict[str, bytes]:
    """The dictionaries without tensors that methods of a module's classes read as globals, in bytes, by `find`'s
    reference."""
    found: dict[str, bytes] = {}
    methods = [method for kind in {type(part) for part in module.modules()} for method in vars(kind).values()]
    for method in methods:  # which grows meanwhile
        if isinstance(method, types.FunctionType):
            methods += [method.__wrapped__] if hasattr(method, "__wrapped__") else []
            home = method.__globals__
            for name in {*method.__code__.co_names} & home.keys():
                is_plain = isinstance(home[name], dict) and not isinstance(home[name], OrderedDict)
                if is_plain and not reachable_tensors([home[name]]):
                    with contextlib.suppress(Exception):  # it holds what no other process can have
                        found[f"{home.get('__name__')}:{name}"] = _items(home[name])
    return found


def _items(dictionary: dict[Any, Any]) -> bytes:
    """The items in bytes; a class of its own may set them in its own way."""
    return pickle.dumps(dict(dictionary), pickle.HIGHEST_PROTOCOL)


def _handles(storages: Sequence[UsedStorage]) -> dict[int, Handle]:
    """The handles of those that can be shared, by number. A handle is of a whole storage, and valid as long as the
    sender keeps that."""
    for address, (reference, _) in list(_shared.items()):
        if reference.expired():  # type: ignore[no-untyped-call]
            _shared.pop(address, None)
    handles: dict[int, Handle] = {}
    try:
        for used in storages:
            address = used.storage._cdata
            if address not in _shared:
                reference = StorageWeakRef(used.storage)  # type: ignore[no-untyped-call]
                _shared[address] = reference, used.storage._share_cuda_()  # type: ignore[no-untyped-call]
            handles[used.index] = _shared[address][1]
    # torch's allocator did not allocate it on a CUDA device, or cannot share it (`expandable_segments`).
    except RuntimeError as error:
        log.info(
            "background.unshared reason=%s The second process allocates its own copy of the weights.", first_line(error)
        )
    return handles


def receive(content: bytes) -> Call:
    """The call that another process handed over, with new, unfilled tensors: see `allocate`.

    Unpickling runs code. Accept `content` only from the process that started this one.

    Raises:
        NotHandedOver: a part of the call cannot be imported or built here.
        torch.OutOfMemoryError: the call's tensors do not fit.
    """
    file = BytesIO(content)
    try:
        layouts, dictionaries = pickle.load(file)
        storages = allocate(layouts)
        call: Call = CallUnpickler(file, storages.__getitem__).load()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise NotHandedOver(f"the call cannot be rebuilt: {Failure(error).reason}") from error
    _fill_main_program(call[0])
    for reference, packed in dictionaries.items():
        with contextlib.suppress(Exception):  # it holds what cannot be imported here
            dictionary = find(reference)
            if _items(dictionary) != packed:
                items = pickle.loads(packed)
                dict.clear(dictionary)
                dict.update(dictionary, items)
    return call


def _fill_main_program(module: nn.Module) -> None:
    """Let this process's main program have the names that classes of the sender's read: torch looks these up there."""
    main = sys.modules["__main__"]
    for kind in {type(part) for part in module.modules() if type(part).__module__ == "__main__"}:
        setattr(main, kind.__name__, kind)
        for method in vars(kind).values():
            if isinstance(method, types.FunctionType) and method.__globals__ is not vars(main):
                vars(main).update(method.__globals__)


class CallPickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Pickles a call into `content`: also objects that pickle would refuse, or would copy although they belong to this
    process, or although the model may ask which object they are."""

    # Not the content of an open file. Modules that are imported later add to copyreg's table.
    _own, _later = cloudpickle.Pickler.dispatch_table.maps
    dispatch_table: ClassVar = ChainMap({kind: by for kind, by in _own.items() if kind is not TextIOWrapper}, _later)

    def __init__(self, module: nn.Module, shares_weights: bool = False) -> None:
        """For a call of `module`. `shares_weights` is for `hand_over`."""
        self.content = BytesIO()
        super().__init__(self.content, pickle.HIGHEST_PROTOCOL)
        self.tensors = TensorDescriber(shares_weights)
        self._names: dict[int, str] = {}
        self._homes: set[str] = set()
        for kind in {type(part) for part in module.modules()}:
            self._add_names(kind.__module__)

    def name(self, value: Any) -> str:
        """The name of an object that its class's module or the model's has, such as a sentinel; empty if none has."""
        self._add_names(type(value).__module__)
        return self._names.get(id(value), "")

    def _add_names(self, home: str) -> None:
        if home not in self._homes:
            self._homes.add(home)
            self._names |= named_objects(home)

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` again; NotImplemented where pickle knows how.

        Raises:
            NotHandedOver: `value` cannot be made again.
        """
        if type(value) is UsedStorage:
            return known_object, (value.index,)
        if type(value) is OrderedDict:  # every module has ten for its hooks, and nearly all are empty
            return NotImplemented if value or vars(value) else (OrderedDict, ())
        if isinstance(value, torch.Tensor):
            return self.tensors.reduce(value)
        if isinstance(value, nn.Module):
            if "parametrizations" in value._modules:  # torch gives it a class of its own
                name = f"a {type(value).__name__} cannot be handed over"
                raise NotHandedOver(f"{name}. Remove its parametrizations (torch.nn.utils.parametrize)")
        elif isinstance(value, type | types.FunctionType):
            _check_module(value)
            reduced = super().reducer_override(value)
            if isinstance(value, type) and reduced is not NotImplemented and len(reduced) > 2:
                reduced[2][0]["__qualname__"] = value.__qualname__  # which cloudpickle leaves out
            return reduced
        elif isinstance(value, _REDUCED_BY_KIND):
            return _reduce_by_kind(value)
        elif name := self.name(value):
            return find, (name,)
        return NotImplemented


def known_object(key: Any) -> Any:
    """In a pickled call, the object that `CallUnpickler` has under `key`. pickle's own persistent ids would call Python
    for each text and number of a call."""
    raise LookupError(f"{key!r} belongs to another call")


class CallUnpickler(pickle.Unpickler):
    """Builds a pickled call. `known` gives the storages, by number, and what else is not pickled."""

    def __init__(self, file: BytesIO, known: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._known = known

    def find_class(self, module: str, name: str) -> Any:
        """What a name in the pickled call stands for."""
        return self._known if (module, name) == (__name__, "known_object") else super().find_class(module, name)


def _check_module(value: type | types.FunctionType) -> None:
    """Check that another process can import the module of `value`, unless it travels by value: what a function made, or
    the main program has. cloudpickle looks in this process only.

    Raises:
        NotHandedOver: another process cannot.
    """
    name, home = value.__qualname__, value.__module__
    if "<" not in name and home not in (None, *OWN_MODULES) and (reason := why_not(home)):
        kind = "class" if isinstance(value, type) else "function"
        raise NotHandedOver(f"the {kind} {name} cannot be handed over: {reason}")


_ON_DEVICE = (torch.Stream, torch.Event, torch.cuda.Stream, torch.cuda.Event, torch.cuda.CUDAGraph)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)
_REDUCED_BY_KIND = (torch.Generator, types.ModuleType, types.MethodType, *OPERATORS, *_ON_DEVICE, *_STORAGES)


def _reduce_by_kind(value: Any) -> Any:
    if isinstance(value, torch.Generator):  # without its state, which belongs to the server
        return torch.Generator, (str(value.device),)
    if isinstance(value, types.ModuleType):
        if reason := why_not(value.__name__):
            raise NotHandedOver(f"the module {value.__name__} cannot be handed over: {reason}")
        return find, (f"{value.__name__}:",)
    if isinstance(value, types.MethodType):  # torchao's are methods of partial functions, which have no name
        return NotImplemented if hasattr(value, "__name__") else (_method, (value.__func__, value.__self__))
    if isinstance(value, OPERATORS):
        return find, (f"torch:ops.{value}",)  # "torch:ops.aten.silu.default"
    raise NotHandedOver(f"a {type(value).__module__}.{type(value).__qualname__} cannot be handed over")


def _method(function: Any, owner: Any) -> Any:
    return types.MethodType(function, owner)  # pickle cannot find this class by its name


def _obstacle(call: Call, error: Exception) -> str:
    """The attribute or input that cannot be handed over, and why: "attention.lock: it cannot be pickled: …".

    They are pickled one by one until one fails. If none does, the module itself cannot be handed over.
    """
    module, args, kwargs = call
    parts = [
        (f"{path}.{name}".lstrip("."), value)
        for path, part in module.named_modules()
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items()
        if name not in _INNER
    ]
    for name, value in [*parts, *((f"input {name}", value) for name, value in (*enumerate(args), *kwargs.items()))]:
        try:
            CallPickler(module).dump(value)
        except Exception as failed:
            return f"{name}: {_words(failed)}"
    return _words(error)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, NotHandedOver) else f"it cannot be pickled: {Failure(error).reason}"
