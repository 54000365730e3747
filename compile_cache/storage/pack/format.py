"""A pack: one immutable file that carries artifacts, named by the SHA-256 of its manifest.

Layout (the whole pack is a valid zstd stream; zstd skips the first and the third part):

    header      fixed size: magic, format version, lengths of the two parts that follow
    manifest    one zstd frame of canonical JSON: key, files, frames, creator, time
    signature   a skippable frame, empty in an unsigned pack
    frames      independent zstd frames of at most 1 MiB, unpacked, in the manifest's order

One ranged read gets the head: header, manifest and signature. Only the head decides whether a pack may be used. Then
any file can be read and verified without the others, because the manifest has its digest. RFC 8878, sections 3.1.1 and
3.1.2, describes both kinds of frames.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Protocol, cast

import zstandard

from compile_cache.errors import ManifestTooLarge, PackError, PackForbidden
from compile_cache.files import replacing
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.pack.manifest import (
    FRAME_BYTES,
    Frame,
    Limits,
    Manifest,
    PackFile,
    digest_of,
    parse_manifest,
    weight_of,
)
from compile_cache.storage.pack.signing import Signer, TrustedKeys

_SUFFIX = ".pack"
PACK_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(_SUFFIX))

_LEVEL = 3
PACK_VERSION = 1

_SKIPPABLE = struct.Struct("<II")  # magic number, length
_HEADER_MAGIC = 0x184D2A50
_SIGNATURE_MAGIC = 0x184D2A51
_HEADER = struct.Struct("<8sIIII")  # identity, pack version, manifest frame bytes, manifest bytes, signature bytes
_IDENTITY = b"compcach"
HEADER_BYTES = _SKIPPABLE.size + _HEADER.size

_CHUNK_BYTES = 1 << 20
_SIGNATURE_BYTES = 4096
_FRAME_HEADER_BYTES = 18  # the most that RFC 8878 allows, 3.1.1.1
# Level 3 never needs more than 2 MiB.
_LARGEST_WINDOW_BYTES = 8 << 20
# A function of an offset and a number of bytes. It returns these bytes of a pack, or fewer at the pack's end.
ReadAt = Callable[[int, int], bytes]


class Readable(Protocol):
    """A stream of bytes."""

    def read(self, size_bytes: int, /) -> bytes:
        """The next `size_bytes` bytes, or fewer at the end."""


@dataclass(frozen=True, slots=True)
class Source:
    """A file to pack: the local file, and its path and logical key inside the cache directory."""

    local: Path
    path: str
    key: str
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Pack:
    """A finished pack on the local disk."""

    local: Path
    stored_bytes: int
    manifest: Manifest

    @property
    def name(self) -> str:
        """The object's name inside its key's prefix."""
        return self.local.name


@dataclass(frozen=True, slots=True)
class Run:
    """Frames with whole files, which can be read and verified without the other frames. `start` is the offset of the
    first frame in the pack."""

    start: int
    frames: tuple[Frame, ...]
    files: tuple[PackFile, ...]

    @property
    def stored_bytes(self) -> int:
        """The length of the run in the pack."""
        return sum(frame.stored_bytes for frame in self.frames)


def write_pack(
    folder: Path, key: CacheKey, sources: Sequence[Source], creator: str, signer: Signer | None = None
) -> Pack:
    """Pack `sources` into a new file in `folder`, under the pack's name. Peak memory is a few frames.

    A source that no longer exists is left out.

    Raises:
        OSError: a source cannot be read, or `folder` cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as body:
        files, frames = _write_frames(body, sources)
        manifest = Manifest(key, tuple(files), tuple(frames), creator, time.time())
        text = manifest.to_json()
        local = folder / (digest_of(text) + _SUFFIX)
        with replacing(local) as file:
            file.write(make_head(text, signer.sign(text) if signer else b""))
            body.seek(0)
            while chunk := body.read(_CHUNK_BYTES):
                file.write(chunk)
    return Pack(local, local.stat().st_size, manifest)


def _write_frames(body: BinaryIO, sources: Sequence[Source]) -> tuple[list[PackFile], list[Frame]]:
    """Write the frames. Small files share a frame and do not cross its end. A file larger than a frame has its own
    frames."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    files: list[PackFile] = []
    frames: list[Frame] = []
    content = bytearray()

    def finish_frame() -> None:
        if content:
            stored = compressor.compress(bytes(content))
            body.write(stored)
            frames.append(Frame(len(stored), len(content)))
            content.clear()

    for source in sources:
        digest, size_bytes = hashlib.sha256(), 0
        with contextlib.suppress(FileNotFoundError), source.local.open("rb") as file:
            while chunk := file.read(FRAME_BYTES):
                if len(content) + len(chunk) > FRAME_BYTES:
                    finish_frame()
                content += chunk
                digest.update(chunk)
                size_bytes += len(chunk)
            if size_bytes > FRAME_BYTES:
                finish_frame()
            can_run, sha256 = bool(os.fstat(file.fileno()).st_mode & 0o100), digest.hexdigest()
            files.append(PackFile(source.path, source.key, size_bytes, sha256, source.replaces, can_run))
    finish_frame()
    return files, frames


@dataclass(frozen=True, slots=True)
class Head:
    """A pack's head: its verified manifest, the offset of its first frame, and the public key that signed it, if any.
    `weight_bytes` is an upper bound for the memory of the manifest's texts."""

    manifest: Manifest
    start: int
    signed_by: str | None = None
    weight_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """The length of the whole pack."""
        return self.start + self.manifest.frames_bytes


