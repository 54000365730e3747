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
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import zstandard

from compile_cache.errors import PackError
from compile_cache.files import replacing
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.head import LEVEL, SUFFIX, Head, make_head
from compile_cache.pack.manifest import FRAME_BYTES, Frame, Manifest, PackFile, digest_of
from compile_cache.pack.signing import Signer

PACK_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))

_CHUNK_BYTES = 1 << 20


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
        local = folder / (digest_of(text) + SUFFIX)
        with replacing(local) as file:
            file.write(make_head(text, signer.sign(text) if signer else b""))
            body.seek(0)
            while chunk := body.read(_CHUNK_BYTES):
                file.write(chunk)
    return Pack(local, local.stat().st_size, manifest)


def _write_frames(body: BinaryIO, sources: Sequence[Source]) -> tuple[list[PackFile], list[Frame]]:
    """Write the frames. Small files share a frame and do not cross its end. A file larger than a frame has its own
    frames."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
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
            files.append(PackFile(source.path, source.key, size_bytes, digest.hexdigest(), source.replaces))
    finish_frame()
    return files, frames


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
    """The file's SHA-256 in hexadecimal. Reads 1 MiB at a time, without the GIL."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
