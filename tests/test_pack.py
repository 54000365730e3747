"""Packs: what goes in comes out, and a pack that is damaged, foreign or hostile is refused before it does harm."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random

import pytest
import zstandard
from hostile_packs import (
    KEY,
    MIB,
    NOTHING,
    OURS,
    RAW,
    RLE,
    THEIRS,
    assemble,
    digest,
    forge,
    forge_frame,
    name_of,
    read_tree,
    reading,
    record_of,
    restore,
    write_tree,
    zeros,
    zstd_frame,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_cache.errors import PackError
from compile_cache.pack.format import PACK_NAME, Pack, Run, runs, unpack_run, write_pack
from compile_cache.pack.head import HEADER_BYTES, Head, head_bytes, read_head
from compile_cache.pack.manifest import FRAME_BYTES, Frame, Limits, Manifest, PackFile
from compile_cache.pack.signing import Signer, TrustedKeys

LIMITS = Limits(size_bytes=64 * MIB, files=1000, manifest_bytes=4 * MIB)
ANYBODY = TrustedKeys()
SMALL = {"fxgraph/ab/abc/content": b"a graph", "x.so": b"\0" * 1000, "empty": b""}
LARGE = {"a": b"first", "large": Random(0).randbytes(2 * MIB + 1), "z": b"last", "nothing": b""}

paths = st.lists(st.sampled_from("abcXYZ019_-é"), min_size=1, max_size=8).map("".join)
trees = st.dictionaries(paths.map(str.casefold), st.binary(max_size=3000), max_size=12)


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for one hypothesis example."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def pack_up(folder: Path, files: dict[str, bytes], signer: Signer | None = None) -> Pack:
    (folder / "out").mkdir()
    return write_pack(folder / "out", KEY, write_tree(folder / "in", files), "the test", signer)


@pytest.fixture(scope="module")
def small_pack() -> tuple[str, bytes]:
    with new_folder() as folder:
        pack = pack_up(folder, SMALL)
        return pack.name, pack.local.read_bytes()


def read_whole_head(content: bytes, limits: Limits = LIMITS, trusted: TrustedKeys = ANYBODY) -> Head:
    """The head of an honest pack, under its right name."""
    _, _, _, _, stored_bytes, manifest_bytes, _ = struct.unpack_from("<II8sIIII", content)
    text = zstandard.decompress(content[HEADER_BYTES : HEADER_BYTES + stored_bytes], manifest_bytes)
    return read_head(reading(content), name_of(text), limits, trusted)


def refused(name: str, content: bytes, reason: str, limits: Limits = LIMITS) -> None:
    """Refused for that reason, whether it is unpacked or only verified."""
    with new_folder() as folder, pytest.raises(PackError, match=reason):
        restore(name, content, folder / "inside", limits)
    with pytest.raises(PackError, match=reason):
        restore(name, content, None, limits)


# What goes in comes out.


@pytest.mark.parametrize(
    "files",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"empty": b""}, id="an empty file"),
        pytest.param({"a": b"", "b": b"", "c": b"x", "d": b""}, id="empty files"),
        pytest.param(SMALL, id="small files"),
        pytest.param({"large": bytes(range(256)) * 4096 * 3}, id="one of 3 MiB"),
        pytest.param(LARGE, id="a large one between small ones"),
        pytest.param({"exactly": b"x" * MIB, "after": b"y"}, id="exactly one frame"),
        pytest.param({"before": b"y", "exactly": b"x" * MIB, "empty": b""}, id="exactly one frame, later"),
        pytest.param({"almost": b"x" * (MIB - 1), "one": b"y", "more": b"z"}, id="a frame filled to the byte"),
        pytest.param({"a": b"x" * (MIB + 1), "b": b"y" * (MIB + 1)}, id="just more than a frame, twice"),
        pytest.param({f"{n:03}": bytes([n]) * 50_000 for n in range(100)}, id="many in several frames"),
        pytest.param({"deep/" * 20 + "file": b"x", "ünï/cödé": b"y"}, id="deep and not ASCII"),
    ],
)
def test_files_come_out_as_they_went_in(tmp_path, files):
    pack = pack_up(tmp_path, files)
    restore(pack.name, pack.local.read_bytes(), tmp_path / "unpacked", LIMITS)
    assert read_tree(tmp_path / "unpacked") == files


@given(trees)
@settings(max_examples=settings().max_examples // 2)
def test_any_files_come_out_as_they_went_in(files):
    with new_folder() as folder:
        pack = pack_up(folder, files)
        head = restore(pack.name, pack.local.read_bytes(), folder / "unpacked")
        assert read_tree(folder / "unpacked") == files
        assert head.manifest == pack.manifest
        assert head.manifest.size_bytes == sum(map(len, files.values()))


def test_a_pack_is_named_by_the_digest_of_its_manifest_and_knows_its_size(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    assert pack.name == pack.local.name == name_of(pack.manifest.to_json())
    assert PACK_NAME.fullmatch(pack.name)
    assert pack.stored_bytes == pack.local.stat().st_size


def test_another_content_is_another_name(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1.0)
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    one, same = pack_up(tmp_path / "a", {"x": b"1", "y": b"2"}), pack_up(tmp_path / "b", {"x": b"1", "y": b"2"})
    other = pack_up(tmp_path / "c", {"x": b"1", "y": b"3"})
    assert one.name == same.name != other.name


def test_nothing_but_the_pack_is_left_in_the_folder(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    assert list(pack.local.parent.iterdir()) == [pack.local]


def test_a_pack_that_cannot_be_finished_leaves_nothing_in_the_folder(tmp_path):
    """What is left there on a full disk keeps it full."""

    class Broken(Signer):
        def __init__(self) -> None:
            pass

        def sign(self, manifest: bytes) -> bytes:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        pack_up(tmp_path, SMALL, Broken())
    assert list((tmp_path / "out").iterdir()) == []


def test_a_source_that_cannot_be_read_leaves_nothing_in_the_folder(tmp_path):
    sources = write_tree(tmp_path / "in", SMALL)
    (tmp_path / "in" / "x.so").unlink()
    (tmp_path / "in" / "x.so").mkdir()
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError):
        write_pack(tmp_path / "out", KEY, sources, "")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_manifest_says_what_is_in_a_pack_for_whom_and_by_whom(tmp_path):
    source, *_ = write_tree(tmp_path, {"path": b"content"})
    manifest = write_pack(tmp_path, KEY, [replace(source, replaces="0" * 64)], "the creator").manifest
    assert manifest.files == (PackFile("path", "key of path", 7, digest(b"content"), "0" * 64),)
    assert (manifest.key, manifest.creator) == (KEY, "the creator")


def test_a_source_that_has_vanished_is_left_out(tmp_path):
    sources = write_tree(tmp_path / "in", {"a": b"a", "gone": b"g", "z": b"z"})
    (tmp_path / "in" / "gone").unlink()
    pack = write_pack(tmp_path, KEY, sources, "")
    restore(pack.name, pack.local.read_bytes(), tmp_path / "unpacked")
    assert read_tree(tmp_path / "unpacked") == {"a": b"a", "z": b"z"}


def test_a_source_that_grows_and_shrinks_while_it_is_read_is_packed_as_it_was_read(tmp_path):
    """Its size and digest are those of the bytes that are in the pack: the pack can be restored, whatever was read."""
    files = {"before": b"b", "changing": b"", "after": b"a"}
    sources, changing = write_tree(tmp_path / "in", files), tmp_path / "in" / "changing"
    stop = threading.Event()

    def change() -> None:
        with changing.open("r+b") as file:
            while not stop.is_set():
                file.write(b"x" * 700_001)
                file.flush()
                if file.tell() > 3 * MIB:
                    file.truncate(file.seek(100))

    writer = threading.Thread(target=change)
    writer.start()
    try:
        sizes = set()
        for number in range(20):
            pack = write_pack(tmp_path, KEY, sources, "")
            restore(pack.name, pack.local.read_bytes(), tmp_path / f"{number}", LIMITS)
            sizes.add(pack.manifest.files[1].size_bytes)
    finally:
        stop.set()
        writer.join()
    assert len(sizes) > 1


def test_a_pack_is_one_valid_zstd_stream_of_manifest_and_files(tmp_path):
    pack = pack_up(tmp_path, LARGE, OURS)
    with pack.local.open("rb") as file:
        stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        assert stream.read() == pack.manifest.to_json() + b"".join(LARGE.values())


def test_each_frame_of_at_most_one_mib_is_readable_by_itself_where_the_manifest_says(tmp_path):
    pack = pack_up(tmp_path, LARGE)
    content = pack.local.read_bytes()
    start = read_whole_head(content).start
    unpacked = []
    for frame in pack.manifest.frames:
        unpacked.append(zstandard.decompress(content[start : start + frame.stored_bytes]))
        start += frame.stored_bytes
    assert [len(part) for part in unpacked] == [frame.size_bytes for frame in pack.manifest.frames]
    assert [len(part) for part in unpacked] == [5, MIB, MIB, 1, 4]
    assert b"".join(unpacked) == b"".join(LARGE.values())
    assert start == len(content)


def test_content_that_cannot_be_compressed_is_within_what_a_reader_takes(tmp_path):
    """The bound on a stored frame is zstd's own."""
    pack = pack_up(tmp_path, {"noise": Random(0).randbytes(4 * MIB), "little": b"\xa7"})
    assert max(frame.stored_bytes for frame in pack.manifest.frames) > FRAME_BYTES
    restore(pack.name, pack.local.read_bytes(), None)


