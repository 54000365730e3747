"""The stored form of a function compiled ahead of time: `precompiled/<group>/<artifact>.aot` in the cache directory.

A file is a message of MessagePack: the group's key, the record that is compared with this process before anything is
unpickled, the compiled function (torch's pickle), and its checksum. Both names are digests of key and record, so two
cold boots write the same names. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from compile_cache.errors import ArtifactError
from compile_cache.files import blank_values, replacing

# The folder of all artifacts, inside a cache directory.
PRECOMPILED = "precompiled"
SUFFIX = ".aot"
# Of a record that says which calls are traced in the setup, out of stored files.
GRAPHS = ".graphs"
# Of a mark beside an artifact, which names the instances on which it was compared with eager; and of the same mark, if
# the artifact is loaded after READY.
COMPARED, LATE = ".compared", ".late"
# Code that has no mark yet is published after so long, if nothing contradicts it. The next boot compares it first.
UNPROVED_S = 60.0


def has_artifacts(paths: Iterable[str]) -> bool:
    """Whether any of the paths is a function compiled ahead of time."""
    return any(path.startswith(f"{PRECOMPILED}/") for path in paths)


@dataclass(frozen=True, slots=True)
class Mark:
    """What the marks beside an artifact say together: the places in the model of the instances on which it was
    compared, and whether it is loaded after READY."""

    places: frozenset[str]
    is_late: bool


def read_marks(root: Path, paths: Iterable[str]) -> dict[str, Mark]:
    """The marks among the `paths` in the cache directory `root`, by the path of their artifact. A damaged mark says
    nothing."""
    marks: dict[str, Mark] = {}
    for path in paths:
        if path.endswith((COMPARED, LATE)):
            known = marks.get(artifact := path.partition(".")[0] + SUFFIX, Mark(frozenset(), False))
            with contextlib.suppress(OSError, ValueError):
                places = msgspec.json.decode((root / path).read_bytes(), type=frozenset[str])
                marks[artifact] = Mark(known.places | places, known.is_late or path.endswith(LATE))
    return marks


def write_mark(root: Path, path: str, mark: Mark) -> str:
    """Write a mark beside the artifact at `path`, under the name of its content. Returns the mark's path.

    Raises:
        OSError: it cannot be written.
    """
    content = msgspec.json.encode(sorted(mark.places))
    name = f"{path.removesuffix(SUFFIX)}.{hashlib.sha256(content).hexdigest()[:32]}{LATE if mark.is_late else COMPARED}"
    with replacing(root / name) as file:
        file.write(content)
    return name


def marks_of(root: Path, path: str) -> list[str]:
    """The paths of the marks beside an artifact."""
    found = (root / path).parent.glob(f"{Path(path).stem}.*")
    return [mark.relative_to(root).as_posix() for mark in found if mark.suffix in (COMPARED, LATE)]


class _Artifact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file. `sha256` is the payload's: the name does not depend on that."""

    key: Mapping[str, Any]
    record: Mapping[str, Any]
    sha256: str
    payload: bytes

    @property
    def name(self) -> str:
        """The file's name."""
        named = msgspec.msgpack.encode([self.key, self.record], order="sorted")
        return hashlib.sha256(named).hexdigest()[:32] + SUFFIX


def write_artifact(group: Path, key: Mapping[str, Any], record: Mapping[str, Any], payload: bytes) -> str:
    """Write an artifact, without the values of variables, into its group's folder. Returns the file's name.

    Raises:
        OSError: the artifact cannot be written.
    """
    payload = blank_values(payload)
    artifact = _Artifact(key, record, hashlib.sha256(payload).hexdigest(), payload)
    with replacing(group / artifact.name) as file:
        file.write(msgspec.msgpack.encode(artifact))
    return artifact.name


def read_artifact(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bytes]:
    """The key, the record and the pickled function of an artifact, checked against its name.

    Raises:
        ArtifactError: the artifact is damaged, or has a wrong name.
        OSError: the artifact cannot be read.
    """
    artifact = _read(path)
    if artifact.sha256 != hashlib.sha256(artifact.payload).hexdigest():
        raise ArtifactError("it is damaged: its function does not match its checksum")
    return artifact.key, artifact.record, artifact.payload


def copy_artifact(source: Path, target: Path, old: bytes, new: bytes) -> None:
    """Copy an artifact into another cache directory. Replaces its path `old` by `new`, which has the same length.

    Raises:
        ArtifactError: the artifact is damaged.
        OSError: the artifact cannot be read or written.
    """
    artifact = _read(source)
    write_artifact(target.parent, artifact.key, artifact.record, artifact.payload.replace(old, new))


def _read(path: Path) -> _Artifact:
    """An artifact. Raises ArtifactError if it is damaged, or belongs to another name."""
    try:
        artifact = msgspec.msgpack.decode(path.read_bytes(), type=_Artifact)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are values'
        raise ArtifactError("it is damaged: it cannot be read") from error
    if artifact.name != path.name:
        raise ArtifactError("its name does not match its content")
    return artifact
