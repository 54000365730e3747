"""The functions compiled ahead of time of one boot: found for a call, or made.

A group is a class, its structure, a kind of inputs, and everything else that is known before a call: options,
versions, torch's switches. An artifact of it also names the code that was traced and what its guards say, and may fit
some of the group's modules and not others.

Importing this module fails where `adapter.py` does.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_cache.aot.call_inputs import describe_call
from compile_cache.aot.compiling import compile_ahead
from compile_cache.aot.describe import (
    NotDescribedError,
    is_inference,
)
from compile_cache.aot.files import PRECOMPILED, SUFFIX, read_artifact, write_artifact
from compile_cache.aot.groups import Group, Groups
from compile_cache.aot.options import RECOMPILE_LIMIT
from compile_cache.aot.precompiled import Precompiled, obstacle
from compile_cache.aot.record import Record
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

_MOST_PREFETCHED = 256


@dataclass(frozen=True, slots=True)
class _Stored:
    """An artifact that was read: its group's key, its record, the pickled function, and the function once loaded."""

    key: Mapping[str, Any]
    record: Record
    payload: bytes
    function: Precompiled | None = None

    def load(self) -> Precompiled:
        """Compare its record with this process, and unpickle it, if that was not done.

        Raises:
            ArtifactError: something that it depends on is not as it was, or it cannot be loaded.
        """
        if self.function is None and (difference := self.record.difference()):
            raise ArtifactError(difference)
        return self.function or Precompiled(self.record, self.payload)


@dataclass(frozen=True, slots=True)
class Found:
    """An artifact that serves a module, and its path inside the cache directory."""

    path: str
    function: Precompiled