def test_the_head_is_readable_from_the_first_bytes_alone(tmp_path):
    pack = pack_up(tmp_path, SMALL, OURS)
    content = pack.local.read_bytes()
    needed = head_bytes(content[:HEADER_BYTES], LIMITS)
    head = read_head(reading(content[:needed]), pack.name, LIMITS, ANYBODY)
    assert head == read_head(reading(content), pack.name, LIMITS, ANYBODY)
    assert head.manifest == pack.manifest
    assert head.start == needed < head.stored_bytes == len(content)
    with pytest.raises(PackError, match="ends before the end of its signature"):
        read_head(reading(content[: needed - 1]), pack.name, LIMITS, ANYBODY)


def test_a_pack_of_another_writer_is_read(tmp_path):
    """The layout is what the module says it is."""
    head = restore(*forge(lambda record: None), tmp_path / "inside")
    assert read_tree(tmp_path / "inside") == {"a/file": b"content", "b": b"more"}
    assert (head.manifest.creator, head.signed_by) == ("the test", None)


# Runs.

sizes_of_files = st.lists(st.sampled_from([0, 0, 1, 2, 7, 100]) | st.integers(0, 300), max_size=20)


@st.composite
def cut_packs(draw) -> Head:
    """Heads of packs whose frames are cut anywhere: whoever wrote one may have cut it so."""
    sizes = draw(sizes_of_files)
    total = sum(sizes)
    cuts = draw(st.sets(st.integers(1, max(1, total - 1)), max_size=10)) | set(
        draw(st.sets(st.sampled_from(list(accumulate(sizes)) or [0]), max_size=5))
    )
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < total), *([total] if total else [])]
    frames = tuple(Frame(draw(st.integers(1, 50)), end - start) for start, end in pairwise(bounds))
    files = tuple(PackFile(str(number), str(number), size, "0" * 64) for number, size in enumerate(sizes))
    return Head(Manifest(KEY, files, frames, "", 0.0), start=draw(st.integers(0, 1000)))


