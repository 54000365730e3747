"""Manifests and paths: what a pack says of itself is believed only where it can be true and can do no harm."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hostile_packs import ODD_VALUES, hostile_paths, json_tricks, places, put_at, record_of
from hypothesis import given, settings
from hypothesis import strategies as st

from compile_cache.errors import PackError
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.manifest import FRAME_BYTES, Frame, Limits, Manifest, PackFile, check_paths, parse_manifest

MIB = 1 << 20
LIMITS = Limits(size_bytes=64 * MIB, files=1000, manifest_bytes=4 * MIB)
KEY = CacheKey("environment", "model", "version")
SHA256 = "0123456789abcdef" * 4

texts = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)
names = st.lists(st.sampled_from("abcXYZ019_-é"), min_size=1, max_size=8).map("".join)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def parse(record: object, limits: Limits = LIMITS) -> Manifest:
    return parse_manifest(record if isinstance(record, bytes) else json.dumps(record).encode(), limits)


def two_files() -> dict:
    return record_of(("a/file", b"content"), ("b", b"more"))


def refused(record: object, reason: str, limits: Limits = LIMITS) -> str:
    with pytest.raises(PackError, match=reason) as refusal:
        parse(record, limits)
    return str(refusal.value)


# What is written is read.


@given(
    st.dictionaries(names.map(str.casefold), st.tuples(texts, st.integers(0, 3 * MIB)), max_size=5),
    texts,
    st.floats(0, 1e11),
    st.sampled_from([None, SHA256]),
)
def test_a_manifest_says_what_was_written(files, creator, created_s, replaces):
    listed = tuple(PackFile(path, key, size_bytes, SHA256, replaces) for path, (key, size_bytes) in files.items())
    size_bytes = sum(file.size_bytes for file in listed)
    sizes = [MIB] * (size_bytes // MIB) + ([size_bytes % MIB] if size_bytes % MIB else [])
    manifest = Manifest(KEY, listed, tuple(Frame(10, size) for size in sizes), creator, created_s)
    assert parse_manifest(manifest.to_json(), LIMITS) == manifest
    assert manifest.size_bytes == size_bytes
    assert manifest.frames_bytes == 10 * len(sizes)


def test_one_large_file_needs_no_more_than_one_file_may():
    """The bound on what a manifest may say is on files and frames, not on files alone."""
    record = two_files()
    record["files"] = [{**record["files"][0], "size_bytes": 64 * MIB}]
    record["frames"] = [{"stored_bytes": 100, "size_bytes": MIB}] * 64
    assert len(parse(record, replace(LIMITS, files=1)).frames) == 64


def test_a_file_may_lack_what_it_replaces():
    assert [file.replaces for file in parse(two_files()).files] == [None, None]


# Limits.


def test_more_files_than_allowed_are_refused():
    refused(two_files(), "names more than the 1 files allowed", replace(LIMITS, files=1))


def test_more_bytes_than_allowed_are_refused():
    refused(two_files(), "unpacks to 11 bytes; 10 are allowed", replace(LIMITS, size_bytes=10))


@pytest.mark.parametrize("size_bytes", [0, FRAME_BYTES + 1, 64 * MIB])
def test_a_frame_that_does_not_unpack_to_at_most_one_mib_is_refused(size_bytes):
    record = two_files()
    record["frames"][0]["size_bytes"] = size_bytes
    refused(record, "frames does not have between 1 and 1048576 bytes")


@pytest.mark.parametrize("stored_bytes", [0, FRAME_BYTES + 4097, 4 << 30])
def test_a_frame_that_is_stored_in_more_than_zstd_would_ever_need_is_refused(stored_bytes):
    """It is read whole, so it would be held in memory, whatever it unpacks to."""
    record = two_files()
    record["frames"][0]["stored_bytes"] = stored_bytes
    refused(record, "frames is not stored in between 1 and 1052672 bytes")


@pytest.mark.parametrize("change", [1, -1])
def test_files_that_do_not_fill_the_frames_are_refused(change):
    record = two_files()
    record["files"][1]["size_bytes"] += change
    refused(record, "files do not match its frames in size")


def test_frames_without_files_are_refused():
    refused({**two_files(), "files": []}, "files do not match its frames in size")


# Values.

NO_COUNTS = [True, False, -1, 1.0, 1.5, "1", None, [], {}, [1], 2**63, 10**400, float("nan"), float("inf")]


@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: ascii(value)[:10])
@pytest.mark.parametrize(
    ("part", "name"), [("files", "size_bytes"), ("frames", "size_bytes"), ("frames", "stored_bytes")]
)
def test_a_size_that_is_no_count_is_refused(part, name, value):
    record = two_files()
    record[part][0][name] = value
    refused(record, "has an invalid size|one of its frames")


def test_sizes_whose_sum_has_more_digits_than_an_int_may_have_are_refused():
    """An int of 4300 digits is read, and a sum of two cannot be written into a message: sys.set_int_max_str_digits."""
    record = two_files()
    for file in record["files"]:
        file["size_bytes"] = 10**4300 - 1
    refused(record, "'a/file' has an invalid size")


@pytest.mark.parametrize("value", [1, None, True, [], ["a"], {}])
@pytest.mark.parametrize("name", ["path", "key", "sha256"])
def test_a_name_that_is_not_text_is_refused(name, value):
    record = two_files()
    record["files"][0][name] = value
    refused(record, "path, key or digest is invalid")


@pytest.mark.parametrize(
    "value", ["", "0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n", "٠" * 64, " " + "0" * 63], ids=ascii
)
@pytest.mark.parametrize("name", ["sha256", "replaces"])
def test_a_digest_is_64_hexadecimal_digits(name, value):
    record = two_files()
    record["files"][0][name] = value
    refused(record, "path, key or digest is invalid|replaces an invalid digest")


@pytest.mark.parametrize(
    "key", ["a\nb", "\x1b[2J", "\0", "\ud800", "a\u202eb", "k" * 2049, "é" * 1025], ids=lambda k: ascii(k)[:12]
)
def test_a_logical_key_is_a_line_of_text_that_is_not_too_long(key):
    record = two_files()
    record["files"][0]["key"] = key
    refused(record, "path, key or digest is invalid")


@pytest.mark.parametrize(
    "creator", [1, None, [], {}, "a\nb", "\x1b[2J", "\ud800", "c" * 201], ids=lambda c: ascii(c)[:12]
)
def test_a_creator_is_a_line_of_text_that_is_not_too_long(creator):
    refused({**two_files(), "creator": creator}, "its creator is not a line of text, or its time")


@pytest.mark.parametrize(
    "created_s", [float("nan"), float("inf"), -float("inf"), -1, 1e300, 253402300800, "nan", "1e999"]
)
def test_a_time_is_one_that_a_calendar_has(created_s):
    refused({**two_files(), "created_s": created_s}, "its creator is not a line of text, or its time")


@pytest.mark.parametrize("created_s", [10**400, None, [], {}, "yesterday"], ids=lambda value: ascii(value)[:12])
def test_a_time_that_is_no_number_is_refused(created_s):
    refused({**two_files(), "created_s": created_s}, "manifest cannot be read")


@pytest.mark.parametrize("part", ["environment", "model_name", "model_version"])
@pytest.mark.parametrize(
    "value", [1, None, [], "a\nb", "\x1b[2J", "\ud800", "k" * 256], ids=lambda value: ascii(value)[:12]
)
def test_a_key_is_of_short_lines_of_text(part, value):
    record = two_files()
    record["key"][part] = value
    refused(record, "its key does not consist of short lines")


def test_a_key_that_is_nested_deeper_than_python_recurses_is_refused():
    text = json.dumps(two_files()).encode()
    deep = text.replace(b'"environment": "environment"', b'"environment": ' + b"[" * 900 + b"]" * 900)
    assert deep != text
    refused(deep, "its key does not consist of short lines|manifest cannot be read")


@pytest.mark.parametrize("name", ["key", "files", "frames", "creator", "created_s"])
def test_a_manifest_that_lacks_something_is_refused(name):
    record = two_files()
    del record[name]
    refused(record, f"manifest cannot be read: .*{name}")


@pytest.mark.parametrize("part", ["files", "frames", "key"])
def test_a_manifest_with_an_unknown_field_is_refused(part):
    record = two_files()
    (record[part] if part == "key" else record[part][0])["unknown"] = 1
    refused(record, "manifest cannot be read: .*unknown")


@pytest.mark.parametrize("value", [None, 1, "", "text", [], [1], ["a"], {}, {"files": []}], ids=ascii)
def test_what_is_no_record_at_all_is_refused(value):
    refused(value, "manifest cannot be read")


@given(st.binary(max_size=200))
def test_what_is_not_json_is_refused(text):
    refused(text, "manifest cannot be read")


# What it may cost.


@pytest.mark.parametrize("seed", range(40))
def test_text_that_is_made_to_be_hard_to_read_is_refused(seed):
    refused(json_tricks(Random(seed), 4 * MIB).encode("utf-8", "surrogatepass"), r"\w")


PARSE_AND_MEASURE = """
import sys
from compile_cache.errors import PackError
from compile_cache.pack.manifest import Limits, parse_manifest

