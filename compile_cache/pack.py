"""A pack: one immutable file that carries artifacts, named by its own SHA-256.

Layout (all of it is one valid zstd stream; the first and third part are frames that zstd skips):

    header      fixed size: magic, format version, lengths of the two parts that follow
    manifest    one zstd frame of canonical JSON: key, files, frames, creator, time
    signature   a skippable frame, empty in an unsigned pack
    frames      independent zstd frames of about 1 MiB of files each, in the manifest's order

so one range read gets the manifest alone, and unpacking is parallel. Every byte is covered: the name covers the whole
file, the manifest each file's digest. See RFC 8878, sections 3.1.1 and 3.1.2, for both kinds of frame.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from compile_cache.errors import PackError
from compile_cache.key import CacheKey

PACK_VERSION = 1
SUFFIX = ".pack"

_SKIPPABLE = struct.Struct("<II")  # magic number, length
_HEADER_MAGIC = 0x184D2A50
_SIGNATURE_MAGIC = 0x184D2A51
_HEADER = struct.Struct("<8sIIII")  # identity, pack version, manifest frame bytes, manifest bytes, signature bytes
_IDENTITY = b"compcach"
HEADER_BYTES = _SKIPPABLE.size + _HEADER.size

_FRAME_BYTES = 1 << 20
_LEVEL = 3
_CHUNK_BYTES = 1 << 20
_PATH_BYTES = 1024
_NAME_BYTES = 255  # NAME_MAX, limits.h


@dataclass(frozen=True, slots=True)
class PackFile:
    """One artifact. `frame` is the index of its frame and `offset` its place inside it, uncompressed. `replaces` is the
    SHA-256 of the content that this one supersedes, for a file that was changed in place."""

    path: str
    key: str
    size_bytes: int
    sha256: str
    frame: int
    offset: int
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """One zstd frame: its length in the pack and its length unpacked."""

    stored_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The first part of a pack: what is in it, for whom, made by whom and when."""

    key: CacheKey
    files: tuple[PackFile, ...]
    frames: tuple[Frame, ...]
    creator: str
    created_s: float

    @property
    def size_bytes(self) -> int:
        """All files together, uncompressed."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> bytes:
        """The exact bytes that are stored, and that a signature is over."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pack may claim before any of it is unpacked."""

    size_bytes: int = 4 << 30
    files: int = 100_000
    manifest_bytes: int = 64 << 20
    frame_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Source:
    """A file to be packed: where it is, and its path and logical key inside the cache directory."""

    local: Path
    path: str
    key: str
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """A finished pack on the local disk."""

    local: Path
    sha256: str
    stored_bytes: int
    manifest: Manifest

    @property
    def name(self) -> str:
        """The object's name inside its key's prefix."""
        return self.sha256 + SUFFIX


