"""Regions compiled ahead of time, by torch's `aot_compile` and `load_compiled_function`: the one adapter to them.

Both are marked experimental, and differ between 2.11 and 2.13. What is stored by them holds the guards that torch can
store; `guards.py` has the others, and `sources` the code that was traced, whose checksums torch stores and never
looks at.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import itertools
import operator
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
import torch._inductor
import torch._inductor.codecache
import torch._inductor.config
import torch.nn.modules.module as module_hooks
import torch.utils._triton as torch_triton
from torch import nn

from compile_cache.aot.describe import changed_switches, code_digest, switches
from compile_cache.aot.guards import Checks, Recorder, StandIn, global_scope, importable, resolve
from compile_cache.aot.imports import check_kernels, without_compiler
from compile_cache.aot.traced import call_region
from compile_cache.errors import ArtifactError, NotPrecompilable

_GLOBAL_HOOKS = tuple(
    getattr(module_hooks, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


# What Dynamo itself replaces, as soon as it compiles anything (torch/_dynamo/mutation_guard.py): then they are others
# than in a process that only loads.
_REPLACED_BY_DYNAMO = frozenset({"Module.__init__", "Module.__setstate__"})


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What is stored beside a compiled function, to be compared before it is unpickled.

    `sources` are checksums of the files, and of the functions in them, that were traced; `environ` the variables that
    these functions may have read, which torch does not guard; `stand_ins` what guards say that torch cannot store;
    `modules` and `globals` what the compiled function finds in its global scope; `torch_key` and `triton_hash` the
    digests of torch's and Triton's own files.
    """

    sources: dict[str, dict[str, Any]]
    environ: dict[str, str | None]
    stand_ins: list[StandIn]
    modules: dict[str, str]
    globals: dict[str, tuple[str, str]]
    torch_key: str
    triton_hash: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Record:
        """The inverse of `to_json`.

        Raises:
            ArtifactError: it is not one.
        """
        try:
            stand_ins = [StandIn(**stand_in) for stand_in in record["stand_ins"]]
            names = {name: (module, qualified) for name, (module, qualified) in record["globals"].items()}
            environ = dict(record["environ"])
            digests = str(record["torch_key"]), str(record["triton_hash"])
            return cls(dict(record["sources"]), environ, stand_ins, dict(record["modules"]), names, *digests)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"its record cannot be read: {error!r}") from error

    @property
    def is_imported(self) -> bool:
        """Whether all modules that it names have been imported, so that looking at them imports nothing."""
        names = {*self.sources, *self.modules.values(), *(module for module, _ in self.globals.values())}
        specs = [getattr(sys.modules.get(name), "__spec__", None) for name in names - {"__main__"}]
        return all(spec is not None and not getattr(spec, "_initializing", False) for spec in specs)

    def difference(self) -> str:
        """What of the traced code is not as it was, in words; empty if all is."""
        for name, source in self.sources.items():
            if difference := _source_difference(name, source):
                return difference
        # Not a setting of this library, but what the model's code has read.
        changed = [name for name, value in self.environ.items() if os.environ.get(name) != value]
        return f"the environment variable {changed[0]} has changed" if changed else ""


def obstacle(module: nn.Module) -> str:
    """Why calls of `module` are not served by a precompiled function, as it is now; empty if they can be."""
    if torch.is_grad_enabled():
        return "gradients are recorded: call it under torch.inference_mode() or torch.no_grad()"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast is on"
    if any(_GLOBAL_HOOKS):
        return "a hook is registered for all modules"
    for name, part in module.named_modules():
        if any(getattr(part, hooks) for hooks in _HOOKS):
            return f"{name or 'it'} has a hook"
        if "forward" in vars(part):
            return f"{name or 'it'} has a forward of its own"
    return ""