def peak_bytes():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10

one, separator, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
text = ('{"files":[' + separator.join([one] * count) + "]}").encode()
before = peak_bytes()
try:
    parse_manifest(text, Limits())
except PackError:
    print(len(text), peak_bytes() - before)
"""


@pytest.mark.parametrize("one", ["[]", "{}", '{"":0}', '"𐀀"'])
def test_a_manifest_of_millions_of_values_costs_no_more_memory_than_its_text(one):
    count = 32 * MIB // (len(one.encode()) + 1)
    command = [sys.executable, "-c", PARSE_AND_MEASURE, one, ",", str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    text_bytes, more_bytes = map(int, done.stdout.split())
    assert text_bytes <= 33 * MIB
    assert more_bytes < 8 * MIB


@pytest.mark.parametrize(
    "record",
    [
        {**two_files(), "created_s": "x" * MIB},
        {**two_files(), "created_s": "\x1b[2J\n" * 100},
        {**two_files(), "files": [{"\x1b[2J\n" * 100: 1}]},
        {**two_files(), "files": [{"\ud800": 1}]},
        {**two_files(), "frames": [{"x" * MIB: 1}]},
        {**two_files(), "files": [{**two_files()["files"][0], "path": "\x1b[2J" * MIB}]},
        {**two_files(), "files": [{**two_files()["files"][0], "path": "x" * MIB, "size_bytes": -1}]},
        {**two_files(), "files": [{**two_files()["files"][0], "path": "\ud800", "replaces": "x"}]},
        {**two_files(), "key": {"x" * MIB: 1}},
        b"\xff" * MIB,
    ],
    ids=lambda record: ascii(record)[-30:],
)
def test_a_reason_is_a_short_line_whatever_it_quotes(record):
    """It ends in logs, reports and files: with escape codes or a megabyte in it, it would be an attack itself."""
    reason = refused(record, r"\w")
    assert reason.isprintable()
    assert len(reason) < 400


@given(st.data(), json_values | st.sampled_from(ODD_VALUES))
@settings(max_examples=3 * settings().max_examples)
def test_a_manifest_with_anything_anywhere_is_refused_or_holds_together(data, value):
    record = two_files()
    place = data.draw(st.sampled_from(list(places(record))))
    try:
        manifest = parse(put_at(record, place, copy.deepcopy(value)))
    except PackError:
        return
    assert parse_manifest(manifest.to_json(), LIMITS) == manifest
    assert manifest.size_bytes == sum(frame.size_bytes for frame in manifest.frames) == 11


# Paths.


@pytest.mark.parametrize("path", hostile_paths("/outside"), ids=lambda path: ascii(path)[:30])
def test_a_path_that_is_not_plain_is_refused_by_name(path):
    record = two_files()
    record["files"][1]["path"] = path
    refused(record, "is not a plain path inside the cache directory|manifest cannot be read: 'Unterminated string")


@pytest.mark.parametrize(
    "path",
    ["x" * 256, "folder/" + "x" * 256, "é" * 128, "é" * 128 + "/file", "/".join(["𐀀" * 63] * 16)],
    ids=lambda path: f"{len(path)} characters, {len(path.encode())} bytes",
)
def test_a_path_too_long_for_the_file_system_is_a_bad_pack_and_not_a_bad_disk(path):
    """An OSError would end the whole restore, where a PackError costs one pack. Linux allows 255 bytes a part, and 4096
    in all (limits.h)."""
    with pytest.raises(PackError, match="is not a plain path"):
        check_paths([path])


@pytest.mark.parametrize(
    ("one", "other"), [("same", "same"), ("a/Kernel.so", "a/kernel.SO"), ("straße", "strasse")], ids=ascii
)
def test_a_path_that_is_there_twice_is_refused(one, other):
    with pytest.raises(PackError, match="occurs twice"):
        check_paths([one, "between", other])


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b", "a"], ["x/a", "x/A/b/c"], ["a", "a-b", "a/b"]])
def test_a_path_that_is_a_file_and_a_folder_is_refused(paths):
    with pytest.raises(PackError, match="is a file and a folder at once"):
        check_paths(paths)


def test_plain_paths_are_let_through():
    check_paths(["a", "b/a", "b/c/a", ".hidden/..double", "b c", "é/~", "-rf", "*", "$HOME", "%2e%2e"])
    check_paths(["d/" * 31 + "f", "x" * 255, "/".join(["y" * 101] * 10)])


@given(st.lists(st.text(st.sampled_from("aAb./\\~é\0"), max_size=6), max_size=6))
@settings(max_examples=5 * settings().max_examples)
def test_paths_that_are_let_through_can_all_be_written_and_are_where_they_say(paths):
    try:
        check_paths(paths)
    except PackError:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(path)
        assert {path: (folder / path).resolve().read_text() for path in paths} == {path: path for path in paths}
        assert all(folder in (folder / path).resolve().parents for path in paths)


CHECK_DEEP_PATHS = """
from compile_cache.pack.manifest import check_paths
def peak_bytes():
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10
paths = [f"{number:05}/" + "x" * 31 + "/" + ("d" * 31 + "/") * 29 + "f" for number in range(30_000)]
before = peak_bytes()
check_paths(paths)
print(peak_bytes() - before)
"""


def test_deep_paths_cost_no_more_memory_than_they_are_long():
    """30,000 paths of 30 MB are in folders whose paths together have 450 MB."""
    command = [sys.executable, "-c", CHECK_DEEP_PATHS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 128 * MIB
