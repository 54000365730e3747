"""Hostile packs: forged part by part, as an independent writer of the format would, or damaged at random.

What the tests of the format and the fuzzer (benchmarks/fuzz_packs.py) share. The library's own writer makes only the
honest packs that most hostile ones begin as.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import zstandard

from compile_cache.errors import PackError
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.format import Source, runs, unpack_run, write_pack
from compile_cache.pack.head import HEADER_BYTES, Head, ReadAt, head_bytes, read_head
from compile_cache.pack.manifest import Limits
from compile_cache.pack.reading import ObjectReader
from compile_cache.pack.signing import PRIVATE_PREFIX, Signer, TrustedKeys

MIB = 1 << 20
KEY = CacheKey("environment", "model", "version")
LIMITS = Limits(size_bytes=8 * MIB, files=1000, manifest_bytes=256 << 10)
FIRST_READ_BYTES = 4096  # small, so that some heads need a second read

Record = dict[str, Any]


# An independent writer.


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def name_of(manifest: bytes) -> str:
    """What a pack with this manifest is named."""
    return digest(manifest) + ".pack"


def record_of(*files: tuple[str, bytes]) -> Record:
    """The manifest of an honest pack that has a frame for each file that is not empty, as JSON values."""
    return {
        "key": {"environment": KEY.environment, "model_name": KEY.model_name, "model_version": KEY.model_version},
        "files": [
            {"path": path, "key": f"key of {path}", "size_bytes": len(content), "sha256": digest(content)}
            for path, content in files
        ],
        "frames": [
            {"stored_bytes": len(zstandard.compress(content)), "size_bytes": len(content)}
            for _, content in files
            if content
        ],
        "creator": "the test",
        "created_s": 1.0,
    }


def assemble(
    manifest: bytes,
    frames: bytes = b"",
    *,
    stored: bytes | None = None,
    magic: int = 0x184D2A50,
    header_bytes: int = 24,
    identity: bytes = b"compcach",
    version: int = 1,
    stored_bytes: int | None = None,
    manifest_bytes: int | None = None,
    signature: bytes = b"",
    signature_bytes: int | None = None,
    signature_magic: int = 0x184D2A51,
    signature_length: int | None = None,
) -> bytes:
    """A pack with any part of its head forged. The signature's length is told twice: in the header, and before it."""
    stored = zstandard.compress(manifest) if stored is None else stored
    header = struct.pack(
        "<II8sIIII",
        magic,
        header_bytes,
        identity,
        version,
        len(stored) if stored_bytes is None else stored_bytes,
        len(manifest) if manifest_bytes is None else manifest_bytes,
        len(signature) if signature_bytes is None else signature_bytes,
    )
    length = len(signature) if signature_length is None else signature_length
    return header + stored + struct.pack("<II", signature_magic, length) + signature + frames


def forge(change: Callable[[Record], object], *files: tuple[str, bytes]) -> tuple[str, bytes]:
    """Name and content of an honest pack of `files` but for `change` to its manifest."""
    files = files or (("a/file", b"content"), ("b", b"more"))
    record = record_of(*files)
    change(record)
    text = json.dumps(record).encode()
    return name_of(text), assemble(text, b"".join(zstandard.compress(content) for _, content in files if content))


def forge_frame(frame: bytes, content: bytes) -> tuple[str, bytes]:
    """A pack of one file of `content`, with `frame` for its frame."""
    record = record_of(("a", content))
    record["frames"][0]["stored_bytes"] = len(frame)
    text = json.dumps(record).encode()
    return name_of(text), assemble(text, frame)


RAW, RLE = 0, 1
NOTHING = (RAW, 0, b"")


def zstd_frame(
    *blocks: tuple[int, int, bytes], content_size: int | None, window: int | None = None, dictionary: int = 0
) -> bytes:
    """A zstd frame made by hand of blocks (type, size, data), with any claims: RFC 8878, section 3.1.1.

    `window` is the window descriptor's byte; without one the frame is a single segment.
    """
    descriptor = (0xC0 if content_size is not None else 0) | (0x20 if window is None else 0) | (3 if dictionary else 0)
    header = struct.pack("<IB", 0xFD2FB528, descriptor)
    header += bytes([window]) if window is not None else b""
    header += struct.pack("<I", dictionary) if dictionary else b""
    header += struct.pack("<Q", content_size) if content_size is not None else b""
    last = len(blocks) - 1
    return header + b"".join(
        (size << 3 | kind << 1 | (number == last)).to_bytes(3, "little") + data
        for number, (kind, size, data) in enumerate(blocks)
    )


