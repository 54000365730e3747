"""The head of a pack: header, manifest and signature. Only the head decides whether a pack may be used (format.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, cast

import zstandard

from compile_cache.errors import ManifestTooLarge, PackError, PackForbidden
from compile_cache.pack.manifest import Limits, Manifest, digest_of, parse_manifest
from compile_cache.pack.signing import TrustedKeys

PACK_VERSION = 1
SUFFIX = ".pack"
LEVEL = 3

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
# Python keeps n bytes of text in up to 4n bytes, unless all characters are ASCII, and none is an escape's.
_WIDEST_CHARACTER_BYTES = 4

# A function of an offset and a number of bytes. It returns these bytes of a pack, or fewer at the pack's end.
ReadAt = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Head:
    """A pack's verified manifest, the offset of its first frame, and the public key that signed it, if any.
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
    stored = zstandard.ZstdCompressor(level=LEVEL).compress(manifest)
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
        if digest_of(text) + SUFFIX != name:
            raise PackError("its manifest does not match its name")
        signed_by = trusted.verify(text, signature)
        weight_bytes = len(text) * (1 if text.isascii() and b"\\" not in text else _WIDEST_CHARACTER_BYTES)
        if weight_bytes > limits.manifest_bytes:
            raise ManifestTooLarge(f"its manifest takes more than the {limits.manifest_bytes} bytes of memory allowed")
        manifest = parse_manifest(text, limits)
    finally:
        text.clear()  # an error's traceback would keep the text in memory
    if manifest.digest() + SUFFIX != name:  # for example, a field occurs twice
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
