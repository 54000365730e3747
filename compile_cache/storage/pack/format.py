"""A pack: one immutable file that carries artifacts, named by the SHA-256 of its header and its stored manifest.

Layout (the whole pack is a valid zstd stream; zstd skips the first and the third part):

    header      fixed size: magic, format version, lengths of the two parts that follow
    manifest    one zstd frame of JSON: key, files, frames, creator, time
    signature   a skippable frame, empty in an unsigned pack: of header and manifest, as they are stored
    frames      independent zstd frames of whole files, in the manifest's order: small ones share up to 1 MiB

One ranged read gets the head: header, manifest and signature. Only the head decides whether a pack may be used. Name
and signature are checked before the manifest is decompressed. Then any frame can be read and verified without the
others, because the manifest has the digests of its files. RFC 8878, sections 3.1.1 and 3.1.2, describes both kinds of
frames.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import zstandard

from compile_cache.errors import PackError, PackForbidden
from compile_cache.files import replacing
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import FORMAT_VERSION
from compile_cache.storage.pack.manifest import Frame, Limits, Manifest, PackFile, parse_manifest
from compile_cache.storage.pack.signing import SIGNATURE_BYTES, Signer, verify

_SUFFIX = ".pack"
PACK_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(_SUFFIX))

_LEVEL = 3
# The files of a frame, unless it has a single one or those of one logical key.
FRAME_BYTES = 1 << 20
# One request for frames. Eight threads hold 32 MB in memory.
READ_BYTES = 4 << 20

_SKIPPABLE = struct.Struct("<II")  # magic number, length
_HEADER_MAGIC = 0x184D2A50
_SIGNATURE_MAGIC = 0x184D2A51
_HEADER = struct.Struct("<8sIIII")  # identity, pack version, manifest frame bytes, manifest bytes, signature bytes
_IDENTITY = b"compcach"
HEADER_BYTES = _SKIPPABLE.size + _HEADER.size

# Level 3 never needs more than 2 MiB.
_LARGEST_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A file to pack: the local file, its path and logical key inside the cache directory, and its owner (see
    `Ledger`)."""

    local: Path
    path: str
    key: str
    owner: str = ""

    @property
    def size_bytes(self) -> int:
        """The file's size; 0 without the file."""
        return self.local.stat().st_size if self.local.exists() else 0


@dataclass(frozen=True, slots=True)
class Head:
    """A pack's head: its verified manifest, the offset of its first frame, and the public key that signed it, if any.
    `manifest_bytes` is the length of the unpacked manifest."""

    manifest: Manifest
    start: int
    signed_by: str | None = None
    manifest_bytes: int = 0

    @property
    def stored_bytes(self) -> int:
        """The length of the whole pack."""
        return self.start + sum(frame.stored_bytes for frame in self.manifest.frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack(Head):
    """A finished pack on the local disk."""

    local: Path

    @property
    def name(self) -> str:
        """The object's name inside its key's prefix."""
        return self.local.name


@dataclass(slots=True)
class Run:
    """Neighbouring frames, from `start` to `end` in the pack, and their files."""

    start: int
    end: int
    files: list[PackFile] = field(default_factory=list)


def write_pack(
    folder: Path, key: CacheKey, sources: Sequence[Source], creator: str, signer: Signer | None = None
) -> Pack:
    """Pack `sources` into a new file in `folder`, under the pack's name. Peak memory is a few frames.

    A source that no longer exists is left out.

    Raises:
        OSError: a source cannot be read, or `folder` cannot be written.
    """
    with tempfile.TemporaryFile(dir=folder) as body:
        manifest = Manifest(key, tuple(_write_frames(body, sources)), creator, time.time())
        text = msgspec.json.encode(manifest)
        name, head = encode_head(text, signer)
        with replacing(folder / name) as file:
            file.write(head)
            body.seek(0)
            shutil.copyfileobj(body, file, FRAME_BYTES)
    signed_by = signer.public_key if signer else None
    return Pack(manifest, len(head), signed_by, len(text), local=folder / name)


def batches(sources: Iterable[Source], most_bytes: Iterator[int]) -> Iterator[list[Source]]:
    """`sources` in their order, in batches of at most so many bytes, or of a single logical key: a restore takes all
    files of a key from one pack."""
    batch: list[Source] = []
    room_bytes = next(most_bytes)
    for source in sources:
        size_bytes = source.size_bytes
        if batch and size_bytes > room_bytes and source.key != batch[-1].key:
            yield batch
            batch, room_bytes = [], next(most_bytes)
        batch.append(source)
        room_bytes -= size_bytes
    if batch:
        yield batch


def _write_frames(body: BinaryIO, sources: Sequence[Source]) -> Iterator[Frame]:
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    for batch in batches(sources, itertools.repeat(FRAME_BYTES)):
        start = body.tell()
        with compressor.stream_writer(body, closefd=False) as frame:
            files = tuple(_write_files(frame, batch))
        yield Frame(body.tell() - start, files)


def _write_files(frame: BinaryIO, sources: Sequence[Source]) -> Iterator[PackFile]:
    for source in sources:
        digest, size_bytes = hashlib.sha256(), 0
        with contextlib.suppress(FileNotFoundError), source.local.open("rb") as file:
            while chunk := file.read(FRAME_BYTES):
                frame.write(chunk)
                digest.update(chunk)
                size_bytes += len(chunk)
            can_run = bool(os.fstat(file.fileno()).st_mode & 0o100)
            yield PackFile(source.path, source.key, size_bytes, digest.hexdigest(), source.owner, can_run)


def encode_head(manifest: bytes, signer: Signer | None = None) -> tuple[str, bytes]:
    """The name and the first bytes of a pack with this manifest."""
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(manifest)
    header = _HEADER.pack(_IDENTITY, FORMAT_VERSION, len(stored), len(manifest), SIGNATURE_BYTES if signer else 0)
    named = _SKIPPABLE.pack(_HEADER_MAGIC, len(header)) + header + stored
    signature = signer.sign(named) if signer else b""
    return _name_of(named), named + _SKIPPABLE.pack(_SIGNATURE_MAGIC, len(signature)) + signature


def _name_of(named: bytes) -> str:
    """The name of a pack with this header and stored manifest, which has the digests of all files."""
    return hashlib.sha256(named).hexdigest() + _SUFFIX


def read_head(stored: BinaryIO, name: str, limits: Limits, trusted: frozenset[str]) -> Head:
    """Verify and read the head of the pack that is stored as `name`, from its beginning.

    The checks are, in order: the format, the name, the signature, the limits, and the whole manifest with every path.

    Raises:
        PackForbidden: `limits` or `trusted` forbid the pack's use, or it has another format.
        PackError: the pack is damaged, and no part of it may be used. The message says how.
    """
    header = stored.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise PackError(f"it ends after {len(header)} bytes, inside its header")
    magic, length = _SKIPPABLE.unpack_from(header)
    identity, version, stored_bytes, manifest_bytes, signature_bytes = _HEADER.unpack_from(header, _SKIPPABLE.size)
    if (magic, length, identity) != (_HEADER_MAGIC, _HEADER.size, _IDENTITY):
        raise PackError("it does not begin like a pack")
    if version != FORMAT_VERSION:
        raise PackForbidden(f"it has pack format {version}; this version of compile_cache reads {FORMAT_VERSION}")
    if max(stored_bytes, manifest_bytes) > limits.manifest_bytes:
        raise PackForbidden(f"its manifest claims more than the {limits.manifest_bytes} bytes allowed")
    if signature_bytes not in (0, SIGNATURE_BYTES):
        raise PackForbidden(f"its signature has {signature_bytes} bytes, not {SIGNATURE_BYTES}")
    named = header + stored.read(stored_bytes)
    signature = stored.read(_SKIPPABLE.size + signature_bytes)
    if len(signature) < _SKIPPABLE.size + signature_bytes:
        raise PackError("it ends before the end of its signature")
    if _name_of(named) != name:
        raise PackError("its manifest does not match its name")
    if _SKIPPABLE.unpack_from(signature) != (_SIGNATURE_MAGIC, signature_bytes):
        raise PackError("its signature is not where it should be")
    signed_by = verify(named, signature[_SKIPPABLE.size :], trusted)
    text = bytearray(manifest_bytes)
    _unpack_manifest(memoryview(named)[HEADER_BYTES:], text)
    head = Head(parse_manifest(text, limits), len(named) + len(signature), signed_by, len(text))
    if head.stored_bytes > limits.size_bytes:
        raise PackForbidden(f"it has {head.stored_bytes} bytes; {limits.size_bytes} are allowed")
    return head


def _unpack_manifest(stored: memoryview, text: bytearray) -> None:
    """Fill `text`. A decompression bomb fills only the stated length, which is within the limits."""
    try:
        unpacked = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES).stream_reader(stored)
        if unpacked.readinto(text) < len(text) or unpacked.read(1):
            raise PackError(f"its manifest is not {len(text)} bytes long, as stated")
    except zstandard.ZstdError as error:
        raise PackError(f"its manifest is damaged: {error}") from error