def make_head(manifest: bytes, signature: bytes) -> bytes:
    """The first bytes of a pack."""
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(manifest)
    header = _HEADER.pack(_IDENTITY, PACK_VERSION, len(stored), len(manifest), len(signature))
    skipped = _SKIPPABLE.pack(_SIGNATURE_MAGIC, len(signature)) + signature
    return _SKIPPABLE.pack(_HEADER_MAGIC, len(header)) + header + stored + skipped


@dataclass(frozen=True, slots=True)
class _Header:
    """The lengths at the beginning of a pack: of the manifest's frame, the unpacked manifest and the signature."""

    stored_bytes: int
    manifest_bytes: int
    signature_bytes: int

    @property
    def manifest_end(self) -> int:
        return HEADER_BYTES + self.stored_bytes

    @property
    def end(self) -> int:
        """The offset of the first frame of files."""
        return self.manifest_end + _SKIPPABLE.size + self.signature_bytes


def head_bytes(beginning: bytes, limits: Limits) -> int:
    """The length of a pack's head, from its first `HEADER_BYTES`.

    Raises:
        PackForbidden: the pack has another format, or claims more than `limits` allow.
        PackError: the bytes are not the beginning of a pack.
    """
    return _parse_header(beginning, limits).end


def _parse_header(beginning: bytes, limits: Limits) -> _Header:
    if len(beginning) < HEADER_BYTES:
        raise PackError(f"it ends after {len(beginning)} bytes, inside its header")
    magic, length = _SKIPPABLE.unpack_from(beginning)
    identity, version, *lengths = _HEADER.unpack_from(beginning, _SKIPPABLE.size)
    if (magic, length, identity) != (_HEADER_MAGIC, _HEADER.size, _IDENTITY):
        raise PackError("it does not begin like a pack")
    if version != PACK_VERSION:
        raise PackForbidden(f"it has pack format {version}; this version of compile_cache reads {PACK_VERSION}")
    header = _Header(*lengths)
    if max(header.stored_bytes, header.manifest_bytes) > limits.manifest_bytes:
        raise ManifestTooLarge(f"its manifest claims more than the {limits.manifest_bytes} bytes allowed")
    if header.signature_bytes > _SIGNATURE_BYTES:
        raise PackForbidden(f"its signature claims more than the {_SIGNATURE_BYTES} bytes allowed")
    return header


def read_head(read: ReadAt, name: str, limits: Limits, trusted: TrustedKeys) -> Head:
    """Read and verify the head of the pack that is stored as `name`.

    The checks are, in order: the format, the limits, whether a trusted key claims to have signed the pack, the name,
    the signature, and the whole manifest with every path. Memory holds the unpacked manifest and a few megabytes.

    Raises:
        PackForbidden: `limits` or `trusted` forbid the pack's use.
        PackError: the pack is damaged, and no part of it may be used. The message says how.
    """
    header = _parse_header(read(0, HEADER_BYTES), limits)
    signature = _read_signature(read, header)
    trusted.check_signer(signature)
    text = bytearray(header.manifest_bytes)
    try:
        _unpack_manifest(read, header, text)
        if digest_of(text) + _SUFFIX != name:
            raise PackError("its manifest does not match its name")
        signed_by = trusted.verify(text, signature)
        weight_bytes = weight_of(text)
        if weight_bytes > limits.manifest_bytes:
            raise ManifestTooLarge(f"its manifest takes more than the {limits.manifest_bytes} bytes of memory allowed")
        manifest = parse_manifest(text, limits)
    finally:
        text.clear()  # an error's traceback would keep the text in memory
    if manifest.digest() + _SUFFIX != name:  # for example, a field occurs twice
        raise PackError("its manifest is not written as packs are")
    return Head(manifest, header.end, signed_by, weight_bytes)


def _read_signature(read: ReadAt, header: _Header) -> bytes:
    expected = _SKIPPABLE.pack(_SIGNATURE_MAGIC, header.signature_bytes)
    stored = read(header.manifest_end, len(expected) + header.signature_bytes)
    if len(stored) < len(expected) + header.signature_bytes:
        raise PackError("it ends before the end of its signature")
    if stored[: len(expected)] != expected:
        raise PackError("its signature is not where it should be")
    return stored[len(expected) :]


