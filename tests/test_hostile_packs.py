"""Hostile packs are refused with a reason, and what a manifest states is believed only where it can do no harm."""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path

import msgspec
import pytest
from hostile_packs import (
    LIMITS,
    MIB,
    ODD_FRAMES,
    ODD_VALUES,
    OURS,
    TABLE,
    THEIRS,
    Draft,
    Hostile,
    encode,
    framed,
    places,
    put_at,
    record_of,
    restore,
    small_draft,
    zeros,
    zstd_frame,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import read_files, write_files

from compile_cache.errors import PackError
from compile_cache.storage.pack.manifest import check_paths, parse_manifest
from compile_cache.storage.pack.signing import trusted_keys

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def reason_to_refuse(draft: Draft, folder: Path | None) -> str:
    with pytest.raises(PackError) as refusal:
        restore(*draft.put_together(), folder, LIMITS, trusted_keys(draft.trusted))
    return str(refusal.value)


def assert_fit_to_be_shown(reason: str) -> None:
    """It ends in logs and reports: with escape codes or a megabyte in it, it would be an attack itself."""
    assert reason.isprintable()
    assert 0 < len(reason) < 400


@pytest.mark.parametrize("row", TABLE, ids=lambda row: ascii(row.name)[:60])
def test_a_hostile_pack_is_refused_whether_it_is_unpacked_or_only_verified(tmp_path, row: Hostile):
    draft = small_draft(is_signed=row.is_signed)
    row.change(draft)
    reason = reason_to_refuse(draft, None)
    assert reason_to_refuse(draft, tmp_path / "inside") == reason
    with pytest.raises(PackError, match=row.words):
        raise PackError(reason)
    assert_fit_to_be_shown(reason)
    assert {path for path in read_files(tmp_path) if not path.startswith("inside/")} == set()


@pytest.mark.parametrize("frame", ODD_FRAMES.values(), ids=ODD_FRAMES)
def test_of_an_odd_frame_only_the_content_of_its_file_is_written(tmp_path, frame):
    draft = small_draft()
    framed(frame)(draft)
    restore(*draft.put_together(), tmp_path, LIMITS)
    assert read_files(tmp_path) == {"a": b"content"}


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_pack_of_another_writer_is_read(tmp_path, is_signed):
    """The layout is what the module says it is, and each row of the table changes a sound pack."""
    draft = small_draft(is_signed=is_signed)
    head = restore(*draft.put_together(), tmp_path / "inside", LIMITS, trusted_keys(draft.trusted))
    assert read_files(tmp_path / "inside") == {"a/file": b"content", "b": b"more"}
    assert (head.manifest.creator, head.signed_by) == ("the test", OURS.public_key if is_signed else None)


def assert_refused_or_unchanged(name: str, content: bytes) -> None:
    """The content is what the name stands for, and some bits of a zstd frame mean nothing."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            restore(name, content, Path(folder), trusted=trusted_keys([OURS.public_key]))
        except PackError as error:
            assert_fit_to_be_shown(str(error))
        else:
            assert read_files(Path(folder)) == {"a/file": b"content", "b": b"more"}


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing():
    name, content = small_draft(is_signed=True).put_together()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        assert_refused_or_unchanged(name, bytes(flipped))


@given(st.integers(0, 1000), st.integers(0, 1000), st.binary(max_size=1000))
def test_other_bytes_anywhere_are_refused_or_change_nothing(start, length, replacement):
    name, content = small_draft(is_signed=True).put_together()
    assert_refused_or_unchanged(name, content[:start] + replacement + content[start + length :])


# Manifests.


@given(st.data(), json_values | st.sampled_from(ODD_VALUES))
@settings(max_examples=3 * settings().max_examples)
def test_a_manifest_with_anything_anywhere_is_refused_or_holds_together(data, value):
    record = record_of(("a/file", b"content"), ("b", b"more"))
    place = data.draw(st.sampled_from(list(places(record))))
    try:
        manifest = parse_manifest(encode(put_at(record, place, copy.deepcopy(value))), LIMITS)
    except PackError as error:
        assert_fit_to_be_shown(str(error))
        return
    assert parse_manifest(msgspec.json.encode(manifest), LIMITS) == manifest
    assert all(file.size_bytes >= 0 for file in manifest.files)


# Signatures.


BOMB = zstd_frame(*zeros(100 * MIB), content_size=100 * MIB)


@pytest.mark.parametrize("content", [BOMB, b"no frame of zstd"], ids=["a bomb", "not compressed"])
@pytest.mark.parametrize(
    ("sign", "words"),
    [
        (lambda _: b"", "not signed"),
        (THEIRS.sign, "not trusted"),
        (lambda _: OURS.sign(b"another"), "does not match"),
    ],
    ids=["unsigned", "of a stranger", "of another pack"],
)
def test_nothing_is_decompressed_before_a_trusted_key_has_signed_it(content, sign, words, monkeypatch):
    monkeypatch.setattr("zstandard.ZstdDecompressor", None)
    draft = small_draft(is_signed=True)
    draft.sign, draft.head = sign, {"stored": content}
    assert re.search(words, reason_to_refuse(draft, None))


def test_nothing_is_decompressed_that_does_not_match_its_name(monkeypatch):
    monkeypatch.setattr("zstandard.ZstdDecompressor", None)
    draft = small_draft()
    draft.name = "0" * 64 + ".pack"
    assert "does not match its name" in reason_to_refuse(draft, None)


# Paths.


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
        write_files(folder, {path: path.encode() for path in paths})
        assert {path: (folder / path).resolve().read_text() for path in paths} == {path: path for path in paths}
        assert all(folder in (folder / path).resolve().parents for path in paths)
