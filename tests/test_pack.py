"""Packs: what goes in comes out, in runs that can be read alone and in little memory."""

from __future__ import annotations

import io
import threading
from itertools import pairwise
from pathlib import Path
from random import Random
from unittest import mock

import msgspec
import pytest
import zstandard
from hostile_packs import (
    KEY,
    MIB,
    OURS,
    OneObject,
    assemble,
    digest,
    encode,
    name_of,
    record_of,
    restore,
    small_draft,
    write_tree,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import read_files
from programs import run_program

from compile_cache.errors import PackError
from compile_cache.storage.pack.format import (
    PACK_NAME,
    Head,
    Pack,
    read_head,
    runs,
    unpack,
    write_pack,
)
from compile_cache.storage.pack.manifest import Frame, Limits, Manifest, PackFile
from compile_cache.storage.pack.signing import Signer
from compile_cache.storage.rules import Rules, verify_pack
from compile_cache.storage.stores.base import StoredObject
from compile_cache.storage.stores.transfer import open_part

LIMITS = Limits(size_bytes=64 * MIB, manifest_bytes=4 * MIB)
ANYBODY = frozenset()
SMALL = {"fxgraph/ab/abc/content": b"a graph", "x.so": b"\0" * 1000, "empty": b""}
LARGE = {"a": b"first", "large": Random(0).randbytes(2 * MIB + 1), "z": b"last", "nothing": b""}


def pack_up(folder: Path, files: dict[str, bytes], signer: Signer | None = None) -> Pack:
    (folder / "out").mkdir()
    return write_pack(folder / "out", KEY, write_tree(folder / "in", files), "the test", signer)


def head_of(pack: Pack) -> Head:
    return Head(pack.manifest, pack.start, pack.signed_by, pack.manifest_bytes)


def read_whole_head(content: bytes, limits: Limits = LIMITS, trusted: frozenset[str] = ANYBODY) -> Head:
    """The head of an honest pack, under its right name."""
    return read_head(io.BytesIO(content), name_of(content), limits, trusted)


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
    assert read_files(tmp_path / "unpacked") == files


def test_a_pack_is_named_by_the_digest_of_header_and_manifest_and_knows_its_size(tmp_path):
    pack = pack_up(tmp_path, SMALL)
    assert pack.name == pack.local.name == name_of(pack.local.read_bytes())
    assert head_of(pack) == read_whole_head(pack.local.read_bytes())
    assert PACK_NAME.fullmatch(pack.name)
    assert pack.stored_bytes == pack.local.stat().st_size
    assert list(pack.local.parent.iterdir()) == [pack.local]


def test_a_pack_that_cannot_be_finished_or_read_together_leaves_nothing_in_the_folder(tmp_path, monkeypatch):
    """What is left there on a full disk keeps it full."""
    monkeypatch.setattr(Signer, "sign", mock.Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        pack_up(tmp_path, SMALL, OURS)
    assert list((tmp_path / "out").iterdir()) == []
    sources = write_tree(tmp_path / "in", SMALL)
    (tmp_path / "in" / "x.so").unlink()
    (tmp_path / "in" / "x.so").mkdir()
    with pytest.raises(IsADirectoryError):
        write_pack(tmp_path / "out", KEY, sources, "")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_source_that_has_vanished_is_left_out(tmp_path):
    sources = write_tree(tmp_path / "in", {"a": b"a", "gone": b"g", "z": b"z"})
    (tmp_path / "in" / "gone").unlink()
    pack = write_pack(tmp_path, KEY, sources, "")
    restore(pack.name, pack.local.read_bytes(), tmp_path / "unpacked")
    assert read_files(tmp_path / "unpacked") == {"a": b"a", "z": b"z"}


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
        for number in range(2000):
            if number >= 20 and len(sizes) > 1:
                break
            pack = write_pack(tmp_path, KEY, sources, "")
            restore(pack.name, pack.local.read_bytes(), tmp_path / f"{number}", LIMITS)
            sizes.add(pack.manifest.files[1].size_bytes)
    finally:
        stop.set()
        writer.join()
    assert len(sizes) > 1


def test_a_pack_is_one_zstd_stream_of_manifest_and_files_in_frames_that_are_where_the_manifest_says(tmp_path):
    """Each is readable by itself."""
    pack = pack_up(tmp_path, LARGE, OURS)
    content = pack.local.read_bytes()
    stream = zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True)
    assert stream.read() == msgspec.json.encode(pack.manifest) + b"".join(LARGE.values())
    start = read_whole_head(content).start
    unpacked = []
    for frame in pack.manifest.frames:
        unpacked.append(zstandard.ZstdDecompressor().stream_reader(content[start : start + frame.stored_bytes]).read())
        start += frame.stored_bytes
    assert [len(part) for part in unpacked] == [5, 2 * MIB + 1, 4]
    assert b"".join(unpacked) == b"".join(LARGE.values())
    assert start == len(content)


def test_the_head_is_readable_from_the_first_bytes_alone(tmp_path):
    pack = pack_up(tmp_path, SMALL, OURS)
    content = pack.local.read_bytes()
    file = io.BytesIO(content)
    head = read_head(file, pack.name, LIMITS, ANYBODY)
    assert head == head_of(pack)
    needed = file.tell()
    assert head.start == needed < head.stored_bytes == len(content)
    with pytest.raises(PackError, match="ends before the end of its signature"):
        read_head(io.BytesIO(content[: needed - 1]), pack.name, LIMITS, ANYBODY)


# Runs.


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=20).map(tuple),
    st.sets(st.integers(0, 60), max_size=30),
)
@settings(max_examples=2 * settings().max_examples)
def test_runs_have_each_frame_with_a_wanted_file_once_and_no_neighbours_that_fit_into_one_request(shapes, chosen):
    numbers = iter(range(100))
    frames = tuple(
        Frame(length, tuple(PackFile(str(next(numbers)), "", 0, "") for _ in range(count))) for length, count in shapes
    )
    head, wanted = Head(Manifest(KEY, frames, "", 0.0), start=7), {str(number) for number in chosen}
    with mock.patch("compile_cache.storage.pack.format.READ_BYTES", 12):
        found = runs(head, wanted)
    needed = [frame for frame in frames if any(file.path in wanted for file in frame.files)]
    assert [file for run in found for file in run.files] == [file for frame in needed for file in frame.files]
    assert sum(run.end - run.start for run in found) == sum(frame.stored_bytes for frame in needed)
    assert all(one.end < other.start or other.end - one.start > 12 for one, other in pairwise(found))
    for run in found:
        starts = [7 + sum(frame.stored_bytes for frame in frames[:number]) for number in range(len(frames))]
        assert run.start in starts
        assert run.end - run.start <= 12