def compile_ahead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, dynamic: bool | None
) -> tuple[Record, bytes]:
    """Compile a call of `module` with these inputs. Traces them and runs nothing. Takes as long as compiling does.

    Raises:
        NotPrecompilable: torch refuses, or what it made cannot be used elsewhere so that it is surely right.
    """
    recorder = Recorder()
    try:
        check_kernels()
        options = {**torch._inductor.list_mode_options(mode, dynamic), "guard_filter_fn": recorder}
        with _configured():
            compiled: Any = torch.compile(call_region, fullgraph=True, dynamic=dynamic, options=options)
            function = compiled.aot_compile(((module, args, kwargs), {}))
            stand_ins = recorder.stand_ins()
            artifacts = function._artifacts
            if artifacts.runtime_env.used_globals or artifacts.runtime_env.closure:
                raise NotPrecompilable("it reads tensors from global variables or a closure")
            traced = _traced(function.source_info())
            record = Record(
                _sources(traced),
                _environ_read(traced),
                stand_ins,
                dict(artifacts.runtime_env.import_sources),
                _external_globals(function),
                torch._inductor.codecache.torch_key().hex(),
                _triton_hash(),
            )
            artifacts.source_info = dataclasses.replace(artifacts.source_info, inlined_sources=set())
            payload = type(function).serialize(function).serialized_data
    except NotPrecompilable:
        raise
    except Exception as error:  # whatever torch cannot do ahead of time
        raise NotPrecompilable(f"torch: {type(error).__name__}: {_first_line(error)}") from error
    return record, payload


def _external_globals(function: Any) -> dict[str, tuple[str, str]]:
    """Where another process finds the globals that the compiled function uses and torch does not provide."""
    environment, scope = function._artifacts.runtime_env, function.fn.__globals__
    provided = {function._artifacts.backend_id, *environment.import_sources}
    return {name: importable(scope[name]) for name in sorted(environment.external_refs - provided) if name in scope}


def _set_torch_key(recorded: str) -> None:
    """Give torch the digest of its sources, as it gives it to its own worker processes: computing it means reading all
    of them. The environment names torch's version and build.

    Raises:
        ArtifactError: the sources are known to be others.
    """
    key: Any = torch._inductor.codecache.torch_key
    with contextlib.suppress(AssertionError, RuntimeError, AttributeError):  # it is computed already
        key.set(bytes.fromhex(recorded))
    if key().hex() != recorded:
        raise ArtifactError("torch's own sources have changed")


def _no_workers() -> contextlib.AbstractContextManager[Any]:
    """Start no worker processes: generated code asks for them before it sees that its kernels are there."""
    patched: contextlib.AbstractContextManager[Any] = torch._inductor.config.patch(compile_threads=1)
    return patched


def _triton_hash() -> str:
    """Triton's digest of its own files and its back end; empty where Triton is not used."""
    try:
        return str(torch_triton.triton_hash_with_backend()) if torch_triton.has_triton() else ""
    except RuntimeError:  # as torch does where there is no driver (torch/_inductor/runtime/autotune_cache.py)
        return ""


@contextlib.contextmanager
def _known_triton_hash(recorded: str) -> Iterator[None]:
    """While a function is loaded, torch asks for this digest, to look for remote records of tuning, which are off.
    Computing it means reading some hundred megabytes."""
    name = "triton_hash_with_backend"
    original = getattr(torch_triton, name)
    if recorded:
        setattr(torch_triton, name, lambda: recorded)
    try:
        yield
    finally:
        setattr(torch_triton, name, original)


@contextlib.contextmanager
def _configured() -> Iterator[None]:
    """Ahead-of-time compilation on, which it is not by itself on 2.11, and hooks guarded, which torch leaves out for
    speed, both where guards are made and where they are loaded: `_Parts` looks at those of a module's own parts, but a
    module can be anywhere."""
    settings = {"enable_aot_compile": True, "skip_nnmodule_hook_guards": False}
    with torch._dynamo.config.patch(settings):
        yield


_loading = threading.Lock()


