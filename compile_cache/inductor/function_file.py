"""The stored form of a function compiled ahead of time: `precompiled/<group>/<artifact>.aot` in the cache directory.

    8 bytes magic, 4 bytes length of the header (big endian), header (JSON), compiled function (torch's pickle)

The header has the group's key, the record that is compared with this process before anything is unpickled, and the
checksum of the function. Both names are digests of key and record, so two cold boots write the same
names. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from compile_cache.errors import ArtifactError
from compile_cache.files import replacing
from compile_cache.key.environment import digest

# The folder of all artifacts, inside a cache directory.
PRECOMPILED = "precompiled"
SUFFIX = ".aot"
# Of a record that says which calls are traced in the setup, out of stored files.
CACHED = ".cached"
# Of the mark beside an artifact that was compared with eager on all instances; and of the same mark, if the artifact is
# loaded after READY.
COMPARED, LATE = ".compared", ".late"
# Code that was not compared on all instances is published after so long, if nothing contradicts it. The next boot
# compares it first.
UNPROVED_S = 60.0

_MAGIC = b"CCPRE\x00\x00\x01"
_LENGTH = struct.Struct(">I")
_LARGEST_HEADER_BYTES = 16 << 20


def has_artifacts(paths: Iterable[str]) -> bool:
    """Whether any of the paths is a function compiled ahead of time."""
    return any(path.startswith(f"{PRECOMPILED}/") for path in paths)


def marks_of(path: str) -> tuple[str, str]:
    """The paths of the marks beside an artifact. It has one of them at most."""
    stem = path.removesuffix(SUFFIX)
    return f"{stem}{COMPARED}", f"{stem}{LATE}"


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an artifact."""

    key: Mapping[str, Any]
    record: Mapping[str, Any]
    sha256: str


def write_artifact(group: Path, key: Mapping[str, Any], record: Mapping[str, Any], payload: bytes) -> str:
    """Write an artifact into its group's folder. Returns the file's name.

    Raises:
        OSError: the artifact cannot be written.
    """
    name = _artifact_name(key, record)
    with replacing(group / name) as file:
        file.write(_joined(Header(key, record, ""), payload))
    return name


def read_artifact(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bytes]:
    """The key, the record and the pickled function of an artifact, checked against its name.

    Raises:
        ArtifactError: the artifact is damaged, or has a wrong name.
        OSError: the artifact cannot be read.
    """
    header, payload = _read(path)
    if header.sha256 != hashlib.sha256(payload).hexdigest():
        raise ArtifactError("it is damaged: its content does not match its header")
    return header.key, header.record, payload


def copy_artifact(source: Path, target: Path, old: bytes, new: bytes) -> None:
    """Copy an artifact into another cache directory. Replaces its path `old` by `new`, which has the same length.

    Raises:
        ArtifactError: the artifact is damaged.
        OSError: the artifact cannot be read or written.
    """
    header, payload = _read(source)
    with replacing(target) as copy:
        copy.write(_joined(header, payload.replace(old, new)))


def _joined(header: Header, payload: bytes) -> bytes:
    fields = {**asdict(header), "sha256": hashlib.sha256(payload).hexdigest()}
    encoded = json.dumps(fields, sort_keys=True).encode()
    return _MAGIC + _LENGTH.pack(len(encoded)) + encoded + payload


def _artifact_name(key: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return digest([dict(key), dict(record)]) + SUFFIX


def _read(path: Path) -> tuple[Header, bytes]:
    """The header of an artifact, and what follows it. Raises ArtifactError if the header is damaged, or belongs to
    another name."""
    with path.open("rb") as file:
        return _read_header(file, path.name), file.read()


def _read_header(file: BinaryIO, name: str) -> Header:
    start = file.read(len(_MAGIC) + _LENGTH.size)
    if len(start) < len(_MAGIC) + _LENGTH.size or not start.startswith(_MAGIC):
        raise ArtifactError("it is damaged, or not of this version's format")
    (length,) = _LENGTH.unpack(start[len(_MAGIC) :])
    try:
        header = json.loads(file.read(min(length, _LARGEST_HEADER_BYTES)))
        if not _is_header(header):
            raise ArtifactError("it is damaged: its header is invalid")
        if _artifact_name(header["key"], header["record"]) != name:
            raise ArtifactError("its name does not match its content")
    except (ValueError, RecursionError) as error:
        raise ArtifactError("it is damaged: its header cannot be read") from error
    return Header(header["key"], header["record"], header["sha256"])


def _is_header(header: Any) -> bool:
    kinds = {"key": dict, "record": dict, "sha256": str}
    return isinstance(header, dict) and all(isinstance(header.get(name), kind) for name, kind in kinds.items())
