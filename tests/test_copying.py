"""Copying: only what was verified arrives, whole, once, and whatever interrupts it."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import damage, put_pack, put_record
from machines import RULES, Watched, read_files

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.storage.copy import Copied, copy_versions
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, generate_keys, trusted_keys
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.storage.stores.local import LocalStore

MIB = 1 << 20


@pytest.fixture
def source(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "source")


@pytest.fixture
def target(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "target")


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """Where temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def noise(size_bytes: int) -> bytes:
    """What cannot be compressed."""
    return random.Random(size_bytes).randbytes(size_bytes)


def copy(source: ObjectStore, target: ObjectStore, rules: Rules = RULES) -> Copied:
    return copy_versions(source, target, lambda key: True, rules)


# What arrives.


def test_packs_and_records_arrive_as_they_are_from_and_in_a_store_of_each_kind(source, target, store, key, environment):
    assert copy(source, store) == Copied()
    names = [put_pack(source, key), put_pack(source, replace(key, model_version="2"), {"large": noise(5 * MIB)})]
    put_record(source, environment)
    for here, there in ((source, store), (store, target)):
        copied = copy(here, there)
        assert (copied.packs.keys(), copied.present, copied.refused) == ({*names}, {}, {})
    arrived = [entry.name for entry in target.list("v3/")]
    assert {*arrived} == {*names, f"v3/{environment.digest}/environment.json"}
    assert all(len({place.read(name, 0, 8 * MIB) for place in (target, store, source)}) == 1 for name in arrived)


def test_only_packs_that_are_wanted_are_copied_and_other_objects_stay(source, target, key):
    wanted = put_pack(source, key)
    put_pack(source, replace(key, model_version="other"))
    put_pack(source, replace(key, environment="0" * 32))
    for other in ("used-2026-11-20", "notes.txt"):
        source.put(key.prefix + other, b"")
    copied = copy_versions(source, target, lambda k: k == key, RULES)
    assert list(copied.packs) == [entry.name for entry in target.list("")] == [wanted]


def test_packs_of_a_version_arrive_in_their_order(source, target, key):
    names = [put_pack(source, key, {"a": bytes([number])}) for number in range(10)]
    copy(source, target)
    assert [entry.name for entry in target.list("")] == names


def test_a_pack_cut_in_the_target_is_copied_anew(tmp_path, source, target, key):
    name = put_pack(source, key)
    target.put(name, b"half")
    assert list(copy(source, target).packs) == [name]
    assert target.read(name, 0, 8 * MIB) == source.read(name, 0, 8 * MIB)


# What does not.


@pytest.mark.parametrize("what", ["damaged", "misplaced", "unsigned", "too large"])
def test_a_pack_that_a_boot_refuses_is_not_copied_but_named_and_the_others_arrive(tmp_path, source, target, key, what):
    private, public = generate_keys()
    sound = put_pack(source, key, {"a": b"1"}, Signer(private))
    bad = put_pack(source, key, {"large": noise(9 * MIB)}, None if what == "unsigned" else Signer(private))
    if what == "damaged":
        damage(tmp_path / "source", bad)
    if what == "misplaced":
        source.delete(bad)
        bad = replace(key, model_version="other").prefix + sound.rpartition("/")[2]
        source.put(bad, tmp_path / "source" / sound)
    read_bytes: list[int] = []
    reads = Watched(tmp_path / "source", read=lambda name, start, size_bytes: read_bytes.append(size_bytes))
    limits = Limits(size_bytes=MIB) if what == "too large" else Limits()
    copied = copy(reads, target, Rules(limits, trusted_keys([public])))
    assert [(name, refused.is_final) for name, refused in copied.refused.items()] == [(bad, True)]
    assert [entry.name for entry in target.list("")] == [sound]
    assert (sum(read_bytes) > 9 * MIB) == (what == "damaged"), "what its head refuses is not read"


def test_a_record_that_is_not_the_environments_own_is_not_copied(source, target, key):
    name = put_pack(source, key)
    source.put(key.environment_prefix + "environment.json", b"forged")
    assert list(copy(source, target).packs) == [name]
    assert [entry.name for entry in target.list("")] == [name]


# What interrupts.


def test_a_pack_that_cannot_be_read_is_named_and_the_others_arrive(tmp_path, source, target, key):
    hanging, sound = put_pack(source, key, {"a": b"1"}), put_pack(source, key, {"a": b"2"})

    def hang(name: str, start: int, size_bytes: int) -> None:
        if name == hanging:
            raise StoreUnavailable("it hangs")

    copied = copy(Watched(tmp_path / "source", read=hang), target)
    assert [(name, refused.is_final) for name, refused in copied.refused.items()] == [(hanging, False)]
    assert [entry.name for entry in target.list("")] == [sound]


def test_an_interrupted_copy_leaves_whole_packs_and_no_temporary_files(tmp_path, source, target, key, temporary):
    first = put_pack(source, key, {"large": noise(5 * MIB)})
    second = put_pack(source, key, {"large": noise(9 * MIB)})

    def interrupt(name: str, start: int, size_bytes: int) -> None:
        if name == second and start:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy(Watched(tmp_path / "source", read=interrupt), target)
    assert read_files(tmp_path / "target") == {first: source.read(first, 0, 8 * MIB)}
    assert list(temporary.iterdir()) == []
    copied = copy(source, target)
    assert (list(copied.packs), list(copied.present)) == ([second], [first])


def test_a_target_that_fails_ends_the_copy_and_has_nothing_half_written(source, tmp_path, key, temporary):
    put_pack(source, key)
    (tmp_path / "target").write_text("a file, where a folder should be")
    with pytest.raises(StoreError):
        copy(source, LocalStore(tmp_path / "target"))
    assert list(temporary.iterdir()) == []


# What changes meanwhile.


def test_a_pack_merged_meanwhile_is_named_and_the_next_copy_has_what_it_was_merged_into(tmp_path, source, target, key):
    kept, first, second = (put_pack(source, key, {name: name.encode()}) for name in "0ab")
    merged: list[str] = []

    def merge(name: str, start: int, size_bytes: int) -> None:
        if name == second and not merged:
            merged.append(put_pack(source, key, {"a": b"a", "b": b"b"}))
            for old in (first, second):
                source.delete(old)

    copied = copy(Watched(tmp_path / "source", read=merge), target)
    assert (copied.packs.keys(), copied.refused.keys()) == ({kept, first}, {second})
    assert copied.refused[second].is_final is False
    assert copy(source, target).packs.keys() == {*merged}
    assert {entry.name for entry in target.list("")} == {kept, first, *merged}


def test_a_store_where_packs_vanish_all_the_time_is_given_up(tmp_path, source, target, key):
    put_pack(source, key, {"number": b"0"})
    listings = []

    def vanish(name: str, start: int, size_bytes: int) -> None:
        listings.append(name)
        put_pack(source, key, {"number": bytes([len(listings)])})
        source.delete(name)

    (refused,) = copy(Watched(tmp_path / "source", read=vanish), target).refused.values()
    assert refused.is_final is False
    assert target.list("") == []