@contextlib.contextmanager
def _without_explanations() -> Iterator[None]:
    """Guards without the line of the model's code that each of them is for: a quarter of what making them takes."""

    def only_the_code(code_parts: str | list[str], guard: Any, recompile_hint: str | None = None) -> list[str]:
        return [code_parts] if isinstance(code_parts, str) else code_parts

    guards: Any = importlib.import_module("torch._dynamo.guards")
    with _loading:
        explained = guards.get_verbose_code_parts
        guards.get_verbose_code_parts = only_the_code
        try:
            yield
        finally:
            guards.get_verbose_code_parts = explained


class _Parts:
    """The parts of a module that had no hooks, to be looked at again in every call. torch has guards for this, four of
    them for each part, which take a third of the time that loading does."""

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        children = [(part._modules, name, child) for part in parts for name, child in part._modules.items()]
        self._variables = tuple(map(vars, parts))
        self._holders = tuple(part._modules for part in parts)
        self._holder_of = tuple(holder for holder, _, _ in children)
        self._names = tuple(name for _, name, _ in children)
        self._children = tuple(child for _, _, child in children)
        self._hooked = tuple(variables for variables in self._variables for _ in _HOOKS)
        self._hooks = _HOOKS * len(parts)

    def are_unhooked(self) -> bool:
        """Whether all of them are there, and none has a hook."""
        holders = map(dict.get, self._variables, itertools.repeat("_modules"))
        children = map(dict.get, self._holder_of, self._names)
        return (
            all(map(operator.is_, holders, self._holders))
            and all(map(operator.is_, children, self._children))
            and not any(map(dict.get, self._hooked, self._hooks))
        )


