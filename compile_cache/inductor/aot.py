"""The adapter to the private names of torch that functions compiled ahead of time need.

Importing this module fails with an ImportError if this torch is not a tested release, and with an AttributeError or an
ImportError if it lacks a name. Then no function is compiled or loaded ahead of time, and the next step of the ladder
serves every call. `torch_state.py` has the names for torch's switches, for a process without a compiler.

torch marks `aot_compile` and `load_compiled_function` as experimental.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import dataclasses
import enum
import functools
import importlib.util
import io
import os
import pickle
import re
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from traceback import StackSummary
from typing import Any
from unittest import mock  # torch has imported it

import torch
import torch._dynamo
import torch._inductor.config
from torch import nn
from torch._dynamo import guards as _guards
from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch.utils._traceback import CapturedTraceback

from compile_cache.calls.torch_call import Call, call_region
from compile_cache.errors import ArtifactError
from compile_cache.importable import reference
from compile_cache.inductor.lean_loading import StoredCode, give_keys, without_compiler

# The first and the last tested release.
TESTED_TORCH = ((2, 11), (2, 15))

if not TESTED_TORCH[0] <= tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) <= TESTED_TORCH[1]:
    first, last = (".".join(map(str, release)) for release in TESTED_TORCH)
    raise ImportError(f"torch {torch.__version__} is not a tested release ({first} to {last})")

# The kinds of guards that torch cannot store.
NOT_STORED = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
# The names in a guard's expression besides the call's inputs and the globals.
guard_scope: Callable[[], dict[str, Any]] = _get_closure_vars

guards: Any = _guards
_mode_options: Any = torch._inductor.list_mode_options
_load: Any = torch.compiler.load_compiled_function
_fake_mode = functools.cache(lambda: torch._subclasses.FakeTensorMode())
# The packages of the objects that make guards up, besides the model's own.
_OF_GUARDS = ("builtins", "numpy", "sympy", "torch")
# The model's own all the same: what these hold.
_HOLDERS = (nn.Module, types.CellType, types.FunctionType, types.MappingProxyType)
# What pickle makes an object with, of its class and its parts.
_NEW: Any = vars(copyreg)["__newobj__"]

# Held while a thread loads or makes an artifact: its contexts replace names in torch, and put them back. A fork waits.
_alone = threading.RLock()
os.register_at_fork(before=_alone.acquire, after_in_parent=_alone.release, after_in_child=_alone.release)


@dataclass(frozen=True, slots=True)
class Compilation:
    """A compiled function: torch's stored form, and the facts about it.

    `traced` has the module and the first line of each traced function. `modules` has the names of the modules in the
    compiled function's global scope. `externals` has the `importable.reference` of what else the function reads there.
    """

    payload: bytes
    traced: frozenset[tuple[str, int]]
    modules: frozenset[str]
    externals: list[str]


def compile_call(call: Call, mode: str, dynamic: bool | None, recorder: Any) -> Compilation:
    """Trace and compile a call. Runs nothing. `recorder` is torch's filter of guards. Its `alias_guard` gets torch's
    function that makes a guard on an object which it meets twice, and the object's two sources.

    Raises:
        ArtifactError: the function uses an object that another process cannot find.
        Exception: any, if torch refuses.
    """
    options = {**_mode_options(mode, dynamic), "guard_filter_fn": recorder}
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    for name, value in vars(builtins).items():  # torch 2.11 looks for them among the function's globals alone
        call_region.__globals__.setdefault(name, value)
    with (
        _alone,
        _configured(),
        # Of an object with two sources, the guards that `recorder` gets name the first source alone.
        mock.patch.object(builder, "make_dupe_guard", functools.partial(recorder.alias_guard, builder.make_dupe_guard)),
    ):
        compiled: Any = torch.compile(call_region, fullgraph=True, dynamic=dynamic, options=options)
        compiled = compiled.aot_compile((call, {}))
        artifacts, environment = compiled._artifacts, compiled._artifacts.runtime_env
        traced = frozenset((each.module, each.firstlineno) for each in compiled.source_info().inlined_sources)
        provided = {artifacts.backend_id, *environment.import_sources, *vars(builtins)}
        try:  # in the code, torch's names for these have numbers of this process
            names = {name: reference(compiled.fn.__globals__[name]) for name in environment.external_refs - provided}
        except LookupError as error:
            raise ArtifactError(f"the compiled function uses what cannot be imported: {error}") from error
        if environment.closure or environment.used_globals.keys() - vars(builtins).keys():
            raise ArtifactError("it reads tensors from global variables or a closure")
        code = environment.bytecode
        artifacts.runtime_env = dataclasses.replace(
            environment,
            bytecode=code.replace(co_names=tuple(names.get(name, name) for name in code.co_names)),
            used_globals={},
            external_refs=set(names.values()),
        )
        artifacts.guards_state = _without_secrets(artifacts.guards_state)
        stored: Any = object.__new__(_Code)
        vars(stored).update(vars(artifacts.compiled_fn.serialize()))
        artifacts.compiled_fn = type(artifacts.compiled_fn)(types.SimpleNamespace(serialize=lambda: stored))
        # This drops the text of whole source files.
        artifacts.source_info = dataclasses.replace(artifacts.source_info, inlined_sources=set())
        return Compilation(
            type(compiled).serialize(compiled).serialized_data,
            traced,
            frozenset(environment.import_sources.values()),
            sorted(names.values()),
        )


class _Code(StoredCode):  # type: ignore[misc]
    """torch's stored form of the code. torch copies it when it is loaded, with the records of all its kernels, so that
    it could be stored again. Nothing stores it again."""

    def __deepcopy__(self, memo: object) -> _Code:
        return self


def _without_secrets(guards_state: bytes) -> bytes:
    """torch's pickled guards without the texts that the model has: one may be a secret. And without the lines of code
    behind each guard, which torch would look up at every load."""
    buffer = io.BytesIO()
    _Pickler(_Everything(), {}, {}, buffer).dump(_Unpickler(io.BytesIO(guards_state)).load())
    return buffer.getvalue()


class _Everything(dict[int, Any]):
    """The objects that torch's pickler shall keep. It has left out the others before."""

    def __contains__(self, identity: object) -> bool:
        return True


