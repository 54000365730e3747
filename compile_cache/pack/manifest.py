"""The manifest of a pack: its files, key, creator and time. It is read and checked first."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from compile_cache.errors import ManifestTooLarge, PackError, PackForbidden
from compile_cache.key.cache_key import CacheKey

_T = TypeVar("_T")

FRAME_BYTES = 1 << 20

# A frame that claims more is padded: ZSTD_COMPRESSBOUND of 1 MiB, from zstd.h.
_STORED_FRAME_BYTES = FRAME_BYTES + FRAME_BYTES // 256

_PATH_BYTES = 1024
_PATH_PARTS = 32
_NAME_BYTES = 255  # NAME_MAX, limits.h
_KEY_BYTES = 2 * _PATH_BYTES
_CREATOR_BYTES = 200
_REASON_CHARACTERS = 200
_LATEST_S = 253_402_300_800  # the year 10000, the end of datetime's range
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPACE = re.compile(r"[ \t\n\r]*")
# An honest file's line is shorter: JSON writes a byte of a path or key in at most three characters.
_LINE_CHARACTERS = 16 << 10
_WINDOW_BYTES = 4 * _LINE_CHARACTERS


@dataclass(frozen=True, slots=True)
class PackFile:
    """One artifact: its path in the cache directory and its logical key. If the file was changed in place, `replaces`
    is the SHA-256 of its previous content."""

    path: str
    key: str
    size_bytes: int
    sha256: str
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame: its length in the pack, and its unpacked length of at most 1 MiB."""

    stored_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for one pack, and for all packs of a key together."""

    size_bytes: int = 4 << 30
    files: int = 100_000
    manifest_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a pack. The frames have the files one after the other, in this order."""

    key: CacheKey
    files: tuple[PackFile, ...]
    frames: tuple[Frame, ...]
    creator: str
    created_s: float

    @property
    def size_bytes(self) -> int:
        """The unpacked size of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def frames_bytes(self) -> int:
        """The stored size of all frames."""
        return sum(frame.stored_bytes for frame in self.frames)

    def to_json(self) -> bytes:
        """The exact bytes that are stored and signed, in ASCII. Their digest names the pack."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


def digest_of(manifest: bytes | bytearray) -> str:
    """The name of a pack. The manifest has every file's digest, so this digest covers the whole content."""
    return hashlib.sha256(manifest).hexdigest()


def parse_manifest(text: bytes | bytearray, limits: Limits) -> Manifest:
    """Read and check a manifest. Each file is checked as it is read, so memory never holds more than the text, the
    checked files and one further line.

    Raises:
        ManifestTooLarge: the manifest names more files or frames than `limits` allow.
        PackForbidden: the files have more bytes than `limits` allow.
        PackError: the manifest is wrong. The message names the first fault, in a short line without control characters.
    """
    try:
        manifest = _read_manifest(_Text(text), limits)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PackError(f"its manifest cannot be read: {_shown(str(error))}") from error
    _check(manifest, limits)
    return manifest


def _read_manifest(text: _Text, limits: Limits) -> Manifest:
    most_frames = limits.files + limits.size_bytes // FRAME_BYTES
    values: dict[str, Any] = {}
    text.expect("{")
    while True:
        name = text.value()
        text.expect(":")
        if name in values:
            raise ValueError(f"{name} occurs twice")
        if name == "files":
            values[name] = tuple(text.records(_read_file, "files", limits.files))
        elif name == "frames":
            values[name] = tuple(text.records(_read_frame, "frames", most_frames))
        else:
            value = text.value()
            if name in ("key", "creator", "created_s"):
                values[name] = value
        if not text.take(","):
            break
    text.expect("}")
    text.expect_end()
    return Manifest(
        key=CacheKey(**values["key"]),
        files=values["files"],
        frames=values["frames"],
        creator=values["creator"],
        created_s=float(values["created_s"]),
    )


