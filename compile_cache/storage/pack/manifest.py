"""The manifest of a pack: its files, key, creator and time. It is read and checked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from compile_cache.errors import PackError, PackForbidden
from compile_cache.key.cache_key import CacheKey

_PATH_BYTES = 1024
_PATH_PARTS = 32
_NAME_BYTES = 255  # NAME_MAX, limits.h
_KEY_BYTES = 2 * _PATH_BYTES
_CREATOR_BYTES = 200
_REASON_CHARACTERS = 200
_LATEST_S: Final = 253_402_300_800  # the year 10000, the end of datetime's range

# Sums of larger sizes may have too many digits for a message (sys.set_int_max_str_digits).
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class PackFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One artifact: its path in the cache directory and its logical key. `owner`: see
    `Ledger`. `executable`: its user may execute it."""

    path: str
    key: str
    size_bytes: Size
    sha256: _Sha256
    owner: str = ""
    executable: bool = False


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One zstd frame: its length in the pack, and its files, one after the other."""

    stored_bytes: Size
    files: tuple[PackFile, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for one pack, and the number of packs that a boot uses of one key.

    The length of a manifest also limits its files: an entry has 130 to 600 bytes, so 4 MiB have room for 7,000 files.
    """

    # At worst, a boot's packs unpack to 32 GiB on the disk, and their manifests take 1.04 GB of memory (measured).
    size_bytes: int = 1 << 30
    manifest_bytes: int = 4 << 20
    packs: int = 32


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a pack."""

    key: CacheKey
    frames: tuple[Frame, ...]
    creator: str
    created_s: Annotated[float, Meta(ge=0, lt=_LATEST_S)]

    @property
    def files(self) -> list[PackFile]:
        """The files of all frames, in their order."""
        return [file for frame in self.frames for file in frame.files]

    @property
    def size_bytes(self) -> int:
        """The unpacked size of all files."""
        return sum(file.size_bytes for file in self.files)


_DECODER = msgspec.json.Decoder(Manifest)


def parse_manifest(text: bytes | bytearray, limits: Limits) -> Manifest:
    """Read and check a manifest. Meanwhile, memory holds a few times the bytes of the text.

    Raises:
        PackForbidden: the files have more bytes than `limits` allow.
        PackError: the manifest is wrong. The message names the first fault, in a short line without control characters.
    """
    try:
        manifest = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise PackError(f"its manifest cannot be read: {_shown(str(error))}") from error
    if manifest.size_bytes > limits.size_bytes:
        raise PackForbidden(f"it unpacks to {manifest.size_bytes} bytes; {limits.size_bytes} are allowed")
    _check_line(manifest.creator, _CREATOR_BYTES, "creator")
    for part in astuple(manifest.key):
        _check_line(part, _NAME_BYTES, "key")
    for file in manifest.files:
        _check_line(file.key, _KEY_BYTES, "logical key")
        _check_line(file.owner, _PATH_BYTES, "owner")
    check_paths(file.path for file in manifest.files)
    return manifest


def _check_line(text: str, most_bytes: int, what: str) -> None:
    if not text.isprintable() or len(text.encode()) > most_bytes:
        raise PackError(f"its {what} {_shown(text)} is not a line of at most {most_bytes} bytes")


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
        if not is_plain(path):
            raise PackError(f"its path {_shown(path)} is not a plain path inside the cache directory")
        folded = path.casefold()
        if folded in files:
            raise PackError(f"its path {_shown(path)} occurs twice")
        files.add(folded)
    if both := {folder for path in files for folder in folders_of(path) if folder in files}:
        raise PackError(f"its path {_shown(min(both))} is a file and a folder at once")


def is_plain(path: str) -> bool:
    """Whether a pack may have this path."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
        return False
    # After the check above, because unprintable text may not be encodable.
    longest_bytes = max(len(part.encode()) for part in parts)
    return len(parts) <= _PATH_PARTS and longest_bytes <= _NAME_BYTES and len(path.encode()) <= _PATH_BYTES


def folders_of(path: str) -> Iterator[str]:
    """The folders that contain `path`, innermost first. Do not keep them for many paths: they may be far longer than
    the paths."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