def zeros(size_bytes: int) -> list[tuple[int, int, bytes]]:
    """Blocks that unpack to so many zeros: four bytes for each 128 KiB."""
    whole, rest = divmod(size_bytes, 128 << 10)
    return [(RLE, 128 << 10, b"\0")] * whole + [(RLE, rest, b"\0")]


# A restore of one pack.


class OneObject:
    """A store's reading side, with one object; `requests` are what was asked of it (start, size)."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.requests: list[tuple[int, int]] = []

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        end = len(self.content) if size_bytes is None else start + size_bytes
        self.requests.append((start, end - start))
        return self.content[start:end]


def reading(content: bytes) -> ReadAt:
    """Reads a pack that is in memory."""
    return lambda start, size_bytes: content[start : start + size_bytes]


def restore(
    name: str, content: bytes, folder: Path | None, limits: Limits = LIMITS, trusted: TrustedKeys | None = None
) -> Head:
    """What a boot does with a pack of `KEY` that is stored as `name`, step by step in the same order."""
    if len(content) > limits.size_bytes:
        raise PackError("it is larger than allowed")
    store = OneObject(content)
    beginning = store.read(name, 0, FIRST_READ_BYTES)
    missing_bytes = head_bytes(beginning, limits) - len(beginning)
    if missing_bytes > 0:
        beginning += store.read(name, len(beginning), missing_bytes)
    head = read_head(reading(beginning), name, limits, trusted or TrustedKeys())
    if head.stored_bytes != len(content):
        raise PackError(f"it has {len(content)} bytes, but its manifest describes {head.stored_bytes}")
    if head.manifest.key != KEY:
        raise PackError(f"it is for {head.manifest.key.prefix}")
    reader = ObjectReader(store, name, head.start, head.stored_bytes, beginning)
    for run in runs(head):
        unpack_run(reader, run, folder)
    return head


def read_tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_tree(folder: Path, files: Mapping[str, bytes]) -> list[Source]:
    sources = []
    for path, content in files.items():
        local = folder / path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(content)
        sources.append(Source(local, path, f"key of {path}"))
    return sources


def fingerprint(digests: Mapping[str, str]) -> str:
    """One text for a tree of files: paths and digests."""
    return digest(json.dumps(sorted(digests.items())).encode())


# Honest packs of several shapes.


def signer(number: int) -> Signer:
    """The same key for the same number, always."""
    return Signer(PRIVATE_PREFIX + base64.b64encode(bytes([number]) * 32).decode())


OURS, THEIRS = signer(1), signer(2)


def _content(rng: Random, size_bytes: int) -> bytes:
    """Compresses about as well as code does."""
    words = [rng.randbytes(8) + bytes(24) for _ in range(64)]
    return b"".join(rng.choices(words, k=size_bytes // 32 + 1))[:size_bytes]


def _shapes() -> dict[str, dict[str, bytes]]:
    content = partial(_content, Random(0))
    return {
        "small": {"fxgraph/ab/abc/content": b"a graph", "triton/0/X/k.cubin": content(900), "empty": b""},
        "empty files": {"a": b"", "b/c": b"", "b/d": b"x", "e": b""},
        "one frame": {"before": b"b", "exactly": content(MIB), "after": b"a"},
        "large": {"a": b"a", "large": content(2 * MIB + 77), "z": b"z"},
        "several frames": {f"kernels/{number}": content(400_000) for number in range(7)},
        "many": {f"aotautograd/{number:03}/{number % 7}": content(number) for number in range(200)},
        "deep": {"deep/" * 20 + "file": b"x", "ünï/cödé": content(3000), "-rf": b"y", "a b/%2e%2e": b"z"},
    }


@dataclass
class Draft:
    """A pack taken apart, to be changed and put together again under its right name. `trusted` are the keys of the host
    that it is meant for."""

    record: Record
    frames: list[bytes]
    files: dict[str, bytes]
    name: str
    content: bytes
    signature: bytes = b""
    trusted: tuple[str, ...] = ()

    def put_together(self, text: bytes | None = None, **head: Any) -> tuple[str, bytes]:
        """Name and content; `text` instead of the record's JSON, `head` as in `assemble`."""
        text = json.dumps(self.record).encode() if text is None else text
        return name_of(text), assemble(text, b"".join(self.frames), **{"signature": self.signature, **head})

    @property
    def genuine(self) -> frozenset[str]:
        """What the honest pack gives."""
        return frozenset({fingerprint({path: digest(content) for path, content in self.files.items()})})

    @property
    def stated(self) -> frozenset[str]:
        """What the record says that it gives, if that is no lie: then anybody could have published it, and the host
        that asks for no signature takes it."""
        return frozenset() if self.trusted else _read_independently(self.record, self.frames)