@dataclass(frozen=True, slots=True)
class Made:
    """An artifact that was just written; `load` does what another boot will do to have it.

    It is loaded after the region has run: only then is it known what autotuning has chosen.
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
        self._groups = Groups(settings, directory)
        self._prefetched: dict[str, _Stored] = {}
        # Artifacts arrive on one thread, and are looked for on others.
        self._arriving = threading.RLock()
        self._arrived: set[str] = set()

    @property
    def used(self) -> set[str]:
        """The paths, inside the cache directory, of what belongs to this boot's model."""
        with self._arriving:
            refusals = {refusal.path for group in self._groups for refusal in group.refusals or ()}
            loaded = {path for group in self._groups for path in group.loaded}
            return self._arrived | refusals | loaded

    def forget_options(self) -> None:
        """Take Inductor's options anew at the next call, in its thread: what follows is compiled with those."""
        self._groups.forget_options()

    def refusal(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why an earlier boot of the same code has served such calls eager; empty if they need not be."""
        return self._groups.refusal(module, args, kwargs)

    def refuse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> str:
        """Remember for later boots that such calls are served eager; the path of the file, empty if there is none.

        Raises:
            OSError: the cache directory cannot be written.
        """
        return self._groups.refuse(module, args, kwargs, reason)

    def prefetch(self) -> int:
        """Load every artifact that is there and was made of the code that is here; how many there are, with the others.

        On a thread beside the loading of the weights, this takes no time from the boot. It imports nothing of the
        caller's, which another thread may be importing.
        """
        folder = self._directory / PRECOMPILED
        paths = sorted(path.relative_to(self._directory).as_posix() for path in folder.glob(f"*/*{SUFFIX}"))
        for path in paths[:_MOST_PREFETCHED]:
            try:
                stored = self._parse(path)
                if self._groups.may_hold(stored.key) and stored.record.is_imported:
                    self._prefetched[path] = _loaded(stored)
            except (ArtifactError, OSError) as error:  # `find` meets it again, and says so
                log.info("precompiled.not_loaded_ahead artifact=%s error=%r", path, error)
        return len(paths)

    def arrive(self, path: str) -> None:
        """Load an artifact that has just come into the cache directory. `find` finds it from now on.

        Raises:
            ArtifactError: it is damaged, or does not belong here.
            OSError: it cannot be read.
        """
        stored = _loaded(self._parse(path))
        with self._arriving:
            self._prefetched[path] = stored
            self._arrived.add(path)
            for group in self._groups:
                if path.startswith(f"{group.path}/"):
                    group.is_read = False

    def let_go(self, path: str) -> None:
        """Forget a loaded artifact, and remove its file."""
        with self._arriving:
            for group in self._groups:
                group.loaded.pop(path, None)
            self._prefetched.pop(path, None)
            self._arrived.discard(path)
        (self._directory / path).unlink(missing_ok=True)

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | str:
        """The artifact that serves calls of `module` with inputs like these, after the full check; or why none does.

        One for these sizes comes first, then one that leaves sizes open.
        """
        reasons: list[str] = []
        try:
            if reason := obstacle(module):
                return reason
            groups = [
                self._groups.of(module, args, kwargs, dynamic) for dynamic in dict.fromkeys((self._dynamic, None))
            ]
        except NotDescribedError as error:
            return f"this call cannot be described: {error}"
        for group in groups:
            found = self._find_in(group, module, args, kwargs)
            if isinstance(found, Found):
                return found
            reasons += found
        return "; ".join(dict.fromkeys(reasons)) or "none is stored for these inputs"

    def _find_in(
        self, group: Group, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Found | list[str]:
        with self._arriving:
            if not group.is_read:
                self._read_all(group)
            loaded = list(group.loaded.items())
        misfits = []
        for path, function in loaded:
            if not (misfit := function.misfit(module, args, kwargs)):
                return Found(path, function)
            misfits.append(misfit)
        return [*misfits, *group.refused.values(), *filter(None, (group.not_precompilable,))]

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | str:
        """Compile a call ahead of time, and write it; or why it cannot be. Traces the inputs, and runs nothing.

        Raises:
            OSError: the cache directory cannot be written.
        """
        try:
            if reason := obstacle(module):
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
        call = describe_call(args, kwargs)
        name = write_artifact(self._directory / group.path, group.key, record.to_json(), payload, call)
        path = f"{group.path}/{name}"
        if path in group.loaded:
            group.not_precompilable = "the artifact of this call is there, and does not fit it"
            return group.not_precompilable
        return Made(path, _Stored(group.key, record, payload).load, group.path)

    def take(self, made: Made, function: Precompiled) -> None:
        """Let an artifact that was just made, and has proved right, serve this process as well."""
        group = next(group for group in self._groups if group.path == made.group)
        group.loaded[made.path] = function
        group.refused.pop(made.path, None)

    @contextlib.contextmanager
    def _without_leftovers(self) -> Iterator[None]:
        """Remove the entries that torch adds to its AOTAutograd cache meanwhile: under a key that nothing looks up."""
        folder = self._directory / "aotautograd"
        before = set(folder.iterdir()) if folder.is_dir() else set()
        try:
            yield
        finally:
            for entry in set(folder.iterdir()) - before if folder.is_dir() else ():
                shutil.rmtree(entry, ignore_errors=True)

    def reject(self, path: str, reason: str) -> None:
        """Never use an artifact again in this process, nor make another one in its place."""
        for group in self._groups:
            if path.startswith(f"{group.path}/"):
                group.loaded.pop(path, None)
                group.refused[path] = group.not_precompilable = reason

    def _read_all(self, group: Group) -> None:
        group.is_read = True
        folder = self._directory / group.path
        names = sorted(entry.name for entry in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
        for name in names:
            path = f"{group.path}/{name}"
            if path not in group.loaded and path not in group.refused and len(group.loaded) < RECOMPILE_LIMIT:
                try:
                    group.loaded[path] = self._read(group, path)
                except (ArtifactError, OSError) as error:
                    group.refused[path] = str(error)
                    log.info("precompiled.refused artifact=%s reason=%s", path, error)

    def _read(self, group: Group, path: str) -> Precompiled:
        stored = self._prefetched.pop(path, None) or self._parse(path)
        if stored.key != group.key:
            raise ArtifactError("it belongs to another group")
        function = stored.load()
        if difference := function.outdated():  # by now, if it was loaded ahead
            raise ArtifactError(difference)
        return function

    def _parse(self, path: str) -> _Stored:
        """Nothing is unpickled."""
        key, record, payload = read_artifact(self._directory / path)
        return _Stored(key, Record.from_json(record), payload)


def _loaded(stored: _Stored) -> _Stored:
    """The same with its function, whose guards are made for the thread-local state that they are made under."""
    with torch.no_grad(), torch.inference_mode(is_inference(stored.key.get("switches"))):
        return replace(stored, function=stored.load())