def runs(head: Head, wanted: Container[str] | None = None, most_bytes: int = READ_BYTES) -> list[Run]:
    """The frames that have `wanted` files, or all frames. A run is at most as long as a request, if it has several."""
    found: list[Run] = []
    end = head.start
    for frame in head.manifest.frames:
        start, end = end, end + frame.stored_bytes
        if wanted is not None and not any(file.path in wanted for file in frame.files):
            continue
        if not found or found[-1].end != start or end - found[-1].start > most_bytes:
            found.append(Run(start, start))
        found[-1].end = end
        found[-1].files += frame.files
    return found


def unpack(
    stored: BinaryIO, files: Iterable[PackFile], folder: Path | None, wanted: Container[str] | None = None
) -> None:
    """Decompress and verify the files of a run, and write them, or those that are `wanted`, below `folder`. Without a
    folder, only verify.

    Peak memory is a few MiB, whatever the pack claims. After a failure, the caller must delete the files in `folder`,
    which is not the cache directory.

    Raises:
        PackError: a frame or a file differs from the manifest.
        OSError: `folder` cannot be written.
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW_BYTES)
    try:
        content = decompressor.stream_reader(stored, READ_BYTES, read_across_frames=True)
        for file in files:
            digest, left_bytes = hashlib.sha256(), file.size_bytes
            with _target(folder if wanted is None or file.path in wanted else None, file.path) as target:
                while part := content.read(min(left_bytes, FRAME_BYTES)):
                    left_bytes -= len(part)
                    digest.update(part)
                    if target is not None:
                        target.write(part)
                if target is not None and file.executable:
                    os.fchmod(target.fileno(), 0o755)
            if left_bytes or digest.hexdigest() != file.sha256:
                raise PackError(f"its file {file.path!r} differs from the manifest")
        if content.read(1):
            raise PackError("its frames have more than its files")
    except zstandard.ZstdError as error:
        raise PackError(f"its frame is damaged: {error}") from error


def _target(folder: Path | None, path: str) -> contextlib.AbstractContextManager[BinaryIO | None]:
    if folder is None:
        return contextlib.nullcontext()
    local = f"{folder}/{path}"
    try:
        return open(local, "wb")
    except FileNotFoundError:  # make each folder once: checking it for each small file would double the cost
        os.makedirs(os.path.dirname(local), exist_ok=True)
        return open(local, "wb")
