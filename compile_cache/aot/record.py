"""What is stored beside a compiled function, to be compared before it is unpickled: the code that was traced, and the
host where that decides what was compiled.

torch stores checksums of the traced sources, and never looks at them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compile_cache.aot.adapter import Compilation, torch_key
from compile_cache.aot.describe import code_digest
from compile_cache.aot.guards import RecordedGuard, importable, resolve
from compile_cache.aot.sources import file_digest
from compile_cache.aot.traced import call_region
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.key import environment

# Dynamo replaces these as soon as it compiles anything (torch/_dynamo/mutation_guard.py), so they differ in a process
# that only loads.
_REPLACED_BY_DYNAMO = frozenset({"Module.__init__", "Module.__setstate__"})
# How generated code loads kernels in C++ (torch/_inductor/codegen/cpp.py, cpp_wrapper_cpu.py).
_CPP_KERNELS = re.compile(rb"\b(cpp_pybinding|load_pybinding|async_compile\.cpp)\w*\(")

_Traced = Mapping[str, Mapping[str, types.CodeType]]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """`sources` has checksums of the files that were traced, and of the functions in them that were.

    `environ` has the variables that these functions may have read, which torch does not guard; `guards` the guards
    that torch cannot store; `modules` and `globals` what the compiled function finds in its global scope;
    `torch_key` the digest of torch's own sources; `host` the CPU's instructions and the number of threads, for a
    function with kernels in C++.
    """

    sources: dict[str, dict[str, Any]]
    environ: dict[str, str | None]
    guards: list[RecordedGuard]
    modules: dict[str, str]
    globals: dict[str, tuple[str, str]]
    torch_key: str
    host: dict[str, str]

    @classmethod
    def of(cls, compilation: Compilation, guards: list[RecordedGuard]) -> Record:
        """The record of a function that was just compiled here.

        Raises:
            NotPrecompilable: another process could not find what it uses.
        """
        traced = _traced(compilation.traced)
        return cls(
            _sources(traced),
            _environ_read(traced),
            guards,
            compilation.modules,
            {name: importable(value) for name, value in compilation.externals.items()},
            torch_key(),
            _host() if _CPP_KERNELS.search(compilation.payload) else {},
        )

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
            guards = [RecordedGuard(**guard) for guard in record["guards"]]
            names = {name: (module, qualified) for name, (module, qualified) in record["globals"].items()}
            environ, modules, host = (dict(record[name]) for name in ("environ", "modules", "host"))
            return cls(dict(record["sources"]), environ, guards, modules, names, str(record["torch_key"]), host)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"its record cannot be read: {error!r}") from error

    @property
    def is_imported(self) -> bool:
        """Whether all modules that it names have been imported, so that looking at them imports nothing."""
        names = {*self.sources, *self.modules.values(), *(module for module, _ in self.globals.values())}
        specs = [getattr(sys.modules.get(name), "__spec__", None) for name in names - {"__main__"}]
        return all(spec is not None and not getattr(spec, "_initializing", False) for spec in specs)

    def difference(self) -> str:
        """What of the host and of the traced code is not as it was, in words; empty if all is."""
        here = _host() if self.host else {}
        for name, was in self.host.items():
            if here.get(name) != was:
                return f"it has C++ kernels for a host with {name} {was!r}, and this one has {here.get(name)!r}"
        for name, source in self.sources.items():
            if difference := _source_difference(name, source):
                return difference
        # Not a setting of this library, but what the model's code has read.
        changed = [name for name, value in self.environ.items() if os.environ.get(name) != value]
        return f"the environment variable {changed[0]} has changed" if changed else ""


def _host() -> dict[str, str]:
    return {"instructions": environment.instruction_flags(), "threads": str(torch.get_num_threads())}


def _traced(functions: Iterable[tuple[str, int]]) -> _Traced:
    """The functions that were traced and can be found by name, by the name of their module."""
    traced: dict[str, dict[str, types.CodeType]] = {}
    for module, first_line in functions:
        traced.setdefault(module, {}).update(_functions_by_line(module).get(first_line, {}))
    return traced


def _sources(traced: _Traced) -> dict[str, dict[str, Any]]:
    """Of each module: the checksum of its file, and of each of the functions."""
    return {
        # Of the module of `call_region`, that function is enough.
        name: {
            "file": "" if name == call_region.__module__ else file_digest(name),
            "functions": {
                qualified: code_digest(code)
                for qualified, code in sorted(functions.items())
                if qualified not in _REPLACED_BY_DYNAMO
            },
        }
        for name, functions in sorted(traced.items())
    }


def _environ_read(traced: _Traced) -> dict[str, str | None]:
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
        if source["file"] and file_digest(name) != source["file"]:
            return f"the source of {name} has changed"
        for qualified, expected in source["functions"].items():
            code = _code_of(resolve(name, qualified))
            if code is None or _cached_code_digest(code) != expected:
                return f"{name}.{qualified} is not the function that was compiled"
    except (NotPrecompilable, KeyError, ImportError) as error:
        return f"the source of {name} cannot be compared: {error}"
    return ""


_cached_code_digest = functools.cache(code_digest)
