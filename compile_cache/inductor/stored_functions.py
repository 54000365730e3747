"""The records of a boot: for a kind of call, functions compiled ahead of time, or a note that its graphs are stored.

A group is one kind of call of a class with everything else that is known before a call: the class, its structure,
options, versions, torch's switches. A function of a group also depends on the traced code and its guards. It may fit
only some of the group's modules.

Importing this module fails if importing `aot.py` fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_cache.calls.description import (
    Description,
    NotDescribedError,
    class_name,
    structure,
    structure_digest,
)
from compile_cache.calls.spec import RECOMPILE_LIMIT, CallSpec, on_gpu
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.files import replacing
from compile_cache.inductor.aot import options_digest
from compile_cache.inductor.function import Precompiled, Record, compile_ahead, sources_digest, why_not_ahead
from compile_cache.inductor.function_file import (
    CACHED,
    COMPARED,
    PRECOMPILED,
    SUFFIX,
    read_artifact,
    write_artifact,
)
from compile_cache.inductor.switches import VERSIONED_PACKAGES, describe_switches, modes_of, switches
from compile_cache.key.environment import digest
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

_MOST_PREFETCHED = 256
# Records of graphs of one kind of call. Each but the last did not hold.
_MOST_CACHED = 8


@dataclass(frozen=True, slots=True)
class _Stored:
    """A read artifact: its path, its group's key, its record, the pickled function, and the function once it is
    loaded."""

    path: str
    key: Mapping[str, Any]
    record: Record
    payload: bytes
    function: Precompiled | None = None

    def load(self) -> Precompiled:
        """Compare the record with this process, and unpickle the function, both once.

        Raises:
            ArtifactError: a thing that the function depends on has changed, or the function cannot be loaded.
        """
        if self.function is None and (difference := self.record.difference()):
            raise ArtifactError(difference)
        return self.function or Precompiled(self.path, self.record, self.payload)


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """The record of a kind that cannot be compiled ahead of time: its graphs are in Inductor's files.

    `seconds` is the time to trace them again. `reason` says why nothing better was made.
    """

    path: str
    seconds: float
    reason: str


@dataclass(slots=True)
class _Group:
    """The artifacts of one group in this process. `refused` says why the other artifacts are not used."""

    path: str
    key: dict[str, Description]
    loaded: dict[str, Precompiled] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    is_read: bool = False
    not_precompilable: str = ""


class Artifacts:
    """All records of a boot."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._mode = settings.mode
        self._dynamic = settings.dynamic
        self._directory = directory
        self._groups: dict[str, _Group] = {}
        self._options: str | None = None
        self._prefetched: dict[str, _Stored] = {}
        # Artifacts arrive on one thread, and other threads look for them.
        self._arriving = threading.RLock()
        self._arrived: set[str] = set()
        self._rejected: dict[str, str] = {}

    def forget_options(self) -> None:
        """Read Inductor's options again at the next call, in that call's thread."""
        self._options = None

    def prefetch(self) -> int:
        """Load every stored artifact of the present code. Returns the number of all stored artifacts.

        While another thread loads the weights, this costs the boot no time. It imports none of the caller's modules,
        because another thread may be importing them.
        """
        folder = self._directory / PRECOMPILED
        paths = sorted(path.relative_to(self._directory).as_posix() for path in folder.glob(f"*/*{SUFFIX}"))
        present = [self._fixed_key(dynamic).items() for dynamic in (self._dynamic, None)]
        for path in paths[:_MOST_PREFETCHED]:
            try:
                stored = self._parse(path)
                if any(stored.key.items() >= fixed for fixed in present) and stored.record.is_imported:
                    self._prefetched[path] = _loaded(stored)
            except (ArtifactError, OSError) as error:  # `find` meets the error again, and reports it
                log.info("precompiled.not_loaded_ahead artifact=%s error=%r", path, error)
        return len(paths)

    def arrive(self, path: str) -> Precompiled:
        """Load an artifact that has just arrived in the cache directory. `find` finds it from now on.

        Raises:
            ArtifactError: the artifact is damaged, or does not belong here.
            OSError: the artifact cannot be read.
        """
        stored = _loaded(self._parse(path))
        function = stored.load()
        if difference := function.outdated():
            raise ArtifactError(difference)
        with self._arriving:
            self._prefetched[path] = stored
            self._arrived.add(path)
            if group := self._group_of(path):
                group.is_read = False
        return function

    def is_compared(self, path: str) -> bool:
        """Whether a boot has compared this artifact with eager on all instances."""
        return (self._directory / path).with_suffix(COMPARED).exists()

    def mark_compared(self, path: str) -> str:
        """Note for later boots that this artifact was compared with eager on all instances. Returns the mark's path.

        Raises:
            OSError: the mark cannot be written.
        """
        mark = f"{path.removesuffix(SUFFIX)}{COMPARED}"
        if not self.is_compared(path):
            with replacing(self._directory / mark) as file:
                file.write(b"compared with eager on all instances\n")
        return mark

    def cached(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedRecord | None:
        """The record of graphs for calls like this. None if there is none, if it is damaged or does
        not hold, or if earlier ones did not hold too often: then the graphs are others in each boot."""
        try:
            group = self._group(module, args, kwargs, self._dynamic)
            path = self._cached_paths(group)[-1]
            found = json.loads((self._directory / path).read_bytes())
            if found["key"] != group.key or path in self._rejected or path.endswith(f"{_MOST_CACHED - 1}{CACHED}"):
                return None
            record = CachedRecord(path, float(found["seconds"]), str(found["reason"]))
        except (NotDescribedError, OSError, ValueError, KeyError, TypeError, IndexError):
            return None
        with self._arriving:
            self._arrived.add(path)
        return record

    def write_cached(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float, reason: str
    ) -> str:
        """Write the record of graphs for calls like this, which takes `seconds` to trace. Returns its path.

        Raises:
            ArtifactError: the call cannot be described, or its graphs are others in each boot.
            OSError: it cannot be written.
        """
        try:
            group = self._group(module, args, kwargs, self._dynamic)
        except NotDescribedError as error:
            raise ArtifactError(f"this call cannot be described: {error}") from error
        number = len(self._cached_paths(group))
        if number == _MOST_CACHED:
            raise ArtifactError("its graphs are others in each boot")
        path = f"{group.path}/{number}{CACHED}"
        record = {"key": group.key, "seconds": seconds, "reason": reason}
        with replacing(self._directory / path) as file:
            file.write(json.dumps(record, sort_keys=True).encode())
        with self._arriving:
            self._arrived.add(path)
        return path

    def _cached_paths(self, group: _Group) -> list[str]:
        """The records of graphs of a group, the latest last. Each came after one that did not hold."""
        return sorted(f"{group.path}/{path.name}" for path in (self._directory / group.path).glob(f"*{CACHED}"))

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Precompiled | str:
        """The artifact for calls of `module` with inputs like these, after the full check; else why there is none.

        An artifact for these sizes comes before an artifact that leaves sizes open.
        """
        reasons: list[str] = []
        try:
            if reason := why_not_ahead(module):
                return reason
            groups = [self._group(module, args, kwargs, dynamic) for dynamic in dict.fromkeys((self._dynamic, None))]
        except NotDescribedError as error:
            return f"this call cannot be described: {error}"
        for group in groups:
            found = self._find_in(group, module, args, kwargs)
            if isinstance(found, Precompiled):
                return found
            reasons += found
        return "; ".join(dict.fromkeys(reasons)) or "none is stored for these inputs and this code"

    def _find_in(
        self, group: _Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Precompiled | list[str]:
        with self._arriving:
            if not group.is_read:
                self._read_all(group)
            loaded = list(group.loaded.values())
        misfits = []
        for function in loaded:
            if not (misfit := function.misfit(module, args, kwargs)):
                return function
            misfits.append(misfit)
        return [*misfits, *group.refused.values(), *filter(None, (group.not_precompilable,))]

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Precompiled]:
        """Compile a call ahead of time, write the artifact, and load it as another boot would. Returns its path too.
        This traces, and runs nothing.

        Make it after `torch.compile` has run the call: only then is autotuning's choice known.

        Raises:
            NotPrecompilable, ArtifactError: no function can serve this call in another process.
            OSError: the cache directory cannot be written.
        """
        try:
            if reason := why_not_ahead(module):
                raise NotPrecompilable(reason)
            group = self._group(module, args, kwargs, self._dynamic)
        except NotDescribedError as error:
            raise NotPrecompilable(f"this call cannot be described: {error}") from error
        if len(group.loaded) + len(group.refused) >= RECOMPILE_LIMIT:
            raise NotPrecompilable(f"there are {RECOMPILE_LIMIT} artifacts of this region and these inputs")
        if group.not_precompilable:
            raise NotPrecompilable(group.not_precompilable)
        try:
            with self._without_leftovers():
                record, payload = compile_ahead(module, args, kwargs, self._mode, self._dynamic, group.path)
        except NotPrecompilable as error:
            group.not_precompilable = str(error)
            raise
        path = f"{group.path}/{write_artifact(self._directory / group.path, group.key, record.to_json(), payload)}"
        if path in group.loaded:
            raise NotPrecompilable("this call has an artifact, which does not fit it")
        function = Precompiled(path, record, payload)
        group.loaded[path] = function
        group.refused.pop(path, None)
        return path, function

    @contextlib.contextmanager
    def _without_leftovers(self) -> Iterator[None]:
        """Remove the entries that torch meanwhile adds to its AOTAutograd cache. Nothing looks up their keys."""
        folder = self._directory / "aotautograd"
        before = set(folder.iterdir()) if folder.is_dir() else set()
        try:
            yield
        finally:
            for entry in set(folder.iterdir()) - before if folder.is_dir() else ():
                shutil.rmtree(entry, ignore_errors=True)

    def reject(self, path: str, reason: str) -> None:
        """Stop using an artifact in this process, and remove its mark."""
        self._rejected[path] = reason
        (self._directory / path).with_suffix(COMPARED).unlink(missing_ok=True)
        self._prefetched.pop(path, None)
        if group := self._group_of(path):
            group.loaded.pop(path, None)
            group.refused[path] = reason

    def _group_of(self, path: str) -> _Group | None:
        return next((group for group in list(self._groups.values()) if path.startswith(f"{group.path}/")), None)

    def _group(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool | None) -> _Group:
        """The group of a call. `dynamic` has torch.compile's meaning: with False, the group has the tensors' sizes.

        Raises:
            NotDescribedError: the inputs or the options cannot be described.
        """
        if self._options is None:
            try:
                self._options = options_digest()
            except Exception as error:  # a custom pass whose `uuid` raises
                raise NotDescribedError(f"Inductor's options: {type(error).__name__}: {error}") from error
        key = {
            **self._fixed_key(dynamic),
            "options": self._options,
            "class": class_name(type(module)),
            "code": sources_digest(module),
            "structure": structure_digest(structure(module)),
            "inputs": CallSpec.of(module, args, kwargs).stored(with_sizes=dynamic is False),
            "switches": describe_switches(switches(on_gpu(module, args, kwargs))),
        }
        name = digest(key)
        return self._groups.setdefault(name, _Group(f"{PRECOMPILED}/{name}", key))

    def _fixed_key(self, dynamic: bool | None) -> dict[str, Description]:
        return {"mode": self._mode, "dynamic": str(dynamic), "versions": versions()}

    def _read_all(self, group: _Group) -> None:
        group.is_read = True
        folder = self._directory / group.path
        names = sorted(entry.name for entry in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
        for name in names:
            path = f"{group.path}/{name}"
            if path not in group.loaded and path not in group.refused and len(group.loaded) < RECOMPILE_LIMIT:
                try:
                    if path in self._rejected:
                        raise ArtifactError(self._rejected[path])
                    group.loaded[path] = self._read(group, path)
                except (ArtifactError, OSError) as error:
                    group.refused[path] = str(error)
                    log.info("precompiled.refused artifact=%s reason=%s", path, error)

    def _read(self, group: _Group, path: str) -> Precompiled:
        stored = self._prefetched.pop(path, None) or self._parse(path)
        if stored.key != group.key:
            raise ArtifactError("it belongs to another group")
        function = stored.load()
        if difference := function.outdated():  # a function that was loaded ahead may be outdated by now
            raise ArtifactError(difference)
        return function

    def _parse(self, path: str) -> _Stored:
        """Read an artifact without unpickling its function."""
        key, record, payload = read_artifact(self._directory / path)
        return _Stored(path, key, Record.from_json(record), payload)


def _loaded(stored: _Stored) -> _Stored:
    """The artifact with its function loaded. The guards are made for the thread-local state of this call."""
    with modes_of(stored.key.get("switches")):
        return replace(stored, function=stored.load())


def versions() -> Mapping[str, str]:
    """The versions of everything that decides how a model is traced and compiled."""
    packages = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in VERSIONED_PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {**packages, "torch": str(torch.__version__), "python": python}