class _Unpickler(pickle.Unpickler):
    """Unpickles what torch has pickled."""

    def find_class(self, module: str, name: str) -> Any:
        """The object with this name."""
        found = super().find_class(module, name)
        return _Maker if found is guards.GuardsStatePickler else found


class _Maker(guards.GuardsStatePickler):  # type: ignore[misc]
    """torch's pickler, for its functions that make things again. Tensors keep what they are made of."""

    @classmethod
    def _unpickle_tensor(cls, *arguments: Any) -> Any:
        return _kept(_fake_tensor, arguments[:4])  # without its gradient

    @classmethod
    def _unpickle_traceable_wrapper_subclass(cls, *arguments: Any) -> Any:
        return _kept(guards.GuardsStatePickler._unpickle_traceable_wrapper_subclass, arguments)

    @classmethod
    def _unpickle_nested_function(cls, code: Any, module: str, name: str, defaults: Any, closure: Any) -> Any:
        """A function, as of a weak dictionary, which calls a reference to that when a key is gone. Here the reference
        is missing, so None answers, as if the dictionary were gone too."""
        defaults = defaults and tuple(type(None) if isinstance(one, guards._Missing) else one for one in defaults)
        return super()._unpickle_nested_function(code, module, name, defaults, closure)


def _kept(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    made = function(*arguments)
    made.made_of = function, arguments
    return made


def _fake_tensor(meta: torch.Tensor, device: torch.device, kind: type, keys: int) -> Any:
    """A tensor without values that guards are made of, as torch makes it, but all in one mode. torch makes a mode for
    each, with the trace of its stack: a sixth of the time that a whole model takes to load."""
    mode, key_set = _fake_mode(), torch._C.DispatchKeySet.from_raw_repr(keys)
    return mode.fake_tensor_converter.from_meta_and_device(mode, meta, device, kind, key_set)


class _Pickler(_Maker):
    """torch's pickler of guards, without the texts that the model has."""

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` again."""
        if isinstance(value, StackSummary | CapturedTraceback):
            return type(None), ()
        if isinstance(value, torch.Tensor) and (made_of := getattr(value, "made_of", None)):
            return made_of
        reduced = super().reducer_override(value)
        is_by_name = isinstance(value, type) or (reduced is NotImplemented and isinstance(value, types.FunctionType))
        if is_by_name or _is_of_guards(value) or isinstance(value, enum.Enum):  # its text is a constant of a source
            return reduced
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduced is NotImplemented else reduced
        if isinstance(reduced, str):
            return reduced
        made, arguments, state, listed, items = (*reduced, None, None, None)[:5]
        if made is _NEW and isinstance(value, tuple | str | bytes):  # by no `__new__` of its own, which may want a text
            base = next(kind for kind in (tuple, str, bytes) if isinstance(value, kind))
            made, arguments = base.__new__, (type(value), without_texts(tuple(value)) if base is tuple else base())
        elif made is _NEW or isinstance(value, nn.Module | types.CellType):
            arguments = without_texts(arguments)
        else:  # a text may be the name of a function
            arguments = tuple(part if isinstance(part, str | bytes) else without_texts(part) for part in arguments)
        state = state if isinstance(state, bytes) else without_texts(state)  # an extension module's own form
        listed, items = without_texts(list(listed or ())), without_texts(dict(items or ()))
        return made, arguments, state, iter(listed), iter(items.items())


def _is_of_guards(value: Any) -> bool:
    if isinstance(value, functools.partial):
        return str(getattr(value.func, "__module__", "")).startswith("torch._dynamo")
    return type(value).__module__.partition(".")[0] in _OF_GUARDS and not isinstance(value, _HOLDERS)


def without_texts(value: Any) -> Any:
    """The value with an empty text in place of each text in it; what is no plain container stays as it is."""
    if isinstance(value, str | bytes) and not isinstance(value, enum.Enum):
        base: Any = str if isinstance(value, str) else bytes
        return base.__new__(type(value))
    if type(value) is dict:
        return {key: without_texts(part) for key, part in value.items()}
    return type(value)(map(without_texts, value)) if type(value) in (list, tuple, set, frozenset) else value


def load_function(payload: bytes, externals: dict[str, Any], torch_key: str, triton_key: str) -> tuple[Any, Any]:
    """Unpickle a compiled function, which must be verified, and the guards that torch stored with it. The keys are
    those of the process that compiled it.

    Raises:
        Exception: any, if `payload` is damaged or of another torch.
    """
    give_keys(torch_key, triton_key)
    # Generated code asks for worker processes before it finds that its kernels exist.
    with _alone, _configured(), torch._inductor.config.patch(compile_threads=1), without_compiler():
        loaded = _load(io.BytesIO(payload), f_globals=externals)
    return loaded.fn, loaded._artifacts.guard_manager


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """Turn ahead-of-time compilation on, which is off in torch 2.11, and guards on hooks, which torch omits for speed.

    Both are needed to make guards and to load them. A call checks the hooks of its own module's parts, but the code may
    call any module.
    """
    settings = {"enable_aot_compile": True, "skip_nnmodule_hook_guards": False}
    with torch._dynamo.config.patch(settings):
        yield
