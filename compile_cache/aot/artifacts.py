"""Precompiled regions as files of the cache directory: `precompiled/<group>/<artifact>.aot`.

A group is a class, its structure, a kind of inputs, and everything else that is known before a call: options,
versions, torch's switches. An artifact of it also names the code that was traced and what its guards say, and may fit
some of the group's modules and not others. Both names are digests of what they stand for, so that two cold boots write
the same names.

    8 bytes magic, 4 bytes length of the header (big endian), header (JSON), compiled function (torch's pickle)

The header is read, and compared with this process, before anything is unpickled. This module imports torch, and is
itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from compile_cache.aot.adapter import Precompiled, Record, compile_ahead, obstacle
from compile_cache.aot.describe import (
    Description,
    NotDescribedError,
    class_name,
    describe,
    describe_switches,
    digest,
    is_inference,
    signature,
    structure,
    structure_digest,
    switches,
)
from compile_cache.errors import ArtifactError, NotPrecompilable
from compile_cache.settings import Settings
from compile_cache.versions.directory import PRECOMPILED, CacheDirectory

log = logging.getLogger("compile_cache")

_MAGIC = b"CCPRE\x00\x00\x01"
_LENGTH = struct.Struct(">I")
_LARGEST_HEADER_BYTES = 16 << 20
_SUFFIX = ".aot"
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
    """The artifacts of one group in this process; `refused` says why the others are not used."""

    path: str
    key: dict[str, Description]
    loaded: dict[str, Precompiled] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    is_read: bool = False
    not_precompilable: str = ""


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

    def __init__(self, settings: Settings, directory: CacheDirectory) -> None:
        self._mode = settings.mode
        self._dynamic = settings.dynamic
        self._directory = directory
        self._groups: dict[str, _Group] = {}
        self._options = ""
        self._prefetched: dict[str, _Stored] = {}

    @property
    def used(self) -> set[str]:
        """The paths, inside the cache directory, of what belongs to this boot's model."""
        return {path for group in self._groups.values() for path in group.loaded}

    def note_options(self) -> None:
        """Take Inductor's options as they are now, in this thread, for those that what follows is compiled with."""
        self._options = _options_digest()

    def prefetch(self) -> int:
        """Load every artifact that is there and was made of the code that is here; how many there are, with the others.

        On a thread beside the loading of the weights, this takes no time from the boot. It imports nothing of the
        caller's, which another thread may be importing.
        """
        folder = self._directory.path / PRECOMPILED
        paths = sorted(path.relative_to(self._directory.path).as_posix() for path in folder.glob(f"*/*{_SUFFIX}"))
        for path in paths[:_MOST_PREFETCHED]:
            try:
                stored = self._parse(path)
                if stored.key.items() >= self._fixed_key().items() and stored.record.is_imported:
                    # Guards are made for the thread-local state that they are made under.
                    with torch.no_grad(), torch.inference_mode(is_inference(stored.key["switches"])):
                        self._prefetched[path] = replace(stored, function=stored.load())
            except Exception as error:  # `find` meets it again, and says so
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
        path = self._write(group, record, payload)
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
        folder = self._directory.path / "aotautograd"
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

    def _group(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Group:
        key = {
            **self._fixed_key(),
            "options": self._options,
            "class": class_name(type(module)),
            "structure": structure_digest(structure(module)),
            "inputs": signature(args, kwargs, with_sizes=self._dynamic is False),
            "switches": describe_switches(switches()),
        }
        name = digest(key)
        if name not in self._groups:
            self._groups[name] = _Group(f"{PRECOMPILED}/{name}", key)
        return self._groups[name]

    def _fixed_key(self) -> dict[str, Description]:
        return {"mode": self._mode, "dynamic": str(self._dynamic), "versions": _versions()}

    def _read_all(self, group: _Group) -> None:
        group.is_read = True
        folder = self._directory.path / group.path
        names = sorted(entry.name for entry in folder.glob(f"*{_SUFFIX}")) if folder.is_dir() else []
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
        """An artifact that is what its name says. Nothing is unpickled."""
        header, payload = _split((self._directory.path / path).read_bytes())
        if _artifact_name(header["key"], header["record"]) != Path(path).name:
            raise ArtifactError("its name is not that of its content")
        return _Stored(header["key"], Record.from_json(header["record"]), payload)

    def _write(self, group: _Group, record: Record, payload: bytes) -> str:
        plain = record.to_json()
        path = f"{group.path}/{_artifact_name(group.key, plain)}"
        target = self._directory.path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        header = {"key": group.key, "record": plain, "sha256": hashlib.sha256(payload).hexdigest()}
        encoded = json.dumps(header, sort_keys=True).encode()
        # A hidden name is no artifact, should this process be killed.
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".")
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + _LENGTH.pack(len(encoded)) + encoded + payload)
        os.replace(temporary, target)
        return path


def _artifact_name(key: Mapping[str, Description], record: Mapping[str, Any]) -> str:
    return digest([dict(key), dict(record)]) + _SUFFIX


def _split(content: bytes) -> tuple[Mapping[str, Any], bytes]:
    """Raises ArtifactError where it is damaged."""
    start = len(_MAGIC) + _LENGTH.size
    if len(content) < start or content[: len(_MAGIC)] != _MAGIC:
        raise ArtifactError("it is damaged, or not of this version's format")
    (length,) = _LENGTH.unpack(content[len(_MAGIC) : start])
    payload = content[start + length :]
    try:
        header = json.loads(content[start : start + min(length, _LARGEST_HEADER_BYTES)])
    except ValueError as error:
        raise ArtifactError("it is damaged: its header is not readable") from error
    is_header = (
        isinstance(header, dict) and isinstance(header.get("key"), dict) and isinstance(header.get("record"), dict)
    )
    if not is_header or header.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise ArtifactError("it is damaged: its content is not what its header says")
    return header, payload


def _versions() -> Mapping[str, str]:
    """Of everything that decides how a model is traced and compiled."""
    packages = {name: str(getattr(sys.modules.get(name), "__version__", "")) for name in _TRACED_PACKAGES}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {**packages, "torch": str(torch.__version__), "python": python}


def _options_digest() -> str:
    """Of Inductor's options, as set in the program; those from the environment are in the environment's key."""
    config: Any = torch._inductor.config
    passes = {name: getattr(config, name, None) for name in _PASSES}
    return digest(sorted([name, _option(value)] for name, value in {**config.save_config_portable(), **passes}.items()))


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