def _unpack_manifest(read: ReadAt, header: _Header, text: bytearray) -> None:
    """Fill `text` piece by piece. A decompression bomb fills only the stated length, which is within the limits."""
    source = _Pieces(read, HEADER_BYTES, header.manifest_end)
    try:
        if zstandard.frame_content_size(read(HEADER_BYTES, _FRAME_HEADER_BYTES)) != len(text):
            raise PackError(f"its manifest is not {len(text)} bytes long, as stated")
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
        unpacked = decompressor.stream_reader(cast("IO[bytes]", source), _CHUNK_BYTES)  # it only calls `read`
        filled = 0
        while filled < len(text) and (more := unpacked.readinto(memoryview(text)[filled:])):
            filled += more
        if filled < len(text) or unpacked.read(1) or not source.is_read:
            raise PackError("its manifest is not exactly one zstd frame of the length stated")
    except zstandard.ZstdError as error:
        raise PackError(f"its manifest is damaged: {error}") from error


class _Pieces:
    """A part of a pack for zstd's stream reader, which reads only what it needs. The last byte comes alone: if the
    frame ends earlier, the reader never asks for that byte, and the bytes after the frame are noticed."""

    def __init__(self, read: ReadAt, start: int, end: int) -> None:
        self._read = read
        self._position = start
        self._end = end

    @property
    def is_read(self) -> bool:
        """Whether the reader has asked for all bytes."""
        return self._position >= self._end

    def read(self, size_bytes: int) -> bytes:
        """The next bytes; none at the end."""
        left_bytes = self._end - self._position
        if left_bytes > 1:
            left_bytes = min(size_bytes, left_bytes - 1)
        data = self._read(self._position, left_bytes) if left_bytes > 0 else b""
        self._position += len(data)
        return data


def runs(head: Head) -> Iterator[Run]:
    """The pack, cut wherever a frame and a file end together: after every frame, except inside large files."""
    files = iter(head.manifest.files)
    start = offset = head.start
    frames: list[Frame] = []
    inside: list[PackFile] = []
    missing_bytes = 0  # the bytes of the run's files in later frames
    for frame in head.manifest.frames:
        frames.append(frame)
        offset += frame.stored_bytes
        missing_bytes -= frame.size_bytes
        while missing_bytes < 0:
            inside.append(next(files))
            missing_bytes += inside[-1].size_bytes
        if missing_bytes == 0:
            yield Run(start, tuple(frames), tuple(inside))
            start, frames, inside = offset, [], []
    if rest := tuple(files):
        yield Run(start, (), rest)  # the empty files at the end


def unpack_run(stored: Readable, run: Run, folder: Path | None) -> None:
    """Decompress and verify a run, and write its files below `folder`. Without a folder, only verify.

    `stored` must be at the run's start. Peak memory is a few frames, whatever the pack claims. After a failure, the
    caller must delete the files in `folder`, which is not the cache directory.

    Raises:
        PackError: a frame or a file differs from the manifest.
        OSError: `folder` cannot be written.
    """
    contents = (_decompress(stored.read(f.stored_bytes), f.size_bytes) for f in run.frames)
    rest = memoryview(b"")
    for file in run.files:
        digest, left_bytes = hashlib.sha256(), file.size_bytes
        with _target(folder, file.path) as target:
            while left_bytes:
                rest = rest or memoryview(next(contents))
                part, rest = rest[:left_bytes], rest[left_bytes:]
                left_bytes -= len(part)
                digest.update(part)
                if target is not None:
                    target.write(part)
            if target is not None and file.executable:
                os.fchmod(target.fileno(), 0o755)
        if digest.hexdigest() != file.sha256:
            raise PackError(f"its file {file.path!r} differs from the manifest")


def _target(folder: Path | None, path: str) -> contextlib.AbstractContextManager[BinaryIO | None]:
    if folder is None:
        return contextlib.nullcontext()
    local = f"{folder}/{path}"
    try:
        return open(local, "wb")
    except FileNotFoundError:  # make each folder once: checking it for each small file would double the cost
        os.makedirs(os.path.dirname(local), exist_ok=True)
        return open(local, "wb")


def _decompress(stored: bytes, size_bytes: int) -> bytes:
    """The `size_bytes` bytes of a zstd frame. A frame that claims another size is not unpacked."""
    try:
        if zstandard.frame_content_size(stored) != size_bytes:
            raise PackError(f"its frame is not {size_bytes} bytes long, as stated")
        data = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PackError(f"its frame is damaged: {error}") from error
    except MemoryError as error:
        raise PackError(f"its frame of {size_bytes} bytes does not fit into memory") from error
    if len(data) != size_bytes:
        raise PackError(f"its frame is not {size_bytes} bytes long, as stated")
    return data


def sha256_of(path: Path) -> str:
    """The file's SHA-256 in hexadecimal. Reads it piece by piece, without the GIL."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
