"""Hostile packs: a table of changes to a sound pack, and the words that each refusal must have.

The changes are made as an independent writer of the format would make them. The library's own writer makes only sound
packs.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard
from machines import write_files
from signing_keys import make_keys

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import FORMAT_VERSION
from compile_cache.storage.pack.format import HEADER_BYTES, Head, Source, runs, unpack
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer
from compile_cache.storage.rules import Rules, read_stored_head
from compile_cache.storage.stores.base import StoredObject
from compile_cache.storage.stores.transfer import open_part

MIB = 1 << 20
KEY = CacheKey("environment", "model", "version")
LIMITS = Limits(size_bytes=8 * MIB, manifest_bytes=256 << 10)

Record = dict[str, Any]


# An independent writer.


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def name_of(pack: bytes) -> str:
    """What a pack is named: by its header and its stored manifest, which are also what is signed."""
    return digest(pack[: HEADER_BYTES + int.from_bytes(pack[20:24], "little")]) + ".pack"


def encode(record: Any) -> bytes:
    """Canonical JSON, if the record's names are in their order."""
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def record_of(*files: tuple[str, bytes]) -> Record:
    """The manifest of a sound pack that has a frame for each file, as JSON values."""
    return {
        "key": {"environment": KEY.environment, "model_name": KEY.model_name, "model_version": KEY.model_version},
        "frames": [
            {
                "stored_bytes": len(zstandard.compress(content)),
                "files": [
                    {"path": path, "key": f"key of {path}", "size_bytes": len(content), "sha256": digest(content)}
                ],
            }
            for path, content in files
        ],
        "creator": "the test",
        "created_s": 1.0,
    }


def assemble(
    manifest: bytes,
    frames: bytes = b"",
    *,
    stored: bytes | None = None,
    sign: Callable[[bytes], bytes] = lambda _: b"",
    **forged: Any,
) -> bytes:
    """A pack with any part of its head forged. The signature's length is told twice: in the header, and before it.
    `sign` makes the signature, whose length it must not change."""
    stored = zstandard.compress(manifest) if stored is None else stored
    parts = {"magic": 0x184D2A50, "header_bytes": 24, "identity": b"compcach", "version": FORMAT_VERSION}
    parts |= {"stored_bytes": len(stored), "manifest_bytes": len(manifest), "signature_bytes": len(sign(b""))}
    header = struct.pack("<II8sIIII", *({**parts, **forged}[name] for name in parts))
    signature = sign(header + stored)
    before = {"signature_magic": 0x184D2A51, "signature_length": len(signature)}
    return header + stored + struct.pack("<II", *({**before, **forged}[name] for name in before)) + signature + frames


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

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        self.requests.append((start, size_bytes))
        return self.content[start : start + size_bytes]


def restore(
    name: str, content: bytes, folder: Path | None, limits: Limits = LIMITS, trusted: frozenset[str] = frozenset()
) -> Head:
    """What a boot does with a pack that is stored as `name` below `KEY`."""
    store = OneObject(content)
    entry = StoredObject(KEY.prefix + name, len(content), 0.0)
    head = read_stored_head(store, entry, Rules(limits, trusted))
    for run in runs(head):
        unpack(open_part(store, name, run.start, run.end), run.files, folder)
    return head


def write_tree(folder: Path, files: Mapping[str, bytes]) -> list[Source]:
    write_files(folder, files)
    return [Source(folder / path, path, f"key of {path}") for path in files]


# Sound packs, to be changed.
OURS, THEIRS = (Signer(make_keys(name)[0]) for name in ("ours", "theirs"))


@dataclass
class Draft:
    """A sound pack taken apart. A change sets any part, and `put_together` makes the rest fit."""

    record: Record
    frames: list[bytes]
    is_signed: bool = False
    text: bytes | None = None
    """Instead of the record's JSON."""
    head: dict[str, Any] = field(default_factory=dict)
    """Arguments of `assemble`."""
    sign: Callable[[bytes], bytes] | None = None
    """Makes the signature, instead of our key."""
    damage: Callable[[bytes], bytes] = bytes
    """Changes the finished pack."""
    name: str | None = None

    @property
    def trusted(self) -> tuple[str, ...]:
        """The keys of the host that the pack is meant for."""
        return (OURS.public_key,) if self.is_signed else ()

    def put_together(self) -> tuple[str, bytes]:
        """Name and content."""
        text = encode(self.record) if self.text is None else self.text
        sign = self.sign or (OURS.sign if self.is_signed else lambda _: b"")
        content = assemble(text, b"".join(self.frames), **{"sign": sign, **self.head})
        return self.name or name_of(content), self.damage(content)


