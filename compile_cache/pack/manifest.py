"""The manifest: what a pack holds, for whom, made by whom and when. Read first, and checked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from compile_cache.errors import PackError
from compile_cache.key.cache_key import CacheKey

FRAME_BYTES = 1 << 20

# A frame that says more is padded. zstd.h: ZSTD_COMPRESSBOUND of 1 MiB.
_STORED_FRAME_BYTES = FRAME_BYTES + FRAME_BYTES // 256

_PATH_BYTES = 1024
_PATH_PARTS = 32
_NAME_BYTES = 255  # NAME_MAX, limits.h
_KEY_BYTES = 2 * _PATH_BYTES
_CREATOR_BYTES = 200
_REASON_CHARACTERS = 200
_LATEST_S = 253_402_300_800  # the year 10000: datetime knows no later time
_SHA256 = re.compile(r"[0-9a-f]{64}")
# JSON values that a file or a frame may take in a manifest that says no more than it should: six and three, with room
# for commas in paths.
_VALUES_EACH = 16


@dataclass(frozen=True, slots=True)
class PackFile:
    """One artifact: its path in the cache directory and its logical key. `replaces` is the SHA-256 of the content that
    this one supersedes, for a file that was changed in place."""

    path: str
    key: str
    size_bytes: int
    sha256: str
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame: its length in the pack and its length unpacked, which is at most 1 MiB."""

    stored_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pack may claim before any of it is unpacked; what all packs of a key may hold together."""

    size_bytes: int = 4 << 30
    files: int = 100_000
    manifest_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files lie one after the other in the frames' contents, in this order."""

    key: CacheKey
    files: tuple[PackFile, ...]
    frames: tuple[Frame, ...]
    creator: str
    created_s: float

    @property
    def size_bytes(self) -> int:
        """All files together, unpacked."""
        return sum(file.size_bytes for file in self.files)

    @property
    def frames_bytes(self) -> int:
        """All frames together, as stored."""
        return sum(frame.stored_bytes for frame in self.frames)

    def to_json(self) -> bytes:
        """The exact bytes that are stored, that name the pack, and that a signature is over."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def digest_of(manifest: bytes) -> str:
    """What a pack is named by. The manifest names the digest of every file, so this covers all of the content."""
    return hashlib.sha256(manifest).hexdigest()


def parse_manifest(text: bytes, limits: Limits) -> Manifest:
    """Read and check all that a manifest says.

    Raises:
        PackError: names the first thing that is wrong, in a short line without control characters.
    """
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > _VALUES_EACH * (limits.files + limits.size_bytes // FRAME_BYTES + 2):
        raise PackError(f"its manifest holds more than {limits.files} files need")
    try:
        record = json.loads(text)
        manifest = Manifest(
            key=CacheKey(**record["key"]),
            files=tuple(PackFile(**file) for file in record["files"]),
            frames=tuple(Frame(**frame) for frame in record["frames"]),
            creator=record["creator"],
            created_s=float(record["created_s"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PackError(f"its manifest cannot be read: {_shown(str(error))}") from error
    _check(manifest, limits)
    return manifest


def _check(manifest: Manifest, limits: Limits) -> None:
    if len(manifest.files) > limits.files:
        raise PackError(f"it names {len(manifest.files)} files, and {limits.files} are allowed")
    for file in manifest.files:
        _check_file(file)
    for frame in manifest.frames:
        if not (_is_size(frame.size_bytes) and 0 < frame.size_bytes <= FRAME_BYTES):
            raise PackError(f"one of its frames does not hold between 1 and {FRAME_BYTES} bytes")
        if not (_is_size(frame.stored_bytes) and 0 < frame.stored_bytes <= _STORED_FRAME_BYTES):
            raise PackError(f"one of its frames is not stored in between 1 and {_STORED_FRAME_BYTES} bytes")
    if manifest.size_bytes > limits.size_bytes:
        raise PackError(f"it unpacks to {manifest.size_bytes} bytes, and {limits.size_bytes} are allowed")
    if manifest.size_bytes != sum(frame.size_bytes for frame in manifest.frames):
        raise PackError("its files do not fill its frames")
    if not (_is_text(manifest.creator, _CREATOR_BYTES) and 0 <= manifest.created_s < _LATEST_S):
        raise PackError("its creator or time is not one")
    key = manifest.key
    if not all(_is_text(part, _NAME_BYTES) for part in (key.environment, key.model_name, key.model_version)):
        raise PackError("its key is not one")
    check_paths([file.path for file in manifest.files])


def _check_file(file: PackFile) -> None:
    if not (_is_text(file.key, _KEY_BYTES) and isinstance(file.path, str) and _is_digest(file.sha256)):
        raise PackError("its manifest names a file by something that is no path, key or digest")
    if not _is_size(file.size_bytes):
        raise PackError(f"its file {_shown(file.path)} has a size that is not a count of bytes")
    if file.replaces is not None and not _is_digest(file.replaces):
        raise PackError(f"its file {_shown(file.path)} replaces something that is no digest")


def _is_size(value: Any) -> bool:
    # A sum of greater ones may have more digits than an int may have in a message (sys.set_int_max_str_digits).
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any, most_bytes: int) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value.encode()) <= most_bytes


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _shown(text: str) -> str:
    """What somebody else wrote, as a part of a message: a reason ends in logs and reports."""
    return f"{text[:_REASON_CHARACTERS]!r:.{_REASON_CHARACTERS}}"


def check_paths(paths: Iterable[str]) -> None:
    """Refuse any path that could name something outside the cache directory, or the same file twice.

    Raises:
        PackError: names the path.
    """
    files: set[str] = set()
    for path in paths:
        if not _is_plain(path):
            raise PackError(f"its path {_shown(path)} is not a plain path inside the cache directory")
        folded = path.casefold()
        if folded in files:
            raise PackError(f"its path {_shown(path)} is there twice")
        files.add(folded)
    if both := {folder for path in files for folder in folders_of(path) if folder in files}:
        raise PackError(f"its path {_shown(min(both))} is a file and a folder at once")


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        return False
    # Only now: what is not printable may have no bytes.
    lengths = [len(part.encode()) for part in parts]
    return len(parts) <= _PATH_PARTS and max(lengths) <= _NAME_BYTES and sum(lengths) + len(parts) - 1 <= _PATH_BYTES


def folders_of(path: str) -> Iterator[str]:
    """The folders that `path` lies in, innermost first. Of many paths they are not to be kept: together they may be far
    longer than the paths."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