class _Text:
    """Reads JSON value by value through a window. A value longer than the window is an error."""

    def __init__(self, text: bytes | bytearray) -> None:
        if not text.isascii():
            raise ValueError("it is not ASCII")
        self._text = text
        self._read = json.JSONDecoder().raw_decode
        self._window = ""
        self._at = 0  # in the window
        self._window_start = 0  # in the text

    def take(self, literal: str) -> bool:
        """Go past `literal` if it comes next. Returns whether it does."""
        self._move()
        if not self._window.startswith(literal, self._at):
            return False
        self._at += len(literal)
        return True

    def expect(self, literal: str) -> None:
        """Go past `literal`. Raises ValueError if it does not come next."""
        if not self.take(literal):
            raise ValueError(f"no {literal} at byte {self._window_start + self._at}")

    def expect_end(self) -> None:
        """Check that only white space follows. Raises ValueError otherwise."""
        self._move()
        if self._at < len(self._window):
            raise ValueError(f"more than one record, from byte {self._window_start + self._at} on")

    def value(self) -> Any:
        """The next value. Raises ValueError if it is not JSON, or is too long."""
        self._move()
        value, self._at = self._read(self._window, self._at)
        return value

    def records(self, make: Callable[[dict[str, Any]], _T], what: str, most: int) -> Iterator[_T]:
        """The results of `make` for each element of the next list, which has at most `most`."""
        self.expect("[")
        if self.take("]"):
            return
        for _ in range(most):
            yield make(self.value())
            if not self.take(","):
                self.expect("]")
                return
        raise ManifestTooLarge(f"it names more than the {most} {what} allowed")

    def _move(self) -> None:
        """Go past white space, and keep at least one whole line in the window, if the text has one."""
        if len(self._window) - self._at < _LINE_CHARACTERS:
            self._window_start += self._at
            self._at = 0
            self._window = self._text[self._window_start : self._window_start + _WINDOW_BYTES].decode()
        self._at = _SPACE.match(self._window, self._at).end()  # type: ignore[union-attr]  # it matches nothing too


def _read_file(record: dict[str, Any]) -> PackFile:
    file = PackFile(**record)
    if not (_is_text(file.key, _KEY_BYTES) and isinstance(file.path, str) and _is_digest(file.sha256)):
        raise PackError("its manifest has a file whose path, key or digest is invalid")
    if not _is_size(file.size_bytes):
        raise PackError(f"its file {_shown(file.path)} has an invalid size")
    if file.replaces is not None and not _is_digest(file.replaces):
        raise PackError(f"its file {_shown(file.path)} replaces an invalid digest")
    if file.key == file.path:  # true for most files: then the text is kept once
        return PackFile(file.path, file.path, file.size_bytes, file.sha256, file.replaces)
    return file


def _read_frame(record: dict[str, Any]) -> Frame:
    frame = Frame(**record)
    if not (_is_size(frame.size_bytes) and 0 < frame.size_bytes <= FRAME_BYTES):
        raise PackError(f"one of its frames does not have between 1 and {FRAME_BYTES} bytes")
    if not (_is_size(frame.stored_bytes) and 0 < frame.stored_bytes <= _STORED_FRAME_BYTES):
        raise PackError(f"one of its frames is not stored in between 1 and {_STORED_FRAME_BYTES} bytes")
    return frame


def _check(manifest: Manifest, limits: Limits) -> None:
    if manifest.size_bytes > limits.size_bytes:
        raise PackForbidden(f"it unpacks to {manifest.size_bytes} bytes; {limits.size_bytes} are allowed")
    if manifest.size_bytes != sum(frame.size_bytes for frame in manifest.frames):
        raise PackError("its files do not match its frames in size")
    if not (_is_text(manifest.creator, _CREATOR_BYTES) and 0 <= manifest.created_s < _LATEST_S):
        raise PackError("its creator is not a line of text, or its time is invalid")
    key = manifest.key
    if not all(_is_text(part, _NAME_BYTES) for part in (key.environment, key.model_name, key.model_version)):
        raise PackError("its key does not consist of short lines of text")
    check_paths([file.path for file in manifest.files])


def _is_size(value: Any) -> bool:
    # A sum of larger sizes may have too many digits for a message (sys.set_int_max_str_digits).
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any, most_bytes: int) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value.encode()) <= most_bytes


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _shown(text: str) -> str:
    """Foreign text, made safe for a message: reasons get into logs and reports."""
    return f"{text[:_REASON_CHARACTERS]!r:.{_REASON_CHARACTERS}}"


def check_paths(paths: Iterable[str]) -> None:
    """Check that each path names a file inside the cache directory, and no file twice.

    Raises:
        PackError: a path does not. The message names it.
    """
    files: set[str] = set()
    for path in paths:
        if not _is_plain(path):
            raise PackError(f"its path {_shown(path)} is not a plain path inside the cache directory")
        folded = path.casefold()
        if folded in files:
            raise PackError(f"its path {_shown(path)} occurs twice")
        files.add(folded)
    if both := {folder for path in files for folder in folders_of(path) if folder in files}:
        raise PackError(f"its path {_shown(min(both))} is a file and a folder at once")


def _is_plain(path: str) -> bool:
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        return False
    # After the check above, because unprintable text may not be encodable.
    lengths = [len(part.encode()) for part in parts]
    return len(parts) <= _PATH_PARTS and max(lengths) <= _NAME_BYTES and sum(lengths) + len(parts) - 1 <= _PATH_BYTES


def folders_of(path: str) -> Iterator[str]:
    """The folders that contain `path`, innermost first. Do not keep them for many paths: they may be far longer than
    the paths."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