def small_draft(*files: tuple[str, bytes], is_signed: bool = False) -> Draft:
    """A pack of few bytes."""
    files = files or (("a/file", b"content"), ("b", b"more"))
    frames = [zstandard.compress(content) for _, content in files]
    return Draft(record_of(*files), frames, is_signed)


# The table.

Change = Callable[[Draft], object]


@dataclass(frozen=True)
class Hostile:
    """A change that must lead to a refusal with `words`, a regular expression. `is_signed`: our key signed the pack,
    and the host trusts no other."""

    name: str
    change: Change
    words: str
    is_signed: bool = False


def at(*place: Any) -> Callable[[Any], Change]:
    """A change of the record's value at `place`."""
    return lambda value: lambda draft: put_at(draft.record, place, value)


def put_at(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """`value` with `new` at `place`."""
    if not place:
        return new
    value[place[0]] = put_at(value[place[0]] if len(place) > 1 else None, place[1:], new)
    return value


def setting(**parts: Any) -> Change:
    """A change of parts of a draft."""
    return lambda draft: vars(draft).update(parts)


def head(**forged: Any) -> Change:
    return lambda draft: draft.head.update(forged)


def damaged(damage: Callable[[bytes], bytes]) -> Change:
    return setting(damage=damage)


def written(rewrite: Callable[[bytes], bytes]) -> Change:
    """A change of the manifest's text, which is then named and signed anew."""
    return lambda draft: setattr(draft, "text", rewrite(encode(draft.record)))


def of_zeros(count: int, stated: int = 10, **claims: Any) -> Change:
    """A pack of one file of zeros, as many as stated, with a frame of `count`."""
    return framed(zstd_frame(*zeros(count), **{"content_size": stated, **claims}), bytes(stated))


def framed(frame: bytes, content: bytes = b"content") -> Change:
    """A pack of one file of `content`, with `frame` for its frame."""

    def change(draft: Draft) -> None:
        draft.record, draft.frames = record_of(("a", content)), [frame]
        draft.record["frames"][0]["stored_bytes"] = len(frame)

    return change


def hostile_paths(outside: str = "/outside") -> list[str]:
    """No one of them may ever be written."""
    climbing = ["..", "../escaped", "../" * 9 + "escaped", "a/../../escaped", "a/..", "./a", ".", "a/.", "a//b", "a/"]
    absolute = ["/", "//", "/escaped", f"{outside}/escaped", f"a/{outside}/escaped", "//host/escaped", "~/../escaped"]
    foreign = ["a\\b", "..\\escaped", "C:\\escaped", "\\\\host\\escaped"]
    unprintable = ["", "a\0b", "\0", "a\nb", "a\rb", "a\x1b[2J", "a\x7f", "a\u202eb", "a\xa0b"]
    # Linux allows 255 bytes a part, and 4096 in all (limits.h). An OSError would end the whole restore.
    long = ["x" * 256, "f/" + "x" * 256, "é" * 128, "é" * 128 + "/f", "/".join(["𐀀" * 63] * 16), "y/" * 600 + "z"]
    return climbing + absolute + foreign + unprintable + [*long, "d/" * 32 + "f"]


def _two_files(paths: tuple[str, str], contents: tuple[bytes, bytes], frames: tuple[bytes, bytes]) -> Change:
    return lambda draft: vars(draft).update(
        record=record_of(*zip(paths, contents, strict=True)), frames=[zstandard.compress(frame) for frame in frames]
    )


def _malleable(signature: bytes) -> bytes:
    """The same signature to a careless reader: s and s + order are one number (RFC 8032, section 5.1)."""
    order = 2**252 + 27742317777372353535851937790883648493
    return signature[:64] + (int.from_bytes(signature[64:], "little") + order).to_bytes(32, "little")


# An int of 4300 digits can be read. A sum of two has too many for a message (sys.set_int_max_str_digits).
_NO_COUNTS = [True, -1, 1.0, "1", None, [], {}, 2**63, 10**400, float("nan"), float("inf"), 10**4300 - 1]
_UNPRINTABLE = ["a\nb", "\x1b[2J", "\0", "a\u202eb"]
_UNREADABLE = "manifest cannot be read: "
_NO_LINE = "is not a line of at most"
_FILE, _OTHER = ("frames", 0, "files", 0), ("frames", 1, "files", 0)

TABLE = [
    # The whole object.
    Hostile("another name", setting(name="0" * 64 + ".pack"), "does not match its name"),
    Hostile("a byte more", damaged(lambda pack: pack + b"\0"), "bytes, but its manifest describes"),
    Hostile("a byte less", damaged(lambda pack: pack[:-1]), "bytes, but its manifest describes"),
    *(Hostile(f"{n} bytes", damaged(lambda pack, n=n: pack[:n]), f"ends after {n} bytes") for n in (0, 1, 31)),
    *(
        Hostile(f"for another {part}", at("key", part)("another"), "it is for v3/.*another")
        for part in ("environment", "model_name", "model_version")
    ),
    # The header.
    Hostile("a newer format", head(version=4), "has pack format 4; .* reads 3"),
    *(
        Hostile(f"begins with {forged}", head(**forged), "does not begin like a pack")
        for forged in ({"magic": 0xFD2FB528}, {"magic": 0x184D2A51}, {"header_bytes": 25}, {"identity": b"compcash"})
    ),
    *(
        Hostile(f"{claim} of {size}", head(**{claim: size}), r"claims more than the 262144 bytes allowed|not 96")
        for claim in ("stored_bytes", "manifest_bytes", "signature_bytes")
        for size in ((256 << 10) + 1, 0xFFFFFFFF)
    ),
    Hostile("a signature of 97 bytes", head(signature_bytes=97), "its signature has 97 bytes, not 96"),
    *(
        Hostile(f"a signature with {forged}", head(**forged), "signature is not where it should be")
        for forged in ({"signature_magic": 0x184D2A50}, {"signature_magic": 0xFD2FB528}, {"signature_length": 1})
    ),
    # The manifest's frame.
    *(
        Hostile(f"a manifest in {what}", head(stored=stored, manifest_bytes=10), "manifest is (damaged|not 10 bytes)")
        for what, stored in (
            ("a bomb", zstd_frame(*zeros(100 * MIB), content_size=100 * MIB)),
            ("an empty frame", zstandard.compress(b"")),
            ("a skippable frame", struct.pack("<II", 0x184D2A50, 10) + b"0123456789"),
            ("a frame longer than it states", zstd_frame(*zeros(100 * MIB), content_size=10)),
        )
    ),
    # The manifest's text.
    *(
        Hostile(f"the text {text[:20]!r}", setting(text=text), r"manifest (cannot be read|has a value)")
        for text in (
            *(b"", b"\xff", b"null", b"1", b'""', b"[]", b"[1]", b"{}", b"NaN", b"{", b"\xef\xbb\xbf{}", b"{}{}"),
            *(b"[" * 100_000, b'{"a":' * 20_000, b'"' + b"x" * 100_000 + b'"', b"9" * 100_000, b" " * 100_000),
            *('{"a":1}'.encode(codec) for codec in ("utf-16", "utf-32")),
        )
    ),
    *(
        Hostile(f"without {name}", lambda draft, name=name: draft.record.pop(name), f"{_UNREADABLE}.*{name}")
        for name in ("key", "frames", "creator", "created_s")
    ),
    *(
        Hostile(f"an unknown field at {place}", at(*place, "linkname")("/etc/passwd"), f"{_UNREADABLE}.*linkname")
        for place in ((), _FILE, ("frames", 0))
    ),
    Hostile("half a pair", written(lambda text: text.replace(b'"the', b'"\\ud800')), _UNREADABLE),
    # Sizes and numbers.
    *(
        Hostile(f"{place[-1]} {value!a:.9}", at(*place)(value), r"\$\.frames\[0\]|JSON|has a value of")
        for place in ((*_FILE, "size_bytes"), ("frames", 0, "stored_bytes"))
        for value in _NO_COUNTS
    ),
    *(
        Hostile(f"a file of {size} bytes", at(*_OTHER, "size_bytes")(size), "its file 'b' differs from the manifest")
        for size in (0, 3, 5)
    ),
    Hostile("a frame without files", at("frames", 1, "files")([]), "its frames have more than its files"),
    Hostile("a frame too short", at("frames", 0, "stored_bytes")(1), "bytes, but its manifest describes"),
    Hostile(
        "too many frames",
        lambda draft: draft.record["frames"].extend([{"stored_bytes": 9, "files": []}] * 505),
        "bytes, but its manifest describes",
    ),
    Hostile("too many bytes", at(*_FILE, "size_bytes")(8 * MIB), "unpacks to 8388612 bytes; 8388608 are allowed"),
    *(
        Hostile(f"made at {value!a:.9}", at("created_s")(value), _UNREADABLE)
        for value in (float("nan"), float("inf"), -1.0, 1e300, 253402300800.0, 10**400, "1", None, [], {})
    ),
    # Texts.
    *(
        Hostile(f"{name} {value!a:.9}", at(*place, name)(value), _UNREADABLE)
        for place, name in (
            *((_FILE, name) for name in ("path", "key", "sha256")),
            *((("key",), name) for name in ("environment", "model_name", "model_version")),
            ((), "creator"),
        )
        for value in (1, None, True, [], {}, "\ud800")
    ),
    *(
        Hostile(f"sha256 {value!a:.9}", at(*_FILE, "sha256")(value), rf"{_UNREADABLE}.*\.files\[0\]\.sha256")
        for value in ("", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "٠" * 64, " " + "0" * 63)
    ),
    *(
        Hostile(f"{'.'.join(map(str, place))} {value!a:.9}", at(*place)(value), _NO_LINE)
        for place, long in (
            ((*_FILE, "key"), ["k" * 2049, "é" * 1025]),
            ((*_FILE, "owner"), ["r" * 1025]),
            (("creator",), ["c" * 201]),
            *((("key", part), ["k" * 256]) for part in ("environment", "model_name", "model_version")),
        )
        for value in [*_UNPRINTABLE, *long]
    ),
    *(
        Hostile(f"a value of 200 kB at {place}", at(*place)(value), f"{_NO_LINE}|not a plain path|{_UNREADABLE}")
        for place in (("creator",), (*_FILE, "path"), (*_FILE, "x"), ("unknown",))
        for value in ("x" * 200_000, [[]] * 60_000)
    ),
    *(
        Hostile(f"unprintable field at {place}", at(*place)(1), _UNREADABLE)
        for place in (("\x1b[2J" * 100,), (*_FILE, "\x1b[2J\n" * 100), ("frames", 0, "\x1b" * 300))
    ),
    # Paths.
    *(
        Hostile(f"path {path!a:.20}", at(*_OTHER, "path")(path), "is not a plain path inside the cache directory")
        for path in hostile_paths()
    ),
    *(
        Hostile(f"paths {one!a} and {other!a}", _two_files((one, other), (b"one", b"two"), (b"one", b"two")), words)
        for words, pairs in (
            ("occurs twice", (("same", "same"), ("a/Kernel.so", "a/kernel.SO"), ("straße", "strasse"))),
            ("is a file and a folder at once", (("a", "a/b"), ("a/b", "a"), ("x/a", "x/A/b/c"))),
        )
        for one, other in pairs
    ),
    # Contents.
    Hostile("another digest", at(*_OTHER, "sha256")("0" * 64), "its file 'b' differs from the manifest"),
    *(
        Hostile(what, _two_files(("a", "b"), (b"one", b"two"), frames), "its file 'a' differs from the manifest")
        for what, frames in (("another content", (b"0ne", b"two")), ("swapped frames", (b"two", b"one")))
    ),
    Hostile(
        "files cut in another place",
        lambda draft: [at(*place, "size_bytes")(size)(draft) for place, size in ((_FILE, 8), (_OTHER, 3))],
        "its file 'a/file' differs from the manifest",
    ),
    Hostile(
        "an empty file with a digest",
        lambda draft: (files := draft.record["frames"][0]["files"]).append({**files[0], "path": "e", "size_bytes": 0}),
        "its file 'e' differs from the manifest",
    ),
    # Frames.
    *(
        Hostile(f"a frame of {size} and {more} bytes", of_zeros(size + more, size), "frame is damaged")
        for size in (10, MIB)
        for more in (1, MIB, 1 << 30)
    ),
    Hostile("a frame that ends early", of_zeros(9), "frame is "),
    *(
        Hostile(f"a frame that states {size}", of_zeros(10, content_size=size), "frame is ")
        for size in (0, 9, 11, MIB, 1 << 40, 2**64 - 3, 2**64 - 2, 2**64 - 1)
    ),
    *(
        Hostile(f"a window of {window}", of_zeros(10, content_size=None, window=window), "frame is ")
        for window in (136, 255)
    ),
    *(
        Hostile(f"a frame with {what}", framed(frame), words)
        for what, frame, words in (
            ("a second frame", zstandard.compress(b"content") + zstandard.compress(b"more"), "more than its files"),
            ("junk", zstandard.compress(b"content") + b"junk", "frame is damaged"),
            ("skippable content", struct.pack("<II", 0x184D2A50, 7) + b"content", "differs from the manifest"),
            ("its end missing", zstandard.compress(b"content")[:-1], "differs from the manifest"),
            ("a reserved block", zstd_frame((3, 7, b"content"), content_size=7), "frame is damaged"),
            ("a block too large", zstd_frame((RAW, 0x1FFFFF, b"content"), content_size=7), "frame is damaged"),
            ("a repetition too long", zstd_frame((RLE, 0x1FFFFF, b"c"), content_size=7), "frame is damaged"),
            ("a dictionary", zstd_frame((RAW, 7, b"content"), content_size=7, dictionary=7), "frame is damaged"),
            ("no zstd", b"content", "frame is damaged"),
            ("a wrong checksum", zstandard.ZstdCompressor(write_checksum=True).compress(b"content")[:-1] + b"!", "dam"),
        )
    ),
    # Signatures.
    *(
        Hostile(f"signature: {what}", setting(sign=sign), words, is_signed=True)
        for what, sign, words in (
            ("none", lambda text: b"", "is not signed"),
            ("foreign", THEIRS.sign, "signed by public-ed25519:.*not trusted"),
            ("foreign, in our name", lambda text: OURS.sign(text)[:32] + THEIRS.sign(text)[32:], "does not match"),
            ("ours, in a foreign name", lambda text: THEIRS.sign(text)[:32] + OURS.sign(text)[32:], "not trusted"),
            ("of another manifest", lambda text: OURS.sign(text + b" "), "does not match its manifest"),
            ("cut short", lambda text: OURS.sign(text)[:-1], "has 95 bytes, not 96"),
            ("twice", lambda text: OURS.sign(text) * 2, "has 192 bytes, not 96"),
            ("42 times", lambda text: OURS.sign(text) * 42, "has 4032 bytes, not 96"),
            ("zeros", lambda text: OURS.sign(text)[:32] + bytes(64), "does not match"),
            ("the same number, written otherwise", lambda text: _malleable(OURS.sign(text)), "does not match"),
        )
    ),
    Hostile("signed, and wrong", at(*_FILE, "path")("../a"), "is not a plain path", is_signed=True),
    # Whoever is not trusted does not get as far as the parser.
    Hostile("foreign, and hard to read", setting(text=b"[" * 10_000, sign=THEIRS.sign), "not trusted", is_signed=True),
]  # fmt: skip


# Frames that are odd, but have just the content of their file. The digest alone decides.
ODD_FRAMES = {
    "a skippable frame before": struct.pack("<II", 0x184D2A50, 0) + zstandard.compress(b"content"),
    "its last block cut": zstd_frame((RAW, 7, b"content"), NOTHING, content_size=7)[:-1],
    "padding": zstd_frame(*[NOTHING] * 400_000, (RAW, 7, b"content"), content_size=7),
    "a window of 1 KiB": zstd_frame((RAW, 7, b"content"), content_size=None, window=0),
}


# Values for a manifest.

ODD_VALUES = [
    *(None, True, False, 0, -1, 1.0, -0.0, 1.5, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**400, 10**4299),
    *("", "1", "\0", "\ud800", "\x1b[2J\n" * 50, "x" * 3000, "x" * 200_000, "é" * 90_000, "𐀀" * 30_000, "../a"),
    *([], {}, [1], [[]] * 500, {"a": 1}, {"path": "a"}, {"\x1b[2J" * 100: 1}, {str(n): n for n in range(3000)}),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of `value` and of everything in it."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inside in items:
        yield from places(inside, (*place, name))