def _read_independently(record: Record, frames: list[bytes]) -> frozenset[str]:
    try:
        if sum(file["size_bytes"] for file in record["files"]) > LIMITS.size_bytes:
            return frozenset()
        if any(zstandard.frame_content_size(frame) > MIB for frame in frames):
            return frozenset()
        content = b"".join(zstandard.ZstdDecompressor().decompress(frame, 2 * MIB) for frame in frames)
        found, start = {}, 0
        for file in record["files"]:
            found[file["path"]] = digest(content[start : start + file["size_bytes"]])
            start += file["size_bytes"]
        honest = [file["sha256"] for file in record["files"]] == list(found.values()) and start == len(content)
        harmless = len({path.casefold() for path in found}) == len(found) and not any(map(_is_odd, found))
        ours = record["key"] == record_of()["key"]
        return frozenset({fingerprint(found)}) if honest and harmless and ours else frozenset()
    except (TypeError, KeyError, AttributeError, ValueError, IndexError, OverflowError, zstandard.ZstdError):
        return frozenset()


def _is_odd(path: str) -> bool:
    return not path or any(character in "\\\0\n\x1b" or character < " " for character in path)


class Corpus:
    """Honest packs, each shape unsigned and signed, to make hostile ones from; `outside` is where none may write."""

    def __init__(self, outside: str = "/outside") -> None:
        self.outside = outside
        with tempfile.TemporaryDirectory() as folder, mock.patch("time.time", return_value=1.0):
            self.drafts = [
                _take_apart(Path(folder, f"{number}-{key is not None}"), files, key)
                for number, files in enumerate(_shapes().values())
                for key in (None, OURS)
            ]

    def draft(self, rng: Random, *, signed: float = 0.5, frames: int = 0) -> Draft:
        """One of them, `signed` with that probability, of at least so many frames, to be changed freely."""
        is_signed = rng.random() < signed
        return copy.deepcopy(
            rng.choice([d for d in self.drafts if bool(d.signature) == is_signed and len(d.frames) >= frames])
        )


def _take_apart(folder: Path, files: dict[str, bytes], key: Signer | None) -> Draft:
    (folder / "out").mkdir(parents=True)
    pack = write_pack(folder / "out", KEY, write_tree(folder / "in", files), "the test", key)
    content = pack.local.read_bytes()
    frames, start = [], len(content) - pack.manifest.frames_bytes
    signature = content[start - 96 : start] if key else b""
    for frame in pack.manifest.frames:
        frames.append(content[start : start + frame.stored_bytes])
        start += frame.stored_bytes
    record = json.loads(pack.manifest.to_json())
    trusted = (key.public_key,) if key else ()
    return Draft(record, frames, files, pack.name, content, signature, trusted)


# Hostile packs, by kind.


@dataclass(frozen=True)
class Case:
    """A hostile pack, the keys its host trusts, and what may come out of it, if anything: fingerprints of trees."""

    name: str
    content: bytes
    may_give: frozenset[str] = frozenset()
    trusted: tuple[str, ...] = field(default=())


def _damaged(draft: Draft, content: bytes) -> Case:
    """Under the old name, so that it gives what it always gave or nothing."""
    return Case(draft.name, content, draft.genuine, draft.trusted)


