"""The functions of a boot that were compiled ahead of time: finds them for a call, or makes them.

A group is a class, its structure, a kind of inputs, and everything else that is known before a call: options, versions,
torch's switches. An artifact of a group also depends on the traced code and its guards. It may fit only some of the
group's modules.

Importing this module fails if importing `adapter.py` fails.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.files import replacing
from compile_cache.inductor.compiling import compile_ahead
from compile_cache.inductor.describe import NotDescribedError, modes_of
from compile_cache.inductor.files import CACHED, COMPARED, PRECOMPILED, SUFFIX, read_artifact, write_artifact
from compile_cache.inductor.groups import Group, Groups
from compile_cache.inductor.options import RECOMPILE_LIMIT
from compile_cache.inductor.precompiled import Precompiled, why_not_ahead
from compile_cache.inductor.record import Record
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

_MOST_PREFETCHED = 256


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
    """What was made of calls that cannot be compiled ahead of time: graphs of `torch.compile`, in Inductor's files.

    `is_whole`: one graph. `seconds` is the time to trace them again. `reason` says why nothing better was made.
    """

    is_whole: bool
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Made:
    """A new artifact. `load` loads it in the same way as another boot.

    Load it after the region has run: only then is autotuning's choice known.
    """

    path: str
    load: Callable[[], Precompiled]
    group: str


class Artifacts:
    """All precompiled regions of a boot."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self._mode = settings.mode
        self._dynamic = settings.dynamic
        self._directory = directory
        self._groups = Groups(settings)
        self._prefetched: dict[str, _Stored] = {}
        # Artifacts arrive on one thread, and other threads look for them.
        self._arriving = threading.RLock()
        self._arrived: set[str] = set()
        self._rejected: dict[str, str] = {}

    @property
    def used(self) -> set[str]:
        """The paths, inside the cache directory, of the artifacts of this boot's model."""
        with self._arriving:
            loaded = {path for group in self._groups for path in group.loaded}
            return self._arrived | loaded

    def forget_options(self) -> None:
        """Read Inductor's options again at the next call, in that call's thread."""
        self._groups.forget_options()

    def prefetch(self) -> int:
        """Load every stored artifact of the present code. Returns the number of all stored artifacts.

        While another thread loads the weights, this costs the boot no time. It imports none of the caller's modules,
        because another thread may be importing them.
        """
        folder = self._directory / PRECOMPILED
        paths = sorted(path.relative_to(self._directory).as_posix() for path in folder.glob(f"*/*{SUFFIX}"))
        for path in paths[:_MOST_PREFETCHED]:
            try:
                stored = self._parse(path)
                if self._groups.may_hold(stored.key) and stored.record.is_imported:
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
            for group in self._groups:
                if path.startswith(f"{group.path}/"):
                    group.is_read = False
        return function

    def is_compared(self, path: str) -> bool:
        """Whether a boot has compared this artifact with eager on all instances."""
        return (self._directory / path).with_suffix(COMPARED).exists()

    def mark_compared(self, path: str) -> None:
        """Note for later boots that this artifact was compared with eager on all instances.

        Raises:
            OSError: the mark cannot be written.
        """
        with replacing((self._directory / path).with_suffix(COMPARED)) as file:
            file.write(b"compared with eager on all instances\n")

    def cached(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedRecord | None:
        """The record of graphs for calls like this; None if there is none, or it is damaged."""
        try:
            group = self._groups.of(module, args, kwargs, self._dynamic)
            found = json.loads((self._directory / group.path / CACHED).read_bytes())
            is_whole, seconds, reason = found["is_whole"], float(found["seconds"]), str(found["reason"])
            if found["key"] != group.key:
                return None
            with self._arriving:
                self._arrived.add(f"{group.path}/{CACHED}")
            return CachedRecord(bool(is_whole), seconds, reason)
        except (NotDescribedError, OSError, ValueError, KeyError, TypeError):
            return None

    def write_cached(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: CachedRecord
    ) -> str:
        """Write the record of graphs for calls like this. Returns its path.

        Raises:
            NotDescribedError: the call cannot be described.
            OSError: it cannot be written.
        """
        group = self._groups.of(module, args, kwargs, self._dynamic)
        path = f"{group.path}/{CACHED}"
        with replacing(self._directory / path) as file:
            file.write(json.dumps({"key": group.key, **asdict(record)}, sort_keys=True).encode())
        with self._arriving:
            self._arrived.add(path)
        return path

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Precompiled | str:
        """The artifact for calls of `module` with inputs like these, after the full check; else why there is none.

        An artifact for these sizes comes before an artifact that leaves sizes open.
        """
        reasons: list[str] = []
        try:
            if reason := why_not_ahead(module):
                return reason
            groups = [
                self._groups.of(module, args, kwargs, dynamic) for dynamic in dict.fromkeys((self._dynamic, None))
            ]
        except NotDescribedError as error:
            return f"this call cannot be described: {error}"
        for group in groups:
            found = self._find_in(group, module, args, kwargs)
            if isinstance(found, Precompiled):
                return found
            reasons += found
        return "; ".join(dict.fromkeys(reasons)) or "none is stored for these inputs"

    def _find_in(
        self, group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
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

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | str:
        """Compile a call ahead of time and write the artifact; else why that is impossible. This traces, and runs
        nothing.

        Raises:
            OSError: the cache directory cannot be written.
        """
        try:
            if reason := why_not_ahead(module):
                return reason
            group = self._groups.of(module, args, kwargs, self._dynamic)
        except NotDescribedError as error:
            return f"this call cannot be described: {error}"
        if not group.not_precompilable and len(group.loaded) + len(group.refused) >= RECOMPILE_LIMIT:
            group.not_precompilable = f"there are {RECOMPILE_LIMIT} artifacts of this region and these inputs"
        if group.not_precompilable:
            return group.not_precompilable
        try:
            with self._without_leftovers():
                record, payload = compile_ahead(module, args, kwargs, self._mode, self._dynamic)
        except NotPrecompilable as error:
            group.not_precompilable = str(error)
            return group.not_precompilable
        name = write_artifact(self._directory / group.path, group.key, record.to_json(), payload)
        path = f"{group.path}/{name}"
        if path in group.loaded:
            return "this call has an artifact, which does not fit it"
        return Made(path, _Stored(path, group.key, record, payload).load, group.path)

    def take(self, made: Made, function: Precompiled) -> None:
        """Let a new artifact that proved right serve this process too."""
        group = next(group for group in self._groups if group.path == made.group)
        group.loaded[made.path] = function
        group.refused.pop(made.path, None)

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
        """Stop using an artifact in this process."""
        self._rejected[path] = reason
        self._prefetched.pop(path, None)
        for group in self._groups:
            if path.startswith(f"{group.path}/"):
                group.loaded.pop(path, None)
                group.refused[path] = reason

    def _read_all(self, group: Group) -> None:
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

    def _read(self, group: Group, path: str) -> Precompiled:
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