@given(cut_packs())
@settings(max_examples=5 * settings().max_examples)
def test_runs_hold_each_frame_and_each_file_once_in_their_order(head):
    cut = list(runs(head))
    assert tuple(frame for run in cut for frame in run.frames) == head.manifest.frames
    assert tuple(file for run in cut for file in run.files) == head.manifest.files
    start = head.start
    for run in cut:
        assert run.start == start
        assert run.files
        start += run.stored_bytes
    assert start == head.stored_bytes


@given(cut_packs())
@settings(max_examples=5 * settings().max_examples)
def test_a_run_holds_whole_files_and_could_not_be_cut_further(head):
    for run in runs(head):
        ends_of_frames = list(accumulate(frame.size_bytes for frame in run.frames))
        ends_of_files = list(accumulate(file.size_bytes for file in run.files))
        assert ends_of_frames[-1:] == [size for size in ends_of_files[-1:] if size]
        assert set(ends_of_frames[:-1]).isdisjoint(ends_of_files)


def test_small_files_share_a_run_and_a_large_one_has_its_own(tmp_path):
    pack = pack_up(tmp_path, LARGE)
    shapes = [
        (len(run.frames), [file.path for file in run.files]) for run in runs(read_whole_head(pack.local.read_bytes()))
    ]
    assert shapes == [(1, ["a"]), (3, ["large"]), (1, ["z"]), (0, ["nothing"])]


