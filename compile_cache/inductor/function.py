"""A function compiled ahead of time: how it is made, loaded, and checked against a call; and its record.

The record is compared before the function is unpickled. It has the traced code, and the host if the compiled code
depends on it. torch also stores checksums of the traced sources, but never reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import nn

from compile_cache.calls.description import class_name, code_digest
from compile_cache.calls.module_state import GLOBAL_HOOKS, HOOKS, Parts, parts_of, why_eager
from compile_cache.calls.spec import on_gpu
from compile_cache.calls.torch_call import Args, Call, Kwargs, call_region
from compile_cache.errors import ArtifactError, Failure, causes, log
from compile_cache.importable import find, look_up
from compile_cache.inductor.aot import Compilation, compile_call, load_function
from compile_cache.inductor.guards import Check, Checks, Inputs, RecordedGuard, Recorder, modules_of
from compile_cache.inductor.lean_loading import torch_key, triton_key
from compile_cache.inductor.torch_state import changed_switches, switches
from compile_cache.key.environment import digest, instruction_flags
from compile_cache.of_each import OfEach

# Dynamo replaces these functions once it compiles (torch/_dynamo/mutation_guard.py), so they differ in a process that
# only loads.
_REPLACED_BY_DYNAMO = tuple(f"torch.nn.modules.module:Module.{name}" for name in ("__init__", "__setstate__"))
# Generated code loads C++ kernels with these calls (torch/_inductor/codegen/cpp.py, cpp_wrapper_cpu.py).
_CPP_KERNELS = re.compile(rb"\b(cpp_pybinding|load_pybinding|async_compile\.cpp)\w*\(")


def why_not_ahead(module: nn.Module) -> str:
    """Why no function compiled ahead of time may serve calls of `module` in its present state; empty if one may."""
    if torch.is_grad_enabled():
        return "gradients are recorded; call the model under torch.inference_mode() or torch.no_grad()"
    if any(vars(part).get(hooks) for part in parts_of(module) for hooks in HOOKS):
        return "it has a hook of torch.nn.utils"
    return why_eager(module)


class _Accepted(NamedTuple):
    """What a call had that first passed the full check of a function. Later calls have the same."""

    is_on_gpu: bool
    switches: tuple[Any, ...]
    forwards: tuple[Any, ...]
    overlaps: tuple[tuple[int, int], ...]
    constants_hold: Check


class Precompiled:
    """A loaded compiled function, for all modules and inputs that it fits. `path` is its file. `compared_on` has the
    places in the model of the instances on which earlier boots of this very version have compared it with eager."""

    def __init__(self, path: str, record: Record, payload: bytes) -> None:
        """Unpickle `payload`, which must be verified.

        Raises:
            ArtifactError: the function cannot be loaded.
        """
        try:
            externals = {name: find(name) for name in record.globals}
            self._function, self._guards = load_function(payload, externals, record.torch_key, record.triton_key)
            self._checks = Checks(record.guards, record.salt)
        except Exception as error:  # any: the payload is damaged, or of another torch
            raise ArtifactError(f"it cannot be loaded: {Failure(error).reason}") from error
        self.path, self.compared_on = path, frozenset[str]()
        self._check_guards = self._guards.check
        # Of the calling thread: the group's name has its switches, and the loading thread may have others.
        self._accepted: _Accepted | None = None
        self._parts: OfEach[Parts] = OfEach()
        self._record = record

    def outdated(self) -> str:
        """The first change in the host, the code and the globals, in words; empty if nothing changed."""
        return self._record.difference() or self._checks.difference()

    def misfit(self, call: Call) -> str:
        """Why the function does not fit this call, after the full check; empty if it fits."""
        if self.fits(call):
            return ""
        module, args, kwargs = call
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        is_on_gpu, accepted = on_gpu(call), self._accepted
        now = switches(is_on_gpu)
        if accepted and (reason := changed_switches(accepted.switches, now)):
            return reason
        if module in self._parts and (reason := self._failed_guard(inputs)):  # most differences
            return reason
        if reason := why_not_ahead(module):
            return reason
        if accepted is None and (reason := self.outdated()):
            return reason
        parts = Parts(module)
        overlaps = parts.overlaps(args, kwargs)
        if accepted and accepted.forwards != parts.forwards:
            return "a class has another `forward`"
        if accepted and accepted.overlaps != overlaps:
            return "other inputs share memory"
        if difference := self._checks.difference(inputs) or self._failed_guard(inputs):
            return difference
        if accepted is None:
            self._accepted = _Accepted(is_on_gpu, now, parts.forwards, overlaps, self._checks.per_call(inputs))
        self._parts[module] = parts
        return "" if self.fits(call) else "a constant or a function was replaced"

    def _failed_guard(self, inputs: Inputs) -> str:
        """The guard that refuses a call, in words; empty if none does."""
        if self._check_guards(inputs):
            return ""
        failed = self._guards.check_verbose(inputs).verbose_code_parts
        return f"guard failed: {str(failed[0]).partition('#')[0].strip()[:200]}" if failed else "a guard failed"

    def fits(self, call: Call) -> bool:
        """Whether the function fits this call of a module that passed `misfit`. Takes some tens of microseconds."""
        module, args, kwargs = call
        accepted, parts = self._accepted, self._parts.get(module)
        if accepted is None or parts is None:
            return False
        inputs = {"module": module, "args": args, "kwargs": kwargs}
        try:
            return (
                accepted.switches == switches(accepted.is_on_gpu)
                and not any(GLOBAL_HOOKS)
                and parts.are_unhooked()
                and parts.overlaps(args, kwargs) == accepted.overlaps
                and self._check_guards(inputs)
                and accepted.constants_hold(inputs)
            )
        except Exception as error:  # a guard reads any object of the model's, which may be gone
            log.info("precompiled.not_checked artifact=%s error=%r", self.path, error)
            return False

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """Serve a call that fits."""
        return self._function(module, args, kwargs)


def compile_ahead(call: Call, mode: str, dynamic: bool | None, salt: str) -> tuple[Record, bytes]:
    """Compile a call. This traces the call, and runs nothing. `salt` names its group.

    Raises:
        ArtifactError: torch refuses, or the compiled code might be wrong in another process.
        MemoryError, torch.OutOfMemoryError: memory ran out; the call is not to blame.
    """
    recorder = Recorder(on_gpu(call), salt)
    try:
        compilation = compile_call(call, mode, dynamic, recorder)
    except ArtifactError:
        raise
    except Exception as error:  # torch cannot compile this ahead of time
        for cause in causes(error):
            if isinstance(cause, MemoryError | torch.OutOfMemoryError):
                raise type(cause)(str(cause)) from error
        raise ArtifactError(f"torch: {Failure(error).reason}") from error
    return Record.of(compilation, recorder.guards(), salt), compilation.payload


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The record of a compiled function.

    | field | content |
    | --- | --- |
    | `files`, `functions` | checksums by module of the traced files and of `aot.py`; by name, of the traced functions |
    | `salt` | the name of the function's group; no digest of a text is the same in another group |
    | `environ` | digests of the variables that these functions may have read; torch does not guard them |
    | `guards` | the guards that torch cannot store |
    | `modules`, `globals` | the names of what the guards and the compiled function read |
    | `torch_key`, `triton_key` | the digests of torch's own sources, and of Triton's |
    | `host` | for a function with C++ kernels: the CPU's instructions and the number of threads |
    | `sizes` | in a group of all sizes, those of the call that it was made for: others may need another function |
    """

    files: dict[str, str]
    functions: dict[str, str]
    salt: str
    environ: dict[str, str | None]
    guards: list[RecordedGuard]
    modules: list[str]
    globals: list[str]
    torch_key: str
    triton_key: str
    host: dict[str, str]
    sizes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, compilation: Compilation, guards: list[RecordedGuard], salt: str) -> Record:
        """The record of a function that this process has just compiled.

        Raises:
            ArtifactError: a traced file is missing.
        """
        # In the module of `call_region`, only that function counts. A pickled function names functions of `aot.py`.
        modules = {module for module, _ in compilation.traced} - {call_region.__module__} | {compile_call.__module__}
        files = {module: file_digest(module) for module in sorted(modules)}
        if missing := [module for module, content in files.items() if not content]:
            raise ArtifactError(f"the source file of {missing[0]} is missing")
        # Of the traced functions, those that can be found by name.
        functions: dict[str, types.CodeType] = {}
        for module, line in sorted(compilation.traced):
            functions |= _functions_by_line(module).get(line, {})
        return cls(
            files,
            {name: code_digest(code) for name, code in functions.items() if name not in _REPLACED_BY_DYNAMO},
            salt,
            {name: _sealed(salt, name) for name in _variables_read(functions.values())},
            guards,
            sorted(compilation.modules | modules_of(guards)),
            compilation.externals,
            torch_key(),
            triton_key(),
            _host() if _CPP_KERNELS.search(compilation.payload) else {},
        )

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Record:
        """The record with these plain values.

        Raises:
            ArtifactError: `record` is invalid.
        """
        try:
            return msgspec.convert(record, cls)
        except msgspec.ValidationError as error:
            raise ArtifactError(f"its record cannot be read: {error}") from error

    @property
    def is_imported(self) -> bool:
        """Whether all modules that the record names are imported, so that comparing it imports nothing."""
        names = {*self.files, *self.modules, *(name.partition(":")[0] for name in self.globals)}
        specs = [getattr(sys.modules.get(name), "__spec__", None) for name in names - {"__main__"}]
        return all(spec is not None and not getattr(spec, "_initializing", False) for spec in specs)

    def difference(self) -> str:
        """The first change in the host and the traced code, in words; empty if nothing changed."""
        here = _host() if self.host else {}
        for name, was in self.host.items():
            if here.get(name) != was:
                return f"it has C++ kernels for a host with {name} {was!r}; this host has {here.get(name)!r}"
        if changed := [module for module, was in self.files.items() if file_digest(module) != was]:
            return f"the source of {changed[0]} has changed"
        for name, was in self.functions.items():
            code = _code_of(look_up(name))
            if code is None or code_digest(code) != was:
                return f"{name} is not the function that was compiled"
        # These are no settings of this library. The model's code has read them.
        changed = [name for name, value in self.environ.items() if _sealed(self.salt, name) != value]
        return f"the environment variable {changed[0]} has changed" if changed else ""


