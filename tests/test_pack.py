"""Packs: what goes in comes out, and a pack that is damaged, foreign or hostile is refused before it does harm."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_cache.errors import PackError
from compile_cache.key import CacheKey
from compile_cache.pack import (
    HEADER_BYTES,
    Limits,
    Manifest,
    Pack,
    PackFile,
    Source,
    check_paths,
    read_manifest,
    sha256_of,
    unpack,
    write_pack,
)

MIB = 1 << 20
KEY = CacheKey("environment", "model", "version")
LIMITS = Limits(size_bytes=64 * MIB, files=1000, manifest_bytes=4 * MIB, frame_bytes=16 * MIB)
SMALL = {"fxgraph/ab/abc/content": b"a graph", "x.so": b"\0" * 1000, "empty": b""}

paths = st.lists(st.sampled_from("abcXYZ019_-é"), min_size=1, max_size=8).map("".join)
trees = st.dictionaries(paths.map(str.casefold), st.binary(max_size=3000), max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def write_tree(folder: Path, files: dict[str, bytes]) -> list[Source]:
    sources = []
    for path, content in files.items():
        local = folder / path
        local.parent.mkdir(parents=True, exist_ok=True)
        local.write_bytes(content)
        sources.append(Source(local, path, f"key of {path}"))
    return sources


def read_tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def pack_up(folder: Path, files: dict[str, bytes]) -> Pack:
    (folder / "out").mkdir()
    return write_pack(folder / "out", KEY, write_tree(folder / "in", files), "the test")


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for one hypothesis example."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def unpack_bytes(folder: Path, content: bytes, executor: ThreadPoolExecutor, limits: Limits = LIMITS) -> Manifest:
    """Unpack `content`, under its right name, into `folder`/inside. Fails if anything is written outside of that."""
    pack = folder / f"{hashlib.sha256(content).hexdigest()}.pack"
    pack.write_bytes(content)
    inside = folder / "inside"
    inside.mkdir()
    before = {path for path in folder.rglob("*") if inside not in path.parents}
    try:
        return unpack(pack, inside, KEY, limits, executor)
    finally:
        assert {path for path in folder.rglob("*") if inside not in path.parents} == before


def manifest_record(*files: tuple[str, bytes]) -> dict[str, Any]:
    """The manifest of an honest pack with a frame for each file, as JSON values."""
    return {
        "key": {"environment": KEY.environment, "model_name": KEY.model_name, "model_version": KEY.model_version},
        "files": [
            {
                "path": path,
                "key": path,
                "size_bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
                "frame": number,
                "offset": 0,
                "replaces": None,
            }
            for number, (path, content) in enumerate(files)
        ],
        "frames": [
            {"stored_bytes": len(zstandard.compress(content)), "size_bytes": len(content)} for _, content in files
        ],
        "creator": "the test",
        "created_s": 1.0,
    }


def assemble(
    manifest: bytes,
    frames: bytes,
    *,
    stored: bytes | None = None,
    magic: int = 0x184D2A50,
    header_bytes: int = 24,
    identity: bytes = b"compcach",
    version: int = 1,
    stored_bytes: int | None = None,
    manifest_bytes: int | None = None,
    signature_bytes: int = 0,
) -> bytes:
    """A pack, of an independent writer, with any part of its header forged."""
    stored = zstandard.compress(manifest) if stored is None else stored
    header = struct.pack(
        "<II8sIIII",
        magic,
        header_bytes,
        identity,
        version,
        len(stored) if stored_bytes is None else stored_bytes,
        len(manifest) if manifest_bytes is None else manifest_bytes,
        signature_bytes,
    )
    return header + stored + struct.pack("<II", 0x184D2A51, 0) + frames


def forge(change: Callable[[dict[str, Any]], None], *files: tuple[str, bytes]) -> bytes:
    """An honest pack of `files` but for `change` to its manifest."""
    files = files or (("a/file", b"content"), ("b", b"more"))
    record = manifest_record(*files)
    change(record)
    return assemble(json.dumps(record).encode(), b"".join(zstandard.compress(content) for _, content in files))


# What goes in comes out.


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"empty": b""}, id="an empty file"),
        pytest.param({"a": b"", "b": b"", "c": b"x"}, id="empty files"),
        pytest.param(SMALL, id="small files"),
        pytest.param({"large": bytes(range(256)) * 4096 * 3}, id="one of 3 MiB"),
        pytest.param({"a": b"a", "large": b"L" * (MIB + 1), "z": b"z"}, id="a large one between small ones"),
        pytest.param({"exactly": b"x" * MIB, "after": b"y"}, id="exactly one frame"),
        pytest.param({f"{n:03}": bytes([n]) * 50_000 for n in range(100)}, id="many in several frames"),
        pytest.param({"deep/" * 20 + "file": b"x", "ünï/cödé": b"y"}, id="deep and not ASCII"),
    ],
)
def test_files_come_out_as_they_went_in(tmp_path, executor, files):
    pack = pack_up(tmp_path, files)
    unpack(pack.local, tmp_path / "unpacked", KEY, LIMITS, executor)
    assert read_tree(tmp_path / "unpacked") == files


@given(trees)
@settings(max_examples=50)
def test_any_files_come_out_as_they_went_in(executor, files):
    with new_folder() as folder:
        pack = pack_up(folder, files)
        manifest = unpack(pack.local, folder / "unpacked", KEY, LIMITS, executor)
        assert read_tree(folder / "unpacked") == files
        assert manifest == pack.manifest
        assert manifest.size_bytes == sum(map(len, files.values()))


def test_a_pack_is_named_by_its_digest_and_knows_its_size(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    content = pack.local.read_bytes()
    assert pack.local.name == pack.name == f"{hashlib.sha256(content).hexdigest()}.pack"
    assert sha256_of(pack.local) == pack.sha256
    assert pack.stored_bytes == len(content)


def test_nothing_but_the_pack_is_left_in_the_folder(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    assert list(pack.local.parent.iterdir()) == [pack.local]


def test_the_manifest_says_what_is_in_a_pack_for_whom_and_by_whom(tmp_path):
    source, *_ = write_tree(tmp_path, {"path": b"content"})
    manifest = write_pack(tmp_path, KEY, [replace(source, replaces="0" * 64)], "the creator").manifest
    digest = hashlib.sha256(b"content").hexdigest()
    assert manifest.files == (PackFile("path", "key of path", 7, digest, 0, 0, "0" * 64),)
    assert (manifest.key, manifest.creator) == (KEY, "the creator")


def test_a_source_that_has_vanished_is_left_out(tmp_path, executor):
    sources = write_tree(tmp_path / "in", {"a": b"a", "gone": b"g", "z": b"z"})
    (tmp_path / "in" / "gone").unlink()
    pack = write_pack(tmp_path, KEY, sources, "")
    unpack(pack.local, tmp_path / "unpacked", KEY, LIMITS, executor)
    assert read_tree(tmp_path / "unpacked") == {"a": b"a", "z": b"z"}


def test_a_pack_is_one_valid_zstd_stream_of_manifest_and_files(tmp_path):
    files = {"a": b"first", "large": b"L" * (MIB + 1), "z": b"last"}
    pack = pack_up(tmp_path, files)
    with pack.local.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        assert stream.read() == pack.manifest.to_json() + b"".join(files.values())


def test_each_frame_is_readable_by_itself_where_the_manifest_says(tmp_path):
    files = {"a": b"first", "large": b"L" * (MIB + 1), "z": b"last"}
    pack = pack_up(tmp_path, files)
    content = pack.local.read_bytes()
    _, start = read_manifest(io.BytesIO(content), LIMITS)
    unpacked = []
    for frame in pack.manifest.frames:
        unpacked.append(zstandard.decompress(content[start : start + frame.stored_bytes]))
        start += frame.stored_bytes
    assert [len(part) for part in unpacked] == [frame.size_bytes for frame in pack.manifest.frames] == [5, MIB + 1, 4]
    assert b"".join(unpacked) == b"".join(files.values())
    assert start == len(content)


def test_the_manifest_is_readable_from_the_first_bytes_alone(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    content = pack.local.read_bytes()
    manifest, start = read_manifest(io.BytesIO(content), LIMITS)
    assert read_manifest(io.BytesIO(content[:start]), LIMITS) == (manifest, start)
    assert manifest == pack.manifest
    assert start < len(content)


def test_a_pack_of_another_writer_is_read(tmp_path, executor):
    """The layout is what the module says it is."""
    manifest = unpack_bytes(tmp_path, forge(lambda record: None), executor)
    assert read_tree(tmp_path / "inside") == {"a/file": b"content", "b": b"more"}
    assert manifest.creator == "the test"


def test_a_signature_is_stepped_over(tmp_path, executor):
    record = json.dumps(manifest_record(("a", b"content"))).encode()
    signed = assemble(record, b"s" * 64 + zstandard.compress(b"content"), signature_bytes=64)
    unpack_bytes(tmp_path, signed, executor)
    assert read_tree(tmp_path / "inside") == {"a": b"content"}


# A damaged pack.


def refused(folder: Path, content: bytes, executor: ThreadPoolExecutor, reason: str, limits: Limits = LIMITS) -> None:
    with pytest.raises(PackError, match=reason):
        unpack_bytes(folder, content, executor, limits)


def test_a_wrong_name_is_refused(tmp_path, executor):
    pack = pack_up(tmp_path, SMALL)
    renamed = pack.local.rename(tmp_path / f"{'0' * 64}.pack")
    with pytest.raises(PackError, match="not what its name says"):
        unpack(renamed, tmp_path / "inside", KEY, LIMITS, executor)
    assert not (tmp_path / "inside").exists()


def test_a_pack_cut_short_anywhere_is_refused_under_its_old_name_and_under_its_new_one(tmp_path, executor):
    pack = pack_up(tmp_path, {"a": b"first", "b": b"second"})
    content = pack.local.read_bytes()
    for length in range(0, len(content), 3):
        pack.local.write_bytes(content[:length])
        with pytest.raises(PackError, match="not what its name says"):
            unpack(pack.local, tmp_path / "inside", KEY, LIMITS, executor)
        with new_folder() as folder, pytest.raises(PackError, match=r"\w"):
            unpack_bytes(folder, content[:length], executor)


def test_a_longer_pack_is_refused(tmp_path, executor):
    content = pack_up(tmp_path, SMALL).local.read_bytes()
    refused(tmp_path, content + b"\0", executor, "not what its frames add up to")


@pytest.fixture(scope="module")
def honest_pack() -> bytes:
    with new_folder() as folder:
        return pack_up(folder, SMALL).local.read_bytes()


@given(st.data())
@settings(max_examples=300)
def test_a_flipped_bit_is_refused_under_the_old_name(executor, honest_pack, data):
    flipped = flip(honest_pack, data.draw(st.integers(0, 8 * len(honest_pack) - 1)))
    with new_folder() as folder:
        pack = folder / f"{hashlib.sha256(honest_pack).hexdigest()}.pack"
        pack.write_bytes(flipped)
        with pytest.raises(PackError, match="not what its name says"):
            unpack(pack, folder / "inside", KEY, LIMITS, executor)


@given(st.data())
@settings(max_examples=300)
def test_a_flipped_bit_under_the_new_name_is_refused_or_gives_what_the_manifest_says(executor, honest_pack, data):
    flipped = flip(honest_pack, data.draw(st.integers(0, 8 * len(honest_pack) - 1)))
    with new_folder() as folder:
        try:
            manifest = unpack_bytes(folder, flipped, executor)
        except PackError:
            return
        stated = {file.path: file.sha256 for file in manifest.files}
        found = {path: hashlib.sha256(content).hexdigest() for path, content in read_tree(folder / "inside").items()}
        assert found == stated


def flip(content: bytes, bit: int) -> bytes:
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@given(st.binary(max_size=200))
def test_anything_at_all_is_refused(executor, content):
    with new_folder() as folder, pytest.raises(PackError, match=r"\w"):
        unpack_bytes(folder, content, executor)


@given(st.binary(max_size=200))
def test_any_manifest_that_is_no_record_of_one_is_refused(executor, content):
    with new_folder() as folder, pytest.raises(PackError, match=r"\w"):
        unpack_bytes(folder, assemble(content, b""), executor)


# A foreign pack.


@pytest.mark.parametrize("part", ["environment", "model_name", "model_version"])
def test_a_pack_for_another_key_is_refused_with_both(tmp_path, executor, part):
    content = forge(lambda record: record["key"].update({part: "another"}))
    refused(tmp_path, content, executor, "it is for v1/.*another.*, not for v1/environment/model/version/")


def test_a_newer_pack_format_is_refused_by_its_number(tmp_path, executor):
    refused(tmp_path, assemble(b"{}", b"", version=2), executor, "has pack format 2, and .* reads 1")


@pytest.mark.parametrize(
    "header",
    [{"magic": 0xFD2FB528}, {"magic": 0x184D2A51}, {"header_bytes": 25}, {"identity": b"compcash"}],
    ids=str,
)
def test_what_begins_otherwise_is_refused(tmp_path, executor, header):
    refused(tmp_path, assemble(b"{}", b"", **header), executor, "does not begin as a pack does")


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_what_ends_inside_the_header_is_refused(tmp_path, executor, length):
    refused(tmp_path, assemble(b"{}", b"")[:length], executor, f"ends after {length} bytes")


# A hostile pack: too large.


@pytest.mark.parametrize("claim", ["stored_bytes", "manifest_bytes", "signature_bytes"])
def test_a_header_that_claims_too_much_is_refused(tmp_path, executor, claim):
    content = assemble(b"{}", b"", **{claim: 0xFFFFFFFF})
    refused(tmp_path, content, executor, "claims more than the 4194304 bytes allowed")


def test_a_manifest_that_is_not_as_long_as_stated_is_not_unpacked(tmp_path, executor):
    bomb = zstandard.compress(b"0" * 100 * MIB)
    content = assemble(b"", b"", stored=bomb, manifest_bytes=10)
    refused(tmp_path, content, executor, "manifest is not 10 bytes long, as stated")


def test_a_manifest_without_a_stated_length_is_not_unpacked(tmp_path, executor):
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b"{}")
    refused(tmp_path, assemble(b"{}", b"", stored=unsized), executor, "manifest is not 2 bytes long, as stated")


def test_a_manifest_nested_without_end_is_refused(tmp_path, executor):
    refused(tmp_path, assemble(b"[" * 1_000_000, b""), executor, "manifest cannot be read")


def test_more_files_than_allowed_are_refused(tmp_path, executor):
    content = forge(lambda record: None)
    refused(tmp_path, content, executor, "names 2 files, and 1 are allowed", replace(LIMITS, files=1))


def test_more_bytes_than_allowed_are_refused(tmp_path, executor):
    content = forge(lambda record: None)
    refused(tmp_path, content, executor, "unpacks to 11 bytes, and 10 are allowed", replace(LIMITS, size_bytes=10))


def test_one_frame_unpacked_as_many_files_counts_as_many(tmp_path, executor):
    def many(record: dict[str, Any]) -> None:
        record["files"] = [{**record["files"][0], "path": f"{number}"} for number in range(100)]

    content = forge(many, ("a", b"x" * MIB))
    refused(tmp_path, content, executor, "unpacks to 104857600 bytes")


def test_frames_that_no_file_uses_count_as_well(tmp_path, executor):
    def no_files(record: dict[str, Any]) -> None:
        record["files"] = []

    content = forge(no_files, ("a", b"x" * 100))
    refused(tmp_path, content, executor, "allowed", replace(LIMITS, size_bytes=99))


def test_a_frame_that_claims_too_much_is_refused(tmp_path, executor):
    content = forge(lambda record: record["frames"][0].update(size_bytes=16 * MIB + 1))
    refused(tmp_path, content, executor, "one of its frames claims 16777217 bytes, and 16777216 are allowed")


@pytest.mark.parametrize("size_bytes", [0, 1, 6, 8, 10 * MIB])
def test_a_frame_of_another_size_than_stated_is_refused(tmp_path, executor, size_bytes):
    def resize(record: dict[str, Any]) -> None:
        record["frames"][0]["size_bytes"] = size_bytes
        record["files"] = record["files"][1:]

    refused(tmp_path, forge(resize), executor, "frame is not .* bytes long, as stated")


def forge_frame(frame: bytes, size_bytes: int) -> bytes:
    """A pack of one file with `frame` for its frame, both said to be of `size_bytes`."""
    record = manifest_record(("a", b""))
    record["files"][0]["size_bytes"] = size_bytes
    record["frames"][0] = {"stored_bytes": len(frame), "size_bytes": size_bytes}
    return assemble(json.dumps(record).encode(), frame)


def test_a_frame_that_unpacks_to_more_than_it_states_itself_is_refused(tmp_path, executor):
    bomb = bytearray(zstandard.compress(b"0" * 10 * MIB))
    assert struct.unpack_from("<I", bomb, 6) == (
        10 * MIB,
    )  # RFC 8878, section 3.1.1.1: after magic, descriptor, window
    struct.pack_into("<I", bomb, 6, 10)
    refused(tmp_path, forge_frame(bytes(bomb), 10), executor, "frame is damaged")


def test_a_frame_that_unpacks_to_less_than_it_states_itself_is_refused(tmp_path, executor):
    frame = bytearray(zstandard.compress(b"0" * 10 * MIB))
    struct.pack_into("<I", frame, 6, 11 * MIB)
    refused(tmp_path, forge_frame(bytes(frame), 11 * MIB), executor, "frame is ")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(zstandard.compress(b"content") + zstandard.compress(b"more"), id="a second frame"),
        pytest.param(zstandard.compress(b"content") + b"junk", id="junk"),
        pytest.param(struct.pack("<II", 0x184D2A50, 7) + b"content", id="a skippable frame"),
        pytest.param(b"content", id="no zstd"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_frame_that_is_not_exactly_one_zstd_frame_is_refused(tmp_path, executor, frame):
    refused(tmp_path, forge_frame(frame, 7), executor, "frame is ")


UNPACK_WITH_LITTLE_MEMORY = """
import resource, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from compile_cache.errors import PackError
from compile_cache.key import CacheKey
from compile_cache.pack import Limits, unpack
with ThreadPoolExecutor(1) as executor:
    executor.submit(int).result()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
    pack = Path(sys.argv[1])
    try:
        unpack(pack, pack.parent / "inside", CacheKey("environment", "model", "version"), Limits(), executor)
    except PackError as error:
        print(error)