def _forged(draft: Draft, rng: Random, text: bytes | None = None) -> Case:
    """Under its right name. Who forges a signed pack has the old signature, none, or one of their own."""
    if draft.signature:
        signed = json.dumps(draft.record).encode() if text is None else text
        draft.signature = rng.choice([draft.signature, b"", THEIRS.sign(signed)])
    return Case(*draft.put_together(text), frozenset() if text is not None else draft.stated, draft.trusted)


def _flipped_bits(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    content = bytearray(draft.content)
    most = len(content) if rng.random() < 0.5 else min(len(content), 600)  # the head is a small part of some
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        content[rng.randrange(most)] ^= 1 << rng.randrange(8)
    return _damaged(draft, bytes(content))


def _overwritten(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    start, length = rng.randrange(len(draft.content)), rng.choice([1, 4, 64, 5000])
    new = rng.choice([rng.randbytes(length), bytes(length), b"\xff" * length])
    content = draft.content[:start] + new + draft.content[start + length :]
    return _damaged(draft, content)


def _cut(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    most = rng.choice([HEADER_BYTES + 8, 1000, len(draft.content), len(draft.content)])
    return _damaged(draft, draft.content[: rng.randrange(min(most, len(draft.content)))])


def _extended(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    little, frame = rng.randbytes(rng.randrange(1, 5000)), zstandard.compress(b"more")
    more = rng.choice([b"\0", little, frame, draft.content])
    return _damaged(draft, draft.content + (more if rng.random() < 0.98 else bytes(LIMITS.size_bytes)))


def _shifted(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    start, length = rng.randrange(len(draft.content)), rng.choice([1, 2, 8, 100])
    new, rest = rng.choice([(rng.randbytes(length), start), (b"", start + length)])
    return _damaged(draft, draft.content[:start] + new + draft.content[rest:])


def _moved_frames(rng: Random, corpus: Corpus) -> Case:
    """Frames in another order, twice or missing; with a manifest that says so, or with the old one."""
    draft = corpus.draft(rng, frames=2)
    start = len(draft.content) - sum(map(len, draft.frames))
    order = list(range(len(draft.frames)))
    rng.choice([rng.shuffle, _repeat(rng), lambda order: order.pop(rng.randrange(len(order)))])(order)
    draft.frames = [draft.frames[number] for number in order]
    if rng.random() < 0.5:
        return _damaged(draft, draft.content[:start] + b"".join(draft.frames))
    draft.record["frames"] = [draft.record["frames"][number] for number in order]
    return _forged(draft, rng)


def _repeat(rng: Random) -> Callable[[list[int]], object]:
    return lambda order: order.insert(rng.randrange(len(order)), rng.choice(order))


def _replaced_frames(rng: Random, corpus: Corpus) -> Case:
    """A frame of another pack, or of other content of the same length, that the manifest describes; or of the same
    content, packed in another way, which is as good as before."""
    draft = corpus.draft(rng, signed=0.2, frames=1)
    number = rng.randrange(len(draft.frames))
    content = zstandard.decompress(draft.frames[number])
    donor = zstandard.decompress(rng.choice(corpus.draft(rng, frames=1).frames))
    content = rng.choice([content, donor, content[:-1] + b"\xff", content[::-1]])
    draft.frames[number] = zstandard.ZstdCompressor(level=rng.choice([1, 9]), write_checksum=True).compress(content)
    draft.record["frames"][number] = {"stored_bytes": len(draft.frames[number]), "size_bytes": len(content)}
    return _forged(draft, rng)


def _spliced(rng: Random, corpus: Corpus) -> Case:
    """The head of one pack and the frames of another, or parts of two heads."""
    one, other = corpus.draft(rng), corpus.draft(rng)
    parts = [[d.content[:HEADER_BYTES], _stored_manifest(d), _signature(d), b"".join(d.frames)] for d in (one, other)]
    content = b"".join(parts[rng.randrange(2)][place] for place in range(4))
    return Case(one.name, content, one.genuine, one.trusted)


def _stored_manifest(draft: Draft) -> bytes:
    return draft.content[HEADER_BYTES : len(draft.content) - sum(map(len, draft.frames)) - len(_signature(draft))]


def _signature(draft: Draft) -> bytes:
    return struct.pack("<II", 0x184D2A51, len(draft.signature)) + draft.signature


def _forged_header(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    name = rng.choice(["magic", "header_bytes", "version", "stored_bytes", "manifest_bytes", "signature_bytes"])
    name = rng.choice([name, name, "signature_magic", "signature_length"])
    value = rng.choice(
        [0, 1, 95, 97, 4096, 4097, 256 << 10, 0x184D2A5F, 0xFD2FB528, 2**31, 2**32 - 1, rng.randrange(600)]
    )
    _, content = draft.put_together(**{name: value})
    return Case(name_of(json.dumps(draft.record).encode()), content, draft.stated, draft.trusted)


def hostile_paths(outside: str) -> list[str]:
    """No one of them may ever be written."""
    climbing = ["..", "../escaped", "../" * 9 + "escaped", "a/../../escaped", "a/..", "./a", ".", "a/.", "a//b", "a/"]
    absolute = ["/", "//", "/escaped", f"{outside}/escaped", f"a/{outside}/escaped", "//host/escaped", "~/../escaped"]
    foreign = ["a\\b", "..\\escaped", "C:\\escaped", "\\\\host\\escaped"]
    unprintable = ["", "a\0b", "\0", "a\nb", "a\rb", "a\x1b[2J", "a\x7f", "a\u202eb", "\ud800", "a/\udcff", "a\xa0b"]
    long = ["x" * 256, "x" * 1025, "é" * 128, "y/" * 600 + "z", "d/" * 32 + "f", "x" * 100_000]
    return climbing + absolute + foreign + unprintable + long


def _forged_paths(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng, signed=0.1)
    files = draft.record["files"]
    file, other = rng.choice(files), rng.choice(files)
    hostile = rng.choice(hostile_paths(corpus.outside))
    file["path"] = rng.choice(
        [
            hostile,
            hostile,
            f"{file['path']}/{hostile}",
            other["path"],
            other["path"].swapcase(),
            other["path"] + "/inside",
            other["path"].rpartition("/")[0],
            "".join(rng.choices("./\\a\0é~ \ud800", k=rng.randrange(12))),
        ]
    )
    return _forged(draft, rng)


def _forged_links(rng: Random, corpus: Corpus) -> Case:
    """Fields that other archive formats have, for links, devices, owners and modes."""
    draft = corpus.draft(rng, signed=0.1)
    name = rng.choice(["link", "linkname", "symlink", "target", "type", "mode", "uid", "device", "frame", "offset"])
    rng.choice(draft.record["files"])[name] = rng.choice([f"{corpus.outside}/escaped", "/etc/passwd", 0o120777, 0, "2"])
    return _forged(draft, rng)


def _forged_sizes(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng, signed=0.1, frames=1)
    files, frames = draft.record["files"], draft.record["frames"]
    for _ in range(rng.choice([1, 1, 2])):
        place, name = rng.choice(
            [
                (rng.choice(files), "size_bytes"),
                (rng.choice(frames), "size_bytes"),
                (rng.choice(frames), "stored_bytes"),
            ]
        )
        now = place[name]
        place[name] = rng.choice([now + 1, now - 1, 0, -1, -now, 1, 2 * now, 2**20, 2**20 + 1, 2**63, 10**4299, 1.0])
    if rng.random() < 0.3:  # the same sum, cut in another place
        one, other = rng.choice(files), rng.choice(files)
        moved = rng.randrange(-3, 4)
        one["size_bytes"] += moved
        other["size_bytes"] -= moved
    return _forged(draft, rng)


def _forged_counts(rng: Random, corpus: Corpus) -> Case:
    """More, fewer or none of the files and frames, up to what fills the manifest's limit."""
    draft = corpus.draft(rng, signed=0.1)
    empty = {"path": "", "key": "", "size_bytes": 0, "sha256": digest(b"")}
    more = rng.choice([1, 100, 900, 1100, 2000])
    frame = {"stored_bytes": rng.choice([0, 1, 10]), "size_bytes": rng.choice([0, 1, MIB])}
    place, new = rng.choice(
        [
            ("files", []),
            ("frames", []),
            ("files", {}),
            ("files", draft.record["files"] + [{**empty, "path": f"more/{number}"} for number in range(more)]),
            ("files", draft.record["files"] * more),
            ("files", [{}] * (20 * more)),
            ("frames", draft.record["frames"] + [frame] * more),
            ("frames", draft.record["frames"] * more),
            ("frames", [[]] * (20 * more)),
        ]
    )
    draft.record[place] = new[:40_000] if isinstance(new, list) else new
    return _forged(draft, rng)


def _forged_digests(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng, signed=0.1)
    file, other = rng.choice(draft.record["files"]), rng.choice(draft.record["files"])
    now = file["sha256"]
    wrong = [now[:-1], now + "0", now.upper(), now + "\n", "٠" * 64, "", digest(b""), rng.randbytes(32).hex(), None]
    file[rng.choice(["sha256", "sha256", "sha256", "replaces"])] = rng.choice(
        [*wrong, other["sha256"], [now], int(now, 16)]
    )
    return _forged(draft, rng)


def _forged_keys(rng: Random, corpus: Corpus) -> Case:
    """For another model, or for none."""
    draft = corpus.draft(rng, signed=0.1)
    part = rng.choice([*draft.record["key"], "another_part"])
    draft.record["key"][part] = rng.choice(
        ["another", "", "../" + KEY.model_version, "\x1b[2J", "\ud800", "v" * 100_000, None, 1, [KEY.model_version], {}]
    )
    return _forged(draft, rng)


ODD_VALUES = [
    *(None, True, False, 0, -1, 1.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**400, 10**4299),
    *("", "1", "\0", "\ud800", "\x1b[2J\n" * 50, "x" * 3000, "x" * 200_000, "é" * 90_000, "𐀀" * 30_000),
    *([], {}, [1], [[]] * 500, {"a": 1}, {"path": "a"}, {"\x1b[2J" * 100: 1}, {str(n): n for n in range(3000)}),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of `value` and of everything in it."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inside in items:
        yield from places(inside, (*place, name))


def put_at(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at `place`."""
    if not place:
        return new
    value[place[0]] = put_at(value[place[0]], place[1:], new)
    return value


def _odd_values(rng: Random, corpus: Corpus) -> Case:
    """Anything anywhere in the manifest, or something missing or added."""
    draft = corpus.draft(rng, signed=0.05)
    place = rng.choice(list(places(draft.record))[: rng.choice([12, 10_000])])
    what = rng.randrange(4)
    if what == 0 and place:
        *folder, name = place
        inside: Any = draft.record
        for step in folder:
            inside = inside[step]
        del inside[name]
    elif what == 1 and isinstance(place[-1:], tuple):
        draft.record[rng.choice(["files", "frames"])].append(copy.deepcopy(rng.choice(ODD_VALUES)))
    else:
        draft.record = put_at(draft.record, place, copy.deepcopy(rng.choice(ODD_VALUES)))
    return _forged(draft, rng)


def json_tricks(rng: Random, most_bytes: int) -> str:
    """Text in the place of a value, legal JSON or not, that costs a parser as much as it can."""
    count = rng.choice([10, 300, 900, 990, 5000, 100_000])
    lists, objects = "[" * count + "]" * count, '{"a":' * count + "1" + "}" * count
    digits = rng.choice(["9", "-9", "0.", "1e", "0"]) + "9" * count
    many = "[" + ",".join([rng.choice(["[]", "{}", '""', '{"":0}', "null", "1.5", '"' + "𐀀" * 9 + '"'])] * count) + "]"
    many = many.replace('""', '"%d"') if rng.random() < 0.1 else many
    words = [
        "NaN",
        "-Infinity",
        "1e999",
        "-0",
        "1_0",
        "0x10",
        "'a'",
        "\\ud800",
        '"\\ud800"',
        '"\\u0000"',
        "//",
        "",
        "\0",
    ]
    strings = ['"' + "\\ud83d" * count + '"', '"' + "x" * count, '"' + "𐀀" * count + '"']
    text = rng.choice([lists, "[" * count, objects, digits, many, rng.choice(words), *strings])
    return text[:most_bytes] if len(text) > most_bytes else text


def _json_tricks(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng, signed=0.05)
    place = rng.choice([place for place in places(draft.record) if len(place) != 2][:40])
    record = put_at(draft.record, place, "THE PLACE")
    text = json.dumps(record).replace('"THE PLACE"', json_tricks(rng, 200_000))
    text = rng.choice(
        [text, text, text, text + text, text[:-1], text[:-1] + ',"files":[],"frames":[]}', "\ufeff" + text]
    )
    encoded = text.encode(rng.choice(["utf-8", "utf-8", "utf-8", "utf-16", "utf-32-le"]), "surrogatepass")
    case = _forged(draft, rng, encoded)
    try:
        draft.record = json.loads(encoded)
    except (ValueError, RecursionError):
        return case
    return Case(case.name, case.content, draft.stated if isinstance(draft.record, dict) else frozenset(), case.trusted)


def bombs(rng: Random) -> tuple[bytes, bytes]:
    """A frame, and the content that it claims to hold, which a manifest may claim as well."""
    claimed = rng.choice([1, 10, 100_000, MIB - 1, MIB])
    more = rng.choice([claimed + 1, 2 * claimed, 10 * MIB, 100 * MIB])
    content = bytes(claimed)
    make = rng.choice(
        [
            lambda: zstd_frame(*zeros(more), content_size=claimed),
            lambda: zstd_frame(*zeros(claimed), content_size=more),
            lambda: zstd_frame(*zeros(more), content_size=more),
            lambda: zstd_frame(*zeros(more), content_size=None, window=rng.choice([0, 80, 255])),
            lambda: zstd_frame(*zeros(claimed), content_size=None, window=80),
            lambda: zstd_frame(*zeros(claimed), content_size=claimed, window=rng.choice([0, 80, 136, 255])),
            lambda: zstd_frame(*zeros(claimed), content_size=claimed, dictionary=7),
            lambda: zstd_frame(*zeros(claimed)[:-1], content_size=claimed),
            lambda: zstd_frame(*[NOTHING] * rng.choice([1, 1000, 300_000]), *zeros(claimed), content_size=claimed),
            lambda: zstd_frame((3, claimed & 0xFFFF, b""), content_size=claimed),
            lambda: zstd_frame((RLE, 0x1FFFFF, b"\0"), content_size=claimed),
            lambda: zstd_frame((RAW, 0x1FFFFF, b"\0"), content_size=claimed),
            lambda: zstd_frame(*zeros(claimed), content_size=2**64 - rng.choice([1, 2, 3])),
            lambda: zstandard.compress(content) * 2,
            lambda: zstandard.compress(content) + rng.randbytes(9),
            lambda: zstandard.compress(content)[:-1],
            lambda: b"",
            lambda: struct.pack("<II", 0x184D2A5A, claimed) + content,
            lambda: struct.pack("<II", 0x184D2A5A, 2**32 - 1) + zstandard.compress(content),
            lambda: zstandard.ZstdCompressor(write_content_size=False).compress(content),
            lambda: zstandard.ZstdCompressor(dict_data=_dictionary()).compress(content),
            lambda: zstandard.ZstdCompressor(write_checksum=True).compress(content)[:-1] + b"!",
        ]
    )
    return make(), content


@cache
def _dictionary() -> zstandard.ZstdCompressionDict:
    return zstandard.train_dictionary(1024, [f"sample {number} of many samples".encode() for number in range(1000)])


def _frame_bombs(rng: Random, corpus: Corpus) -> Case:
    """One of many frames, or the only one, is not what the manifest says, and says more itself."""
    bomb, content = bombs(rng)
    draft = corpus.draft(rng, signed=0.05, frames=1)
    draft.record["files"].append({"path": "bomb", "key": "bomb", "size_bytes": len(content), "sha256": digest(content)})
    draft.record["frames"].append({"stored_bytes": len(bomb), "size_bytes": len(content)})
    draft.frames.append(bomb)
    copies = rng.choice([0, 0, 1, 3, 10])  # more than may be unpacked, if each were counted as little
    for number in range(copies):
        draft.record["files"].append({**draft.record["files"][-1], "path": f"bomb-{number}"})
        draft.record["frames"].append(draft.record["frames"][-1])
        draft.frames.append(bomb)
    return _forged(draft, rng)


def _manifest_bombs(rng: Random, corpus: Corpus) -> Case:
    """The manifest's own frame is one, or is what cannot be a manifest at a length that may be."""
    draft = corpus.draft(rng, signed=0.2)
    text = json.dumps(draft.record).encode()
    bomb, content = bombs(rng)
    if rng.random() < 0.5:
        trick = json_tricks(rng, 250_000).encode("utf-8", "surrogatepass")
        return Case(*draft.put_together(trick), frozenset(), draft.trusted)
    named = rng.choice([text, content])
    claim = rng.choice([len(content), len(text), LIMITS.manifest_bytes, 200 * MIB])
    if claim == 200 * MIB:
        bomb = zstd_frame(*zeros(claim), content_size=claim)
    _, packed = draft.put_together(text, stored=bomb, manifest_bytes=claim)
    return Case(name_of(named), packed, frozenset(), draft.trusted)


def _signatures(rng: Random, corpus: Corpus) -> Case:
    """Tampered, foreign, stripped, borrowed or too long."""
    draft = corpus.draft(rng, signed=1.0)
    text = json.dumps(draft.record).encode()
    ours, theirs = OURS.sign(text), THEIRS.sign(text)
    flipped = bytearray(ours)
    flipped[rng.randrange(96)] ^= 1 << rng.randrange(8)
    order = 2**252 + 27742317777372353535851937790883648493  # RFC 8032, section 5.1: s and s + order are one number
    s = int.from_bytes(ours[64:], "little") + order
    borrowed = corpus.draft(rng, signed=1.0).signature
    draft.signature = rng.choice(
        [
            b"",
            theirs,
            bytes(flipped),
            ours[:32] + theirs[32:],
            theirs[:32] + ours[32:],
            ours[:64] + s.to_bytes(32, "little"),
            ours[:32] + bytes(64),
            bytes(96),
            borrowed,
            ours[:-1],
            ours + b"\0",
            ours * 42,
            ours * 50,
            rng.randbytes(96),
        ]
    )
    return Case(*draft.put_together(text), frozenset(), draft.trusted)


def _other_names(rng: Random, corpus: Corpus) -> Case:
    draft = corpus.draft(rng)
    stem = draft.name.removesuffix(".pack")
    other = rng.choice([other.name for other in corpus.drafts if other.name != draft.name])
    spelled = [stem.upper() + ".pack", stem[:-1] + ".pack", stem, draft.name + "\n", "", "../" + draft.name]
    name = rng.choice([other, digest(draft.content) + ".pack", rng.randbytes(32).hex() + ".pack", *spelled])
    return Case(name, draft.content, frozenset(), draft.trusted)


def _random_bytes(rng: Random, corpus: Corpus) -> Case:
    noise = rng.randbytes(rng.choice([0, 1, 31, 32, 33, 300, 5000, 100_000]))
    header = assemble(noise, stored=noise, manifest_bytes=rng.choice([len(noise), 2, 1000]))
    frame = struct.pack("<I", 0xFD2FB528) + noise
    content = rng.choice([noise, header, assemble(b"{}", noise), assemble(noise, noise), assemble(b"", stored=frame)])
    return Case(name_of(noise), content)


KINDS: dict[str, Callable[[Random, Corpus], Case]] = {
    "flipped bits": _flipped_bits,
    "overwritten": _overwritten,
    "cut short": _cut,
    "extended": _extended,
    "bytes inserted or removed": _shifted,
    "frames moved, repeated or dropped": _moved_frames,
    "frames replaced": _replaced_frames,
    "spliced from two packs": _spliced,
    "forged header": _forged_header,
    "forged paths": _forged_paths,
    "links and other archives' fields": _forged_links,
    "forged sizes": _forged_sizes,
    "forged counts": _forged_counts,
    "forged digests": _forged_digests,
    "another key": _forged_keys,
    "odd values": _odd_values,
    "JSON tricks": _json_tricks,
    "bombs in frames": _frame_bombs,
    "bombs for a manifest": _manifest_bombs,
    "signatures": _signatures,
    "other names": _other_names,
    "random bytes": _random_bytes,
}


def make_case(kind: str, seed: int, number: int, corpus: Corpus) -> Case:
    """The same case for the same arguments, always."""
    return KINDS[kind](Random(f"{seed} {kind} {number}"), corpus)