def _host() -> dict[str, str]:
    return {"instructions": instruction_flags(), "threads": str(torch.get_num_threads())}


def _variables_read(codes: Iterable[types.CodeType]) -> list[str]:
    """The variables that the functions may have read: every text in a function that reads any."""
    readers = [code for code in codes if {"environ", "getenv"} & set(code.co_names)]
    return sorted(
        {name for code in readers for name in code.co_consts if isinstance(name, str) and name.isidentifier()}
    )


def _sealed(salt: str, name: str) -> str | None:
    """The digest of a variable's value, which may be a secret; None without the variable."""
    value = os.environ.get(name)
    return None if value is None else digest([salt, name, value])


@functools.cache
def _functions_by_line(module: str) -> dict[int, dict[str, types.CodeType]]:
    """A module's functions and methods by first line, then by `module:qualified.name`."""
    found: dict[int, dict[str, types.CodeType]] = {}
    for name, value in list(vars(sys.modules[module]).items()):
        members = vars(value).items() if isinstance(value, type) and value.__module__ == module else ()
        for qualified, part in [(name, value), *((f"{name}.{member}", part) for member, part in members)]:
            code, reference = _code_of(part), f"{module}:{qualified}"
            if code is not None and _code_of(look_up(reference)) is code:
                found.setdefault(code.co_firstlineno, {})[reference] = code
    return found


def _code_of(value: Any) -> types.CodeType | None:
    """The code of a function, without its decorators."""
    value = value.fget if isinstance(value, property) else value
    value = getattr(value, "__func__", value)
    while hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    return value.__code__ if isinstance(value, types.FunctionType) else None


def sources_digest(module: nn.Module) -> str:
    """The digest of the classes of a module and its parts, without torch's: their files, and their methods, which may
    be of no file. torch names no traced code that has no file."""
    kinds = {kind for part in parts_of(module) for kind in type(part).__mro__}
    own = sorted((kind for kind in kinds if not kind.__module__.startswith(("torch.", "builtins"))), key=class_name)
    return digest([[class_name(kind), file_digest(kind.__module__), *_methods(kind)] for kind in own])


def _methods(kind: type) -> list[list[str]]:
    codes = ((name, _code_of(value)) for name, value in sorted(vars(kind).items()))
    return [[name, code_digest(code)] for name, code in codes if code is not None]


@functools.cache
def file_digest(module: str) -> str:
    """SHA-256 of a module's source file, which is read from disk once; empty if there is none."""
    try:
        file = getattr(importlib.import_module(module), "__file__", None)
        with open(file or "", "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except (ImportError, OSError):
        return ""
