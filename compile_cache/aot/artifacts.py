"""The functions compiled ahead of time of one boot: found for a call, or made.

A group is a class, its structure, a kind of inputs, and everything else that is known before a call: options,
versions, torch's switches. An artifact of it also names the code that was traced and what its guards say, and may fit
some of the group's modules and not others.

Importing this module fails where `adapter.py` does.
"""

from __future__ import annotations

import contextlib
import logging
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_cache.aot.adapter import inductor_options
from compile_cache.aot.call_inputs import describe_call
from compile_cache.aot.compiling import compile_ahead
from compile_cache.aot.describe import (
    Description,
    NotDescribedError,
    class_name,
    describe,
    describe_switches,
    is_inference,
    on_gpu,
    signature,
    structure,
    structure_digest,
    switches,
)
from compile_cache.aot.files import PRECOMPILED, SUFFIX, digest, read_artifact, write_artifact
from compile_cache.aot.precompiled import Precompiled, obstacle
from compile_cache.aot.record import Record
from compile_cache.aot.refusals import Refusal, code_digest_of, read_refusals, write_refusal
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

# As many as Dynamo may make graphs of a function.
MOST_OF_A_GROUP = 64
_MOST_PREFETCHED = 256
# Whose versions decide how a model is traced, besides torch's own.
_TRACED_PACKAGES = ("diffusers", "transformers", "triton")
# Passes of the program's own over a graph, which torch keeps out of the options that it lists.
_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


@dataclass(slots=True)
class _Group:
    """The artifacts of one group in this process; `refused` says why the others are not used. `refusals` are those that
    hold; None before they are read."""

    path: str
    key: dict[str, Description]
    loaded: dict[str, Precompiled] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    is_read: bool = False
    not_precompilable: str = ""
    refusals: list[Refusal] | None = None


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
        self._groups: dict[str, _Group] = {}
        self._options = ""
        self._prefetched: dict[str, _Stored] = {}

    @property
    def used(self) -> set[str]:
        """The paths, inside the cache directory, of what belongs to this boot's model."""
        refusals = {refusal.path for group in self._groups.values() for refusal in group.refusals or ()}
        return refusals | {path for group in self._groups.values() for path in group.loaded}

    def note_options(self) -> None:
        """Take Inductor's options as they are now, in this thread, for those that what follows is compiled with."""
        self._options = _options_digest()

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
                if stored.key.items() >= self._fixed_key().items() and stored.record.is_imported:
                    # Guards are made for the thread-local state that they are made under.
                    with torch.no_grad(), torch.inference_mode(is_inference(stored.key.get("switches"))):
                        self._prefetched[path] = replace(stored, function=stored.load())
            except (ArtifactError, OSError) as error:  # `find` meets it again, and says so
                log.info("precompiled.not_loaded_ahead artifact=%s error=%r", path, error)
        return len(paths)

    def find(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | str:
        """The artifact that serves calls of `module` with inputs like these, after the full check; or why none does."""
        try:
            if reason := obstacle(module):
                return reason
            group = self._group(module, args, kwargs)
        except NotDescribedError as error:
            return f"the inputs cannot be described: {error}"
        if not group.is_read:
            self._read_all(group)
        misfits = []
        for path, function in group.loaded.items():
            if not (misfit := function.misfit(module, args, kwargs)):
                return Found(path, function)
            misfits.append(misfit)
        reasons = [*misfits, *group.refused.values(), *filter(None, (group.not_precompilable,))]
        return "; ".join(dict.fromkeys(reasons)) or "none is stored for these inputs"

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | str:
        """Compile a call ahead of time, and write it; or why it cannot be. Traces the inputs, and runs nothing.

        Raises:
            OSError: the cache directory cannot be written.
        """
        try:
            if reason := obstacle(module):
                return reason
            group = self._group(module, args, kwargs)
        except NotDescribedError as error:
            return f"the inputs cannot be described: {error}"
        if not group.not_precompilable and len(group.loaded) + len(group.refused) >= MOST_OF_A_GROUP:
            group.not_precompilable = f"there are {MOST_OF_A_GROUP} artifacts of this region and these inputs"
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
        group = next(group for group in self._groups.values() if group.path == made.group)
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
        for group in self._groups.values():
            if path.startswith(f"{group.path}/"):
                group.loaded.pop(path, None)
                group.refused[path] = group.not_precompilable = reason

    def refusal(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why calls like this one are served eager, as an earlier boot of the same code has found out; empty if they
        need not be. Reads the group's refusals once."""
        try:
            group = self._group(module, args, kwargs)
        except NotDescribedError:
            return ""
        if group.refusals is None:
            stored = read_refusals(self._directory, group.path)
            group.refusals = [refusal for refusal in stored if refusal.holds(module)]
        return group.refusals[0].reason if group.refusals else ""

    def refuse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> str:
        """Remember, for all boots with the same code, that calls like this one are served eager; the refusal's path
        inside the cache directory. Empty if the inputs or the code cannot be named: then the next boot tries again.

        Raises:
            OSError: the cache directory cannot be written.
        """
        try:
            group, code = self._group(module, args, kwargs), code_digest_of(module)
        except (NotDescribedError, NotPrecompilable) as error:
            log.info("refusal.not_remembered class=%s error=%r", class_name(type(module)), error)
            return ""
        path = write_refusal(self._directory, group.path, group.key, code, reason)
        group.refusals = [refusal for refusal in read_refusals(self._directory, group.path) if refusal.holds(module)]
        return path

    def _group(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Group:
        key = {
            **self._fixed_key(),
            "options": self._options,
            "class": class_name(type(module)),
            "structure": structure_digest(structure(module)),
            "inputs": signature(args, kwargs, with_sizes=self._dynamic is False),
            "switches": describe_switches(switches(on_gpu(module, args, kwargs))),
        }
        name = digest(key)
        if name not in self._groups:
            self._groups[name] = _Group(f"{PRECOMPILED}/{name}", key)
        return self._groups[name]

    def _fixed_key(self) -> dict[str, Description]:
        return {"mode": self._mode, "dynamic": str(self._dynamic), "versions": _versions()}

    def _read_all(self, group: _Group) -> None:
        group.is_read = True
        folder = self._directory / group.path
        names = sorted(entry.name for entry in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
        for name in names:
            path = f"{group.path}/{name}"
            if len(group.loaded) < MOST_OF_A_GROUP:
                try:
                    group.loaded[path] = self._read(group, path)
                except (ArtifactError, OSError) as error:
                    group.refused[path] = str(error)
                    log.info("precompiled.refused artifact=%s reason=%s", path, error)

    def _read(self, group: _Group, path: str) -> Precompiled:
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


def _versions() -> Mapping[str, str]:
    """Of everything that decides how a model is traced and compiled."""
    packages = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in _TRACED_PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {**packages, "torch": str(torch.__version__), "python": python}


def _options_digest() -> str:
    """Of Inductor's options, as set in the program; those from the environment are in the environment's key."""
    return digest(sorted([name, _option(value)] for name, value in inductor_options(_PASSES).items()))


def _option(value: Any) -> str:
    if callable(uuid := getattr(value, "uuid", None)):  # torch._inductor.custom_graph_pass
        return f"{class_name(type(value))} {uuid()!r}"
    if isinstance(value, set | frozenset):
        return repr(sorted(value, key=repr))
    if isinstance(value, Sequence | Mapping | int | float | None):
        return repr(value)
    try:
        return str(describe(value))  # a pass of the program's own
    except NotDescribedError:
        return class_name(type(value))