def test_any_run_is_unpacked_without_the_others(tmp_path):
    pack = pack_up(tmp_path, LARGE)
    content = pack.local.read_bytes()
    for number, run in enumerate(runs(read_whole_head(content))):
        folder = tmp_path / f"run {number}"
        unpack_run(io.BytesIO(content[run.start : run.start + run.stored_bytes]), run, folder)
        assert read_tree(folder) == {file.path: LARGE[file.path] for file in run.files}


def test_a_run_that_is_only_verified_is_written_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack = pack_up(tmp_path, SMALL)
    before = read_tree(tmp_path)
    restore(pack.name, pack.local.read_bytes(), None)
    assert read_tree(tmp_path) == before


UNPACK_WITH_LITTLE_MEMORY = """
import resource, sys
from compile_cache.errors import PackError
from compile_cache.pack.manifest import Limits
from compile_cache.pack.format import runs, unpack_run
from compile_cache.pack.head import read_head
from compile_cache.pack.signing import TrustedKeys
with open(sys.argv[1], "rb") as file:
    beginning = file.read(1 << 20)
    head = read_head(lambda start, size: beginning[start : start + size], sys.argv[2], Limits(), TrustedKeys())
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
    file.seek(head.start)
    for run in runs(head):
        unpack_run(file, run, None)
print("done")
"""