class Precompiled:
    """A compiled function that was loaded, for all modules and inputs that it fits."""

    def __init__(self, record: Record, payload: bytes) -> None:
        """Unpickle `payload`: only what was verified.

        Raises:
            ArtifactError: it cannot be loaded, or a global is not as it was.
        """
        try:
            _set_torch_key(record.torch_key)
            externals = {name: resolve(*found) for name, found in record.globals.items()}
            with (
                _without_explanations(),  # one at a time
                _configured(),
                _no_workers(),
                without_compiler(),
                _known_triton_hash(record.triton_hash),
            ):
                loaded: Any = torch.compiler.load_compiled_function(io.BytesIO(payload), f_globals=externals)
            self._checks = Checks(record.stand_ins, global_scope(record.modules))
        except ArtifactError:
            raise
        except Exception as error:  # it is another torch's, or damaged: whatever unpickling meets
            raise ArtifactError(f"it cannot be loaded: {type(error).__name__}: {_first_line(error)}") from error
        self._function: Callable[..., Any] = loaded.fn
        self._guards = loaded._artifacts.guard_manager
        # Of the thread that calls, whose switches are in the name of the artifact's group; not of the one that loads.
        self._switches: tuple[Any, ...] | None = None
        self._per_call: Callable[[Mapping[str, Any]], bool] | None = None
        self._forward: Any = None
        self._parts: weakref.WeakKeyDictionary[nn.Module, _Parts] = weakref.WeakKeyDictionary()
        self._record = record

    def outdated(self) -> str:
        """What of the code and the globals is not as it was, in words; empty if all is."""
        return self._record.difference() or self._checks.difference()

    def misfit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why this call cannot be served, in words, after the full check; empty if it can be."""
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        now = switches()
        if reason := obstacle(module) or changed_switches(self._switches or now, now):
            return reason
        if difference := self._checks.local_difference(inputs):
            return difference
        if not self._guards.check(inputs):
            return _failed_guard(self._guards, inputs)
        if self._per_call is None:
            self._per_call = self._checks.per_call(inputs)
            self._switches = now
            self._forward = type(module).forward
        self._parts[module] = _Parts(module)
        return "" if self.fits(module, args, kwargs) else "a constant or a function was replaced"

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call of a module that passed `misfit` can be served. Takes some tens of microseconds."""
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        return (
            self._switches == switches()
            and type(module).forward is self._forward
            and not any(_GLOBAL_HOOKS)
            and (parts := self._parts.get(module)) is not None
            and parts.are_unhooked()
            and self._guards.check(inputs)
            and self._constants_hold(inputs)
        )

    def _constants_hold(self, inputs: Mapping[str, Any]) -> bool:
        try:
            return self._per_call is not None and self._per_call(inputs)
        except Exception:  # what the expression reads is gone
            return False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits."""
        return self._function(module, args, kwargs)


def _failed_guard(guards: Any, inputs: Mapping[str, Any]) -> str:
    failed = guards.check_verbose(inputs).verbose_code_parts
    return f"guard failed: {str(failed[0]).partition('#')[0].strip()[:200]}" if failed else "a guard failed"


def _traced(source_info: Any) -> dict[str, dict[str, types.CodeType]]:
    """The functions that were traced and can be found by name, by the name of their module."""
    traced: dict[str, dict[str, types.CodeType]] = {}
    for source in source_info.inlined_sources:
        found = _functions_by_line(source.module).get(source.firstlineno, {})
        traced.setdefault(source.module, {}).update(found)
    return traced


def _sources(traced: Mapping[str, Mapping[str, types.CodeType]]) -> dict[str, dict[str, Any]]:
    """Of each module: the checksum of its file, and of each of the functions."""
    return {
        # Of the module of `call_region`, that function is enough.
        name: {
            "file": "" if name == call_region.__module__ else _file_digest(name),
            "functions": {
                qualified: code_digest(code)
                for qualified, code in sorted(functions.items())
                if qualified not in _REPLACED_BY_DYNAMO
            },
        }
        for name, functions in sorted(traced.items())
    }


def _environ_read(traced: Mapping[str, Mapping[str, types.CodeType]]) -> dict[str, str | None]:
    """The values of all that may be names of environment variables, in functions that read some."""
    codes = [code for functions in traced.values() for code in functions.values()]
    readers = [code for code in codes if {"environ", "getenv"} & set(code.co_names)]
    names = sorted(
        {name for code in readers for name in code.co_consts if isinstance(name, str) and name.isidentifier()}
    )
    return {name: os.environ.get(name) for name in names}


@functools.cache
def _functions_by_line(module: str) -> dict[int, dict[str, types.CodeType]]:
    """A module's functions and methods by the line that they begin at, then by qualified name."""
    found: dict[int, dict[str, types.CodeType]] = {}
    for name, value in list(vars(sys.modules[module]).items()):
        members = vars(value).items() if isinstance(value, type) and value.__module__ == module else ()
        for qualified, part in [(name, value), *((f"{name}.{member}", part) for member, part in members)]:
            code = _code_of(part)
            if code is not None and _code_of(resolve(module, qualified)) is code:
                found.setdefault(code.co_firstlineno, {})[qualified] = code
    return found


def _code_of(value: Any) -> types.CodeType | None:
    """The code that runs, or that a decorator has wrapped."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, types.FunctionType) else None


def _source_difference(name: str, source: Mapping[str, Any]) -> str:
    try:
        if source["file"] and _file_digest(name) != source["file"]:
            return f"the source of {name} has changed"
        for qualified, expected in source["functions"].items():
            code = _code_of(resolve(name, qualified))
            if code is None or _cached_code_digest(code) != expected:
                return f"{name}.{qualified} is not the function that was compiled"
    except (NotPrecompilable, KeyError, ImportError) as error:
        return f"the source of {name} cannot be compared: {error}"
    return ""


_cached_code_digest = functools.cache(code_digest)


@functools.cache
def _file_digest(module: str) -> str:
    """SHA-256 of the file that a module was made from, as it is on disk when this is first asked.

    Raises:
        NotPrecompilable: it has none.
    """
    file = getattr(importlib.import_module(module), "__file__", None)
    try:
        with open(file or "", "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError as error:
        raise NotPrecompilable(f"the source of {module} is not at hand") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