def write_pack(folder: Path, key: CacheKey, sources: Sequence[Source], creator: str) -> Pack:
    """Pack `sources` into a new file in `folder`, named by its SHA-256. Peak memory is about one frame.

    A file that has vanished meanwhile is left out.

    Raises:
        OSError: a source cannot be read, or `folder` cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as body:
        files, frames = _write_frames(body, sources)
        manifest = Manifest(key, tuple(files), tuple(frames), creator, time.time())
        descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            sha256 = _assemble(file, manifest, body)
    local = folder / (sha256 + SUFFIX)
    os.replace(temporary, local)
    return Pack(local, sha256, local.stat().st_size, manifest)


def _write_frames(body: BinaryIO, sources: Sequence[Source]) -> tuple[list[PackFile], list[Frame]]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    files: list[PackFile] = []
    frames: list[Frame] = []
    content = bytearray()

    def finish_frame() -> None:
        stored = compressor.compress(bytes(content))
        body.write(stored)
        frames.append(Frame(len(stored), len(content)))
        content.clear()

    for source in sources:
        try:
            data = source.local.read_bytes()
        except FileNotFoundError:
            continue
        if content and len(content) + len(data) > _FRAME_BYTES:
            finish_frame()
        digest = hashlib.sha256(data).hexdigest()
        files.append(PackFile(source.path, source.key, len(data), digest, len(frames), len(content), source.replaces))
        content += data
    if content or files:
        finish_frame()
    return files, frames


def _assemble(file: BinaryIO, manifest: Manifest, body: BinaryIO) -> str:
    """Write header, manifest, signature and frames; returns the SHA-256 of it all."""
    text = manifest.to_json()
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(text)
    header = _HEADER.pack(_IDENTITY, PACK_VERSION, len(stored), len(text), 0)
    digest = hashlib.sha256()

    def write(data: bytes) -> None:
        file.write(data)
        digest.update(data)

    write(_SKIPPABLE.pack(_HEADER_MAGIC, len(header)) + header + stored + _SKIPPABLE.pack(_SIGNATURE_MAGIC, 0))
    body.seek(0)
    while chunk := body.read(_CHUNK_BYTES):
        write(chunk)
    return digest.hexdigest()


def read_manifest(file: BinaryIO, limits: Limits) -> tuple[Manifest, int]:
    """The manifest of the pack that `file` holds, and the offset of its first frame.

    Raises:
        PackError: it is not a pack of this format, or it claims more than `limits` allow.
    """
    magic, length, identity, version, stored_bytes, manifest_bytes, signature_bytes = _unpack_header(file)
    if (magic, length, identity) != (_HEADER_MAGIC, _HEADER.size, _IDENTITY):
        raise PackError("it does not begin as a pack does")
    if version != PACK_VERSION:
        raise PackError(f"it has pack format {version}, and this version of compile_cache reads {PACK_VERSION}")
    if max(stored_bytes, manifest_bytes, signature_bytes) > limits.manifest_bytes:
        raise PackError(f"its manifest claims more than the {limits.manifest_bytes} bytes allowed")
    manifest = _parse_manifest(_decompress(file.read(stored_bytes), manifest_bytes, "manifest"))
    _check_manifest(manifest, limits)
    return manifest, HEADER_BYTES + stored_bytes + _SKIPPABLE.size + signature_bytes


def _unpack_header(file: BinaryIO) -> tuple[Any, ...]:
    data = file.read(HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise PackError(f"it ends after {len(data)} bytes, inside its header")
    return _SKIPPABLE.unpack_from(data) + _HEADER.unpack_from(data, _SKIPPABLE.size)


def _decompress(stored: bytes, size_bytes: int, what: str) -> bytes:
    """Exactly `size_bytes` out of one zstd frame; a frame that claims another size is not unpacked at all."""
    try:
        if zstandard.frame_content_size(stored) != size_bytes:
            raise PackError(f"its {what} is not {size_bytes} bytes long, as stated")
        data = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PackError(f"its {what} is damaged: {error}") from error
    except MemoryError as error:
        raise PackError(f"its {what} of {size_bytes} bytes does not fit into memory") from error
    if len(data) != size_bytes:
        raise PackError(f"its {what} is not {size_bytes} bytes long, as stated")
    return data


def _parse_manifest(text: bytes) -> Manifest:
    try:
        record = json.loads(text)
        return Manifest(
            key=CacheKey(**record["key"]),
            files=tuple(PackFile(**file) for file in record["files"]),
            frames=tuple(Frame(**frame) for frame in record["frames"]),
            creator=str(record["creator"]),
            created_s=float(record["created_s"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PackError(f"its manifest cannot be read: {error}") from error


def _check_manifest(manifest: Manifest, limits: Limits) -> None:
    """Types, sizes, places and paths of all that the manifest names.

    Raises:
        PackError: names the first thing that is wrong.
    """
    if len(manifest.files) > limits.files:
        raise PackError(f"it names {len(manifest.files)} files, and {limits.files} are allowed")
    for frame in manifest.frames:
        _check_sizes(frame.stored_bytes, frame.size_bytes)
        if frame.size_bytes > limits.frame_bytes:
            raise PackError(f"one of its frames claims {frame.size_bytes} bytes, and {limits.frame_bytes} are allowed")
    for file in manifest.files:
        _check_sizes(file.size_bytes, file.frame, file.offset)
        if file.frame >= len(manifest.frames) or file.offset + file.size_bytes > manifest.frames[file.frame].size_bytes:
            raise PackError(f"its file {file.path!r} lies outside the pack's frames")
        if not all(isinstance(text, str) for text in (file.path, file.key, file.sha256)):
            raise PackError("its manifest names a file by something that is not text")
    if manifest.size_bytes > limits.size_bytes or sum(f.size_bytes for f in manifest.frames) > limits.size_bytes:
        raise PackError(f"it unpacks to {manifest.size_bytes} bytes, and {limits.size_bytes} are allowed")
    check_paths([file.path for file in manifest.files])


def _check_sizes(*sizes: int) -> None:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise PackError("its manifest has a size or offset that is not a count of bytes")


def check_paths(paths: Iterable[str]) -> None:
    """Refuse any path that could name something outside the cache directory, or the same file twice.

    Raises:
        PackError: names the path.
    """
    seen: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        parts = path.split("/")
        is_plain = path.isprintable() and "\\" not in path and not any(part in ("", ".", "..") for part in parts)
        # Only now: what is not printable may have no bytes.
        if not is_plain or len(path.encode()) > _PATH_BYTES or max(len(p.encode()) for p in parts) > _NAME_BYTES:
            raise PackError(f"its path {path!r} is not a plain path inside the cache directory")
        folded = path.casefold()
        if folded in seen:
            raise PackError(f"its path {path!r} is there twice")
        seen.add(folded)
        folders.update("/".join(parts[:depth]).casefold() for depth in range(1, len(parts)))
    if both := seen & folders:
        raise PackError(f"its path {min(both)!r} is a file and a folder at once")


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal. Reads 1 MiB at a time, without the GIL."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def unpack(pack: Path, folder: Path, expected: CacheKey, limits: Limits, executor: Executor) -> Manifest:
    """Verify the pack file `<sha256>.pack` in full and unpack it into `folder`, which is not yet the cache directory.

    Checked are: the name, the header, the key, every limit, path, frame and file. On any failure what was unpacked
    stays in `folder`, which the caller throws away.

    Raises:
        PackError: says what is wrong. Nothing of the pack may be used.
        OSError: the disk.
    """
    if sha256_of(pack) + SUFFIX != pack.name:
        raise PackError("its content is not what its name says")
    with pack.open("rb") as file:
        manifest, start = read_manifest(file, limits)
        size_bytes = os.fstat(file.fileno()).st_size
    if manifest.key != expected:
        raise PackError(f"it is for {manifest.key.prefix}, not for {expected.prefix}")
    if start + sum(frame.stored_bytes for frame in manifest.frames) != size_bytes:
        raise PackError(f"its {size_bytes} bytes are not what its frames add up to")
    for path in {os.path.dirname(file.path) for file in manifest.files}:
        (folder / path).mkdir(parents=True, exist_ok=True)
    list(executor.map(lambda frame: _unpack_frame(pack, folder, *frame), _frames_with_files(manifest, start)))
    return manifest


def _frames_with_files(manifest: Manifest, start: int) -> Iterator[tuple[int, Frame, list[PackFile]]]:
    """Each frame's place in the pack, the frame, and the files in it."""
    files: list[list[PackFile]] = [[] for _ in manifest.frames]
    for file in manifest.files:
        files[file.frame].append(file)
    for frame, inside in zip(manifest.frames, files, strict=True):
        yield start, frame, inside
        start += frame.stored_bytes


def _unpack_frame(pack: Path, folder: Path, start: int, frame: Frame, files: list[PackFile]) -> None:
    with pack.open("rb") as stored:
        stored.seek(start)
        content = memoryview(_decompress(stored.read(frame.stored_bytes), frame.size_bytes, "frame"))
    for file in files:
        data = content[file.offset : file.offset + file.size_bytes]
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise PackError(f"its file {file.path!r} has another content than stated")
        (folder / file.path).write_bytes(data)