def test_a_large_file_is_unpacked_in_little_memory(tmp_path):
    record = record_of(("large", b""))
    zero, count = zstandard.compress(bytes(MIB)), 100
    record["files"][0].update(size_bytes=count * MIB, sha256=digest(bytes(count * MIB)))
    record["frames"] = [{"stored_bytes": len(zero), "size_bytes": MIB}] * count
    text = json.dumps(record).encode()
    (tmp_path / "pack").write_bytes(assemble(text, zero * count))
    command = [sys.executable, "-c", UNPACK_WITH_LITTLE_MEMORY, tmp_path / "pack", name_of(text)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "done\n", done.stderr


# A damaged pack.


def test_a_wrong_name_is_refused(small_pack):
    _, content = small_pack
    refused("0" * 64 + ".pack", content, "does not match its name")


def test_a_pack_cut_short_anywhere_is_refused(small_pack):
    name, content = small_pack
    for length in range(len(content)):
        with pytest.raises(PackError, match=r"\w"):
            restore(name, content[:length], None)


def test_a_longer_pack_is_refused(small_pack):
    name, content = small_pack
    refused(name, content + b"\0", f"has {len(content) + 1} bytes, but its manifest describes {len(content)}")


def test_an_object_that_is_cut_short_while_it_is_read_is_refused(tmp_path):
    """A store may give fewer bytes than its listing said."""
    content = pack_up(tmp_path, LARGE).local.read_bytes()
    for run in runs(read_whole_head(content)):
        for stored in {b"", content[run.start : run.start + run.stored_bytes - 1]} if run.frames else ():
            with pytest.raises(PackError, match="frame is damaged"):
                unpack_run(io.BytesIO(stored), run, None)


@given(st.data())
@settings(max_examples=5 * settings().max_examples)
def test_a_flipped_bit_is_refused_or_changes_nothing(small_pack, data):
    """Some bits of a zstd frame mean nothing; the content is what the name stands for."""
    name, content = small_pack
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    with new_folder() as folder:
        try:
            restore(name, bytes(flipped), folder / "inside")
        except PackError:
            return
        assert read_tree(folder / "inside") == SMALL


@given(st.binary(max_size=200))
def test_anything_at_all_is_refused(content):
    refused(name_of(content), content, r"\w")


def test_swapped_frames_are_refused(tmp_path):
    """Of the same length, stored and unpacked, so that only the digests tell."""
    one, other = bytes(range(256)) * 4096, bytes(reversed(range(256))) * 4096
    pack = pack_up(tmp_path, {"one": one, "other": other})
    content = pack.local.read_bytes()
    start = read_whole_head(content).start
    frames = [content[start : start + pack.manifest.frames[0].stored_bytes]]
    frames.append(content[start + len(frames[0]) :])
    assert len(frames[0]) == len(frames[1])
    refused(pack.name, content[:start] + frames[1] + frames[0], "its file 'one' differs from the manifest")


def test_a_frame_of_another_pack_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    pack, other = pack_up(tmp_path, {"a": b"content"}), pack_up(tmp_path / "other", {"a": b"foreign"})
    content, foreign = pack.local.read_bytes(), other.local.read_bytes()
    start, foreign_start = read_whole_head(content).start, read_whole_head(foreign).start
    refused(pack.name, content[:start] + foreign[foreign_start:], "its file 'a' differs from the manifest")


def test_another_content_than_stated_is_refused_by_the_files_path():
    refused(
        *forge(lambda record: record["files"][1].update(sha256="0" * 64)),
        "its file 'b' differs from the manifest",
    )


def test_files_cut_in_another_place_are_refused():
    def move(record: dict) -> None:
        record["files"][0]["size_bytes"] += 1
        record["files"][1]["size_bytes"] -= 1

    refused(*forge(move), "its file 'a/file' differs from the manifest")


def test_an_empty_file_has_the_digest_of_nothing():
    refused(
        *forge(lambda record: record["files"][0].update(sha256="0" * 64), ("empty", b"")),
        "its file 'empty' differs from the manifest",
    )


# A foreign pack.


@pytest.mark.parametrize("part", ["environment", "model_name", "model_version"])
def test_a_pack_for_another_key_says_so(part):
    name, content = forge(lambda record: record["key"].update({part: "another"}))
    assert "another" in read_head(reading(content), name, LIMITS, ANYBODY).manifest.key.prefix
    refused(name, content, "it is for v1/.*another")


def test_a_newer_pack_format_is_refused_by_its_number():
    refused(name_of(b"{}"), assemble(b"{}", version=2), "has pack format 2; .* reads 1")


@pytest.mark.parametrize(
    "header",
    [{"magic": 0xFD2FB528}, {"magic": 0x184D2A51}, {"header_bytes": 25}, {"identity": b"compcash"}],
    ids=str,
)
def test_what_begins_otherwise_is_refused(header):
    refused(name_of(b"{}"), assemble(b"{}", **header), "does not begin like a pack")


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_what_ends_inside_the_header_is_refused(length):
    refused(name_of(b"{}"), assemble(b"{}")[:length], f"ends after {length} bytes, inside its header")


# A hostile head.


@pytest.mark.parametrize("claim", ["stored_bytes", "manifest_bytes", "signature_bytes"])
@pytest.mark.parametrize("size_bytes", [4 * MIB + 1, 0xFFFFFFFF])
def test_a_header_that_claims_too_much_is_refused_before_more_is_read(claim, size_bytes):
    content = assemble(b"{}", **{claim: size_bytes})
    with pytest.raises(PackError, match=r"claims more than the (4194304|4096) bytes allowed"):
        head_bytes(content[:HEADER_BYTES], LIMITS)


def test_a_signature_has_at_most_4096_bytes():
    head_bytes(assemble(b"{}", signature_bytes=4096), LIMITS)
    with pytest.raises(PackError, match="its signature claims more"):
        head_bytes(assemble(b"{}", signature_bytes=4097), LIMITS)


@pytest.mark.parametrize(
    "forged", [{"signature_magic": 0x184D2A50}, {"signature_magic": 0xFD2FB528}, {"signature_length": 1}]
)
def test_a_signature_that_is_not_where_the_header_says_is_refused(forged):
    """Otherwise a pack would have two readings: as a zstd stream, and as a pack."""
    text = json.dumps(record_of(("a", b"a"))).encode()
    refused(name_of(text), assemble(text, zstandard.compress(b"a"), **forged), "signature is not where it should be")


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(zstandard.compress(b"0" * 100 * MIB), id="a bomb"),
        pytest.param(zstandard.ZstdCompressor(write_content_size=False).compress(b"0123456789"), id="without a length"),
        pytest.param(zstandard.compress(b""), id="nothing"),
        pytest.param(struct.pack("<II", 0x184D2A50, 10) + b"0123456789", id="a skippable frame"),
    ],
)
def test_a_manifest_that_is_not_as_long_as_stated_is_not_unpacked(stored):
    content = assemble(b"", stored=stored, manifest_bytes=10)
    refused(name_of(b"0123456789"), content, "manifest is not 10 bytes long, as stated")


