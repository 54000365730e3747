"""The stored form of a function compiled ahead of time: `precompiled/<group>/<artifact>.aot` in the cache directory.

    8 bytes magic, 4 bytes length of the header (big endian), header (JSON), compiled function (torch's pickle)

Both names are digests of what they stand for, so that two cold boots write the same names. The header is read, and
compared with this process, before anything is unpickled. This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_cache.errors import ArtifactError
from compile_cache.files import replacing

# The folder, inside a cache directory, of all artifacts.
PRECOMPILED = "precompiled"
SUFFIX = ".aot"

_MAGIC = b"CCPRE\x00\x00\x01"
_LENGTH = struct.Struct(">I")
_LARGEST_HEADER_BYTES = 16 << 20


def digest(description: Any) -> str:
    """32 hexadecimal digits that name plain values."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def write_artifact(group: Path, key: Mapping[str, Any], record: Mapping[str, Any], payload: bytes) -> str:
    """Write an artifact into the folder of its group; its file's name.

    Raises:
        OSError: it cannot be written.
    """
    name = _artifact_name(key, record)
    with replacing(group / name) as file:
        file.write(_joined({"key": key, "record": record}, payload))
    return name


def read_artifact(path: Path) -> tuple[Mapping[str, Any], Mapping[str, Any], bytes]:
    """Key, record and pickled function of an artifact that is what its name says.

    Raises:
        ArtifactError: it is damaged, or has another name.
        OSError: it cannot be read.
    """
    header, payload = _split(path.read_bytes())
    if _artifact_name(header["key"], header["record"]) != path.name:
        raise ArtifactError("its name is not that of its content")
    return header["key"], header["record"], payload


def relocated(content: bytes, old: bytes, new: bytes) -> bytes:
    """An artifact's content for a cache directory with another path, which is as long.

    Raises:
        ArtifactError: it is damaged.
        ValueError: the paths differ in length.
    """
    if len(old) != len(new):
        raise ValueError(f"{old!r} and {new!r} differ in length")
    header, payload = _split(content)
    return _joined(header, payload.replace(old, new))


def _joined(header: Mapping[str, Any], payload: bytes) -> bytes:
    header = {**header, "sha256": hashlib.sha256(payload).hexdigest()}
    encoded = json.dumps(header, sort_keys=True).encode()
    return _MAGIC + _LENGTH.pack(len(encoded)) + encoded + payload


def _artifact_name(key: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    return digest([dict(key), dict(record)]) + SUFFIX


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