def test_small_files_share_a_frame_a_large_one_has_its_own_and_each_is_unpacked_alone(tmp_path):
    pack = pack_up(tmp_path, LARGE)
    content = pack.local.read_bytes()
    head = read_whole_head(content)
    paths = [[file.path for file in frame.files] for frame in head.manifest.frames]
    assert paths == [["a"], ["large"], ["z", "nothing"]]
    for number, frame in enumerate(head.manifest.frames):
        (run,) = runs(head, {frame.files[0].path})
        unpack(open_part(OneObject(content), pack.name, run.start, run.end), run.files, tmp_path / f"{number}")
        assert read_files(tmp_path / f"{number}") == {file.path: LARGE[file.path] for file in frame.files}


@pytest.mark.parametrize("moved_bytes", [5, -5])
def test_a_border_between_frames_that_lies_elsewhere_is_found_though_all_frames_together_are_right(moved_bytes):
    """A boot may want one of them alone."""
    draft = small_draft()
    for frame, more in zip(draft.record["frames"], (moved_bytes, -moved_bytes), strict=True):
        frame["stored_bytes"] += more
    name, content = draft.put_together()
    restore(name, content, None)
    entry = StoredObject(KEY.prefix + name, len(content), 0.0)
    with pytest.raises(PackError, match=r"its frame is damaged|differs from the manifest"):
        verify_pack(OneObject(content), entry, Rules())


UNPACK_WITH_LITTLE_MEMORY = """
import resource, sys
from compile_cache.errors import PackError
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.format import read_head, runs, unpack
with open(sys.argv[1], "rb") as file:
    head = read_head(file, sys.argv[2], Limits(), frozenset())
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
    file.seek(head.start)
    (run,) = runs(head)
    unpack(file, run.files, None)
print("done")
"""


def test_a_large_file_is_unpacked_in_little_memory(tmp_path):
    record = record_of(("large", b""))
    zero, count = zstandard.compress(bytes(MIB)), 100
    record["frames"][0]["stored_bytes"] = len(zero) * count
    record["frames"][0]["files"][0].update(size_bytes=count * MIB, sha256=digest(bytes(count * MIB)))
    pack = assemble(encode(record), zero * count)
    (tmp_path / "pack").write_bytes(pack)
    done = run_program(UNPACK_WITH_LITTLE_MEMORY, tmp_path / "pack", name_of(pack))
    assert done.stdout == "done\n", done.stderr