def test_a_manifest_that_is_longer_than_it_states_itself_is_refused():
    bomb = zstd_frame(*zeros(100 * MIB), content_size=10)
    refused(name_of(bytes(10)), assemble(b"", stored=bomb, manifest_bytes=10), "manifest is damaged")


@given(st.binary(max_size=200))
def test_any_manifest_that_is_no_record_of_one_is_refused(text):
    refused(name_of(text), assemble(text), "manifest cannot be read")


# Hostile frames.


@pytest.mark.parametrize("size_bytes", [10, MIB])
@pytest.mark.parametrize("more_bytes", [1, MIB, 1 << 30])
def test_a_frame_that_unpacks_to_more_than_it_states_is_refused(size_bytes, more_bytes):
    bomb = zstd_frame(*zeros(size_bytes + more_bytes), content_size=size_bytes)
    refused(*forge_frame(bomb, bytes(size_bytes)), "frame is damaged")


def test_a_frame_that_unpacks_to_less_than_it_states_is_refused():
    refused(*forge_frame(zstd_frame(*zeros(9), content_size=10), bytes(10)), "frame is ")


@pytest.mark.parametrize("content_size", [0, 9, 11, MIB, 1 << 40, 2**64 - 3, 2**64 - 2, 2**64 - 1])
def test_a_frame_of_another_length_than_the_manifest_states_is_not_unpacked(content_size):
    refused(
        *forge_frame(zstd_frame(*zeros(10), content_size=content_size), bytes(10)),
        r"frame is not 10 bytes long|determining content size",
    )


@pytest.mark.parametrize("window", [0, 80, 136, 255])
def test_a_frame_without_a_length_is_not_unpacked_whatever_window_it_asks_for(window):
    frame = zstd_frame(*zeros(10), content_size=None, window=window)
    refused(*forge_frame(frame, bytes(10)), "frame is not 10 bytes long|frame is damaged")


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(zstandard.compress(b"content") + zstandard.compress(b"more"), id="a second frame"),
        pytest.param(zstandard.compress(b"content") + b"junk", id="junk"),
        pytest.param(struct.pack("<II", 0x184D2A50, 7) + b"content", id="a skippable frame"),
        pytest.param(struct.pack("<II", 0x184D2A50, 0) + zstandard.compress(b"content"), id="a skippable frame before"),
        pytest.param(zstandard.compress(b"content")[:-1], id="cut short"),
        pytest.param(zstd_frame((RAW, 7, b"content"), NOTHING, content_size=7)[:-1], id="cut in its last block"),
        pytest.param(zstd_frame((3, 7, b"content"), content_size=7), id="a reserved block"),
        pytest.param(zstd_frame((RAW, 0x1FFFFF, b"content"), content_size=7), id="a block larger than blocks are"),
        pytest.param(zstd_frame((RLE, 0x1FFFFF, b"c"), content_size=7), id="a repetition longer than blocks are"),
        pytest.param(zstd_frame((RAW, 7, b"content"), content_size=7, dictionary=7), id="a dictionary"),
        pytest.param(b"content", id="no zstd"),
    ],
)
def test_a_frame_that_is_not_exactly_one_zstd_frame_is_refused(frame):
    refused(*forge_frame(frame, b"content"), "frame is ")


def test_a_frame_that_is_padded_with_empty_blocks_is_refused_by_its_length():
    frame = zstd_frame(*[NOTHING] * 400_000, (RAW, 7, b"content"), content_size=7)
    refused(*forge_frame(frame, b"content"), "not stored in between 1 and 1052672 bytes")