"""


def test_a_frame_that_does_not_fit_into_memory_is_refused(tmp_path):
    frame = bytearray(zstandard.compress(b"0" * 10 * MIB))
    struct.pack_into("<I", frame, 6, 1 << 30)
    content = forge_frame(bytes(frame), 1 << 30)
    pack = tmp_path / f"{hashlib.sha256(content).hexdigest()}.pack"
    pack.write_bytes(content)
    (tmp_path / "inside").mkdir()
    command = [sys.executable, "-c", UNPACK_WITH_LITTLE_MEMORY, pack]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("its frame "), done.stderr


def test_a_frame_that_needs_a_dictionary_is_refused(tmp_path, executor):
    samples = [f"sample {number} of many samples".encode() for number in range(1000)]
    dictionary = zstandard.train_dictionary(1024, samples)
    frame = zstandard.ZstdCompressor(dict_data=dictionary).compress(b"content")
    refused(tmp_path, forge_frame(frame, 7), executor, "frame is damaged")


def test_another_content_than_stated_is_refused_by_the_files_path(tmp_path, executor):
    content = forge(lambda record: record["files"][1].update(sha256="0" * 64))
    refused(tmp_path, content, executor, "its file 'b' has another content than stated")


# A hostile pack: paths.


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/etc/passwd",
        "..",
        "../outside",
        "a/../../outside",
        "a/..",
        ".",
        "./a",
        "a//b",
        "a/",
        "a\\b",
        "..\\outside",
        "a\0b",
        "a\nb",
        "a\x1b[2J",
        "a\x7f",
        "a\u202eb",
        "\ud800",
        "x" * 1025,
        "a/" * 600 + "b",
    ],
    ids=ascii,
)
def test_a_path_that_is_not_plain_is_refused_by_name_and_written_nowhere(tmp_path, executor, path):
    content = forge(lambda record: record["files"][1].update(path=path))
    refused(tmp_path, content, executor, "is not a plain path inside the cache directory")
    assert read_tree(tmp_path / "inside") == {}


@pytest.mark.parametrize(
    "path",
    ["x" * 256, "folder/" + "x" * 256, "é" * 128, "é" * 128 + "/file", "/".join(["𐀀" * 63] * 16)],
    ids=lambda path: f"{len(path)} characters, {len(path.encode())} bytes",
)
def test_a_path_too_long_for_the_file_system_is_a_bad_pack_and_not_a_bad_disk(tmp_path, executor, path):
    """An OSError would end the whole restore, where a PackError costs one pack. Linux allows 255 bytes a part, and 4096
    in all (limits.h)."""
    content = forge(lambda record: record["files"][1].update(path=path))
    refused(tmp_path, content, executor, "is not a plain path inside the cache directory")


@pytest.mark.parametrize(
    ("one", "other"), [("same", "same"), ("a/Kernel.so", "a/kernel.SO"), ("straße", "strasse")], ids=ascii
)
def test_a_path_that_is_there_twice_is_refused(one, other):
    with pytest.raises(PackError, match="is there twice"):
        check_paths([one, "between", other])


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b", "a"], ["x/a", "x/A/b/c"]])
def test_a_path_that_is_a_file_and_a_folder_is_refused(paths):
    with pytest.raises(PackError, match="is a file and a folder at once"):
        check_paths(paths)


def test_plain_paths_are_let_through():
    check_paths(["a", "b/a", "b/c/a", ".hidden/..double", "b c", "é/~", "-rf", "*", "$HOME", "%2e%2e"])


# A hostile pack: values.

NO_COUNTS = [True, False, -1, 1.0, 1.5, "1", None, [], {}, [1], 10**400, float("nan"), float("inf")]


@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: ascii(value)[:10])
@pytest.mark.parametrize("name", ["size_bytes", "frame", "offset"])
def test_a_files_size_or_place_that_is_no_count_is_refused(tmp_path, executor, name, value):
    content = forge(lambda record: record["files"][0].update({name: value}))
    refused(tmp_path, content, executor, ".")


@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: ascii(value)[:10])
@pytest.mark.parametrize("name", ["stored_bytes", "size_bytes"])
def test_a_frames_size_that_is_no_count_is_refused(tmp_path, executor, name, value):
    content = forge(lambda record: record["frames"][0].update({name: value}))
    refused(tmp_path, content, executor, ".")


@pytest.mark.parametrize(
    "place",
    [{"frame": 2}, {"frame": 10**9}, {"offset": 1}, {"offset": 10**18}, {"size_bytes": 8}, {"size_bytes": 10**6}],
    ids=str,
)
def test_a_file_outside_the_frames_is_refused(tmp_path, executor, place):
    content = forge(lambda record: record["files"][0].update(place))
    refused(tmp_path, content, executor, "its file 'a/file' lies outside the pack's frames")


def test_frames_that_do_not_add_up_to_the_pack_are_refused(tmp_path, executor):
    content = forge(lambda record: record["frames"][0].update(stored_bytes=1))
    refused(tmp_path, content, executor, "not what its frames add up to")


@pytest.mark.parametrize("value", [1, None, True, [], ["a"], {}])
@pytest.mark.parametrize("name", ["path", "key", "sha256"])
def test_a_name_that_is_not_text_is_refused(tmp_path, executor, name, value):
    content = forge(lambda record: record["files"][0].update({name: value}))
    refused(tmp_path, content, executor, "something that is not text")


@pytest.mark.parametrize("name", ["key", "files", "frames", "creator", "created_s"])
def test_a_manifest_that_lacks_something_is_refused(tmp_path, executor, name):
    refused(tmp_path, forge(lambda record: record.pop(name)), executor, "manifest cannot be read")


@pytest.mark.parametrize("part", ["files", "frames"])
def test_a_manifest_with_an_unknown_field_is_refused(tmp_path, executor, part):
    content = forge(lambda record: record[part][0].update(unknown=1))
    refused(tmp_path, content, executor, "manifest cannot be read: .*unknown")


def test_a_time_that_is_no_time_is_refused(tmp_path, executor):
    content = forge(lambda record: record.update(created_s=10**400))
    refused(tmp_path, content, executor, "manifest cannot be read")


@given(st.data(), json_values)
@settings(max_examples=300)
def test_a_manifest_with_anything_anywhere_is_refused_or_unpacks_to_what_it_says(executor, data, value):
    files = (("a/file", b"content"), ("b", b"more"))
    record = manifest_record(*files)
    place = data.draw(st.sampled_from(list(places(record))))
    changed = put_at(copy.deepcopy(record), place, value)
    content = assemble(json.dumps(changed).encode(), b"".join(zstandard.compress(inside) for _, inside in files))
    with new_folder() as folder:
        try:
            manifest = unpack_bytes(folder, content, executor)
        except PackError:
            return
        unpacked = {path: len(inside) for path, inside in read_tree(folder / "inside").items()}
        assert unpacked == {file.path: file.size_bytes for file in manifest.files}


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of `value` and of everything in it."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inside in items:
        yield from places(inside, (*place, name))


def put_at(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    value[place[0]] = put_at(value[place[0]], place[1:], new)
    return value