def test_frames_that_do_not_add_up_to_the_pack_are_refused():
    refused(*forge(lambda record: record["frames"][0].update(stored_bytes=1)), "bytes, but its manifest describes")


def test_an_object_larger_than_everything_may_be_is_refused_unread():
    name, content = forge(lambda record: None)
    refused(name, content, "larger than allowed", replace(LIMITS, size_bytes=100))


# Signatures.

TRUSTING = TrustedKeys([OURS.public_key])


def signed(signature: bytes) -> tuple[str, bytes]:
    text = json.dumps(record_of(("a", b"content"))).encode()
    return name_of(text), assemble(text, zstandard.compress(b"content"), signature=signature)


def test_a_pack_signed_by_a_trusted_key_is_used_and_says_whose_it_is(tmp_path):
    pack = pack_up(tmp_path, LARGE, OURS)
    head = restore(pack.name, pack.local.read_bytes(), tmp_path / "inside", trusted=TRUSTING)
    assert read_tree(tmp_path / "inside") == LARGE
    assert head.signed_by == OURS.public_key


def test_a_signed_pack_is_used_where_no_key_is_asked_for(tmp_path):
    pack = pack_up(tmp_path, SMALL, OURS)
    restore(pack.name, pack.local.read_bytes(), tmp_path / "inside")
    assert read_tree(tmp_path / "inside") == SMALL


def test_the_signature_is_over_the_exact_manifest(tmp_path):
    """So that a name, which the manifest's digest is, says nothing about who signed it."""
    text = json.dumps(record_of(("a", b"content"))).encode()
    restore(*signed(OURS.sign(text)), None, trusted=TRUSTING)
    with pytest.raises(PackError, match="does not match its manifest"):
        restore(*signed(OURS.sign(text + b" ")), None, trusted=TRUSTING)


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        pytest.param(lambda text: b"", "is not signed", id="unsigned"),
        pytest.param(lambda text: THEIRS.sign(text), "signed by public-ed25519:.*not trusted", id="foreign"),
        pytest.param(
            lambda text: OURS.sign(text)[:32] + THEIRS.sign(text)[32:], "does not match", id="foreign, in our name"
        ),
        pytest.param(lambda text: OURS.sign(b"another"), "does not match", id="of another manifest"),
        pytest.param(lambda text: OURS.sign(text)[:-1], "has 95 bytes, not 96", id="cut short"),
        pytest.param(lambda text: OURS.sign(text) * 2, "has 192 bytes, not 96", id="twice"),
        pytest.param(lambda text: OURS.sign(text)[:32] + bytes(64), "does not match", id="zeros"),
    ],
)
def test_a_pack_without_a_signature_that_is_trusted_and_fits_is_refused(signature, reason):
    text = json.dumps(record_of(("a", b"content"))).encode()
    with pytest.raises(PackError, match=reason):
        restore(*signed(signature(text)), None, trusted=TRUSTING)


@given(st.integers(0, 8 * 96 - 1))
def test_a_signature_with_a_flipped_bit_is_refused(bit):
    text = json.dumps(record_of(("a", b"content"))).encode()
    tampered = bytearray(OURS.sign(text))
    tampered[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PackError, match=r"not trusted|does not match"):
        restore(*signed(bytes(tampered)), None, trusted=TRUSTING)


def test_a_manifest_is_verified_before_it_is_read():
    """Whoever is not trusted does not get as far as the parser."""
    text = b"[" * 10_000
    with pytest.raises(PackError, match="not trusted"):
        restore(name_of(text), assemble(text, signature=THEIRS.sign(text)), None, trusted=TRUSTING)


def test_a_signed_manifest_that_says_something_wrong_is_refused_all_the_same():
    record = record_of(("../a", b"content"))
    text = json.dumps(record).encode()
    content = assemble(text, zstandard.compress(b"content"), signature=OURS.sign(text))
    with pytest.raises(PackError, match="is not a plain path"):
        restore(name_of(text), content, None, trusted=TRUSTING)


def test_a_runs_length_is_that_of_its_frames():
    assert Run(0, (Frame(3, 10), Frame(4, 10)), ()).stored_bytes == 7
