"""CompileCache: what one machine publishes another restores, and what is wrong in a store costs only itself."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from machines import Machine

from compile_cache.errors import ObjectNotFound, PackError, StoreError, StoreUnavailable
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import environment_from_record
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import PacksOfKey, fetch
from compile_cache.storage.pack.format import Pack, Source, write_pack
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, TrustedKeys, generate_keys
from compile_cache.storage.publish import CompileCache
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, StoredObject, Stores
from compile_cache.storage.stores.local import LocalStore

MIB = 1 << 20
LIMITS = Limits(size_bytes=64 * MIB)
COLD = {
    "fxgraph/ab/fabc/one": b"a graph",
    "aotautograd/aabc/one": b"an entry",
    "ab/kernel.so": b"\x7fELF" * 1000,
    "ab/wrapper.py": b"x = 1",
    "autotune/best.best_config": b"{}",
    "empty": b"",
}


class Meddled:
    """A store behind which someone meddles after each listing."""

    def __init__(self, store: ObjectStore, meddle: Callable[[Sequence[StoredObject]], None]) -> None:
        self._store = store
        self._meddle = meddle
        self.location, self.read, self.put, self.delete = store.location, store.read, store.put, store.delete

    def list(self, prefix: str) -> Sequence[StoredObject]:
        found = self._store.list(prefix)
        self._meddle(found)
        return found


@pytest.fixture
def machine(tmp_path, key, environment) -> Callable[..., Machine]:
    """Makes machines that use the store given."""
    numbers = itertools.count()

    def make(store: ObjectStore, limits: Limits = LIMITS, key: CacheKey = key, **keys: object) -> Machine:
        directory = CacheDirectory.claim(tmp_path / f"machine-{next(numbers)}")
        stores = Stores(store, store)
        return Machine(CompileCache(stores, key, environment, directory, Rules(limits, **keys)), directory)

    return make


def stored(store: ObjectStore) -> dict[str, bytes]:
    return {entry.name: store.read(entry.name) for entry in store.list("v1/")}


def tick(store: ObjectStore) -> None:
    """Poll until the store's own clock tells what is put next from what is there: S3's has whole seconds."""
    newest = max(entry.modified_s for entry in store.list("v1/"))
    while True:
        store.put("clock", b"now")
        if store.list("clock")[0].modified_s > newest:
            return
        time.sleep(0.02)


def filled(machine: Machine, files: dict[str, bytes] = COLD) -> Machine:
    """A machine that has published these files as one pack."""
    machine.write(files)
    machine.publish()
    return machine


def published_five(publisher: Machine) -> Machine:
    """A machine that has published five packs."""
    for number in range(5):
        publisher.write({f"{number}.so": b"kernel" * number, f"fxgraph/ab/f{number}/entry": b"graph"})
        publisher.publish()
    return publisher


def packed_paths(packs: Sequence[Pack]) -> list[str]:
    return [file.path for pack in packs for file in pack.manifest.files]


# What one publishes another restores.


def test_another_machine_restores_the_same_files(store, machine):
    first, second = machine(store), machine(store)
    first.write(COLD)
    (pack,) = first.publish()
    fetched = second.restore()
    assert second.files() == COLD
    assert (len(fetched.packs), fetched.refused, fetched.stored_bytes) == (1, (), pack.stored_bytes)


def test_files_of_several_megabytes_come_through(store, machine):
    large = {"large.so": os.urandom(9 * MIB), "small.so": b"small"}
    filled(machine(store), large)
    assert machine(store).restored() == large


def test_an_empty_store_restores_nothing(store, machine):
    fetched = machine(store).restore()
    assert (fetched.packs, fetched.refused, fetched.stored_bytes) == ((), (), 0)


def test_an_empty_directory_publishes_nothing(local, machine):
    assert machine(local).publish() == ()
    assert stored(local) == {}


def test_installing_says_how_many_files(local, machine):
    filled(machine(local))
    second = machine(local)
    assert second.cache.install(second.cache.fetch()) == len(COLD)


def test_fetching_alone_puts_nothing_into_the_cache_directory(local, machine):
    filled(machine(local))
    second = machine(local)
    second.cache.fetch()
    assert second.files() == {}


def test_packs_are_listed_by_their_key_oldest_first_and_nothing_else_is(store, machine, key):
    first = machine(store)
    packs = []
    for number in range(2):
        first.write({f"{number}.so": b"kernel"})
        packs += first.publish()
        tick(store)
    store.put(key.prefix + "notes.txt", b"")
    store.put(f"{key.environment_prefix}another/model/{'0' * 64}.pack", b"")
    assert [entry.name for entry in first.cache.packs.list()] == [key.prefix + pack.name for pack in packs]


def test_keys_do_not_see_each_other(local, machine, key):
    filled(machine(local))
    other = machine(local, key=replace(key, model_version="version-2"))
    assert other.restore().packs == ()
    assert other.files() == {}


def test_the_environments_record_is_stored_beside_the_packs(store, machine, key, environment):
    filled(machine(store))
    record = json.loads(store.read(f"{key.environment_prefix}environment.json"))
    assert environment_from_record(record) == environment


def test_a_forged_environment_record_changes_nothing(local, machine, key):
    filled(machine(local))
    second = machine(local)
    local.put(f"{key.environment_prefix}environment.json", b"forged")
    assert second.restored() == COLD


# Only what is new is published.


def test_what_was_published_is_not_published_again(local, machine):
    first = filled(machine(local))
    assert first.publish() == ()


def test_what_was_restored_is_not_published_again(store, machine):
    filled(machine(store))
    second = machine(store)
    second.restore()
    before = stored(store)
    assert second.publish() == ()
    assert stored(store) == before


def test_only_new_logical_keys_are_sent_the_second_time(store, machine):
    filled(machine(store))
    second, third = machine(store), machine(store)
    second.restore()
    new = {"fxgraph/cd/fcde/one": b"another graph", "cd/kernel.so": b"another kernel"}
    second.write(new)
    packs = second.publish()
    assert sorted(packed_paths(packs)) == sorted(new)
    assert third.restored() == {**COLD, **new}


def test_other_bytes_under_a_graphs_logical_key_are_not_published(local, machine):
    """As a second cold compile makes them: the same lookup key, another file name and content."""
    filled(machine(local))
    second = machine(local)
    second.write({"fxgraph/ab/fabc/two": b"the same graph, other bytes", "aotautograd/aabc/two": b"other bytes"})
    assert second.publish() == ()


def test_all_files_of_a_new_logical_key_are_published_together(local, machine):
    files = {"fxgraph/ab/fabc/one": b"for small inputs", "fxgraph/ab/fabc/two": b"for large inputs"}
    filled(machine(local), files)
    assert machine(local).restored() == files


def test_a_file_touched_but_not_changed_is_not_published(local, machine):
    first = filled(machine(local))
    os.utime(first.directory.path / "ab/kernel.so", ns=(1, 1))
    assert first.publish() == ()


def test_a_file_removed_after_publishing_is_not_missed(local, machine):
    first = filled(machine(local))
    (first.directory.path / "ab/kernel.so").unlink()
    assert first.publish() == ()


def test_what_failed_to_be_published_is_staged_again(local, machine):
    first = machine(local)
    first.write(COLD)
    assert packed_paths(first.cache.stage((), "")) == packed_paths(first.cache.stage((), ""))


def test_withheld_paths_are_never_published(local, machine):
    withheld = {"ab/kernel.so", "fxgraph/ab/fabc/one"}
    first, second = machine(local), machine(local)
    first.write(COLD)
    assert not withheld & set(packed_paths(first.publish(withheld)))
    first.write({"ab/kernel.so": b"changed"})
    assert first.publish(withheld) == ()
    second.restore()
    assert second.files().keys() == COLD.keys() - withheld


def test_the_most_valuable_files_come_first(local, machine):
    """Graph entries, then what a compiler made, then the rest: if time runs out, the first are in the store."""
    first = machine(local)
    first.write(COLD)
    assert packed_paths(first.publish()) == [
        "aotautograd/aabc/one",
        "fxgraph/ab/fabc/one",
        "ab/kernel.so",
        "ab/wrapper.py",
        "autotune/best.best_config",
        "empty",
    ]


def test_much_is_published_as_several_packs_the_most_valuable_first(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.publish._SMALLEST_PART_BYTES", 3000)
    first, second = machine(local), machine(local)
    first.write({f"{number}.json": b"rest" * 1000 for number in range(4)})
    first.write({"b.so": b"kernel" * 1000, "fxgraph/ab/fabc/one": b"graph" * 1000})
    packs = first.publish()
    assert packed_paths(packs) == ["fxgraph/ab/fabc/one", "b.so", *(f"{number}.json" for number in range(4))]
    assert [len(pack.manifest.files) for pack in packs] == [1, 2, 3]
    assert second.restored() == first.files()


# A file that is changed in place.


def test_a_file_changed_in_place_is_published_with_what_it_replaces(local, machine):
    first = filled(machine(local))
    first.write({"autotune/best.best_config": b'{"config": 1}'})
    (pack,) = first.publish()
    (file,) = pack.manifest.files
    assert (file.path, file.replaces) == ("autotune/best.best_config", hashlib.sha256(b"{}").hexdigest())


def test_the_newest_content_is_restored_after_any_number_of_changes(store, machine):
    filled(machine(store))
    last = machine(store)
    for step in range(3):
        tick(store)
        booted = machine(store)
        booted.restore()
        booted.write({"autotune/best.best_config": b"step" * (step + 1)})
        booted.publish()
    assert last.restored() == {**COLD, "autotune/best.best_config": b"step" * 3}
    assert last.publish() == ()


def test_one_machine_may_change_a_file_many_times(local, machine):
    first, second = machine(local), machine(local)
    for content in (b"1", b"22", b"333", b"1"):
        first.write({"best.best_config": content})
        assert len(first.publish()) == 1
        tick(local)
    assert second.restored() == {"best.best_config": b"1"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_newest_content_wins_in_whatever_order_the_store_lists_the_packs(local, machine, key, tmp_path, order):
    """Clocks of stores are coarse (S3: whole seconds) or differ between writers; what replaces what does not."""
    first, second = machine(local), machine(local)
    names = []
    for content in (b"1", b"22", b"333"):
        first.write({"best.best_config": content})
        (pack,) = first.publish()
        names.append(pack.name)
    for time_s, number in enumerate(order, start=1_000_000):
        os.utime(tmp_path / "store" / key.prefix / names[number], (time_s, time_s))
    assert second.restored() == {"best.best_config": b"333"}


def test_of_two_changes_of_the_same_content_the_first_wins(store, machine):
    filled(machine(store), {"best.best_config": b"{}"})
    tick(store)
    one, other, last = machine(store), machine(store), machine(store)
    for booted in (one, other):
        booted.restore()
    for booted, content in ((one, b"one"), (other, b"other")):
        booted.write({"best.best_config": content})
        booted.publish()
        tick(store)
    assert last.restored() == {"best.best_config": b"one"}


def test_a_change_between_staging_and_publishing_is_published_next(local, machine):
    first, second = machine(local), machine(local)
    first.write({"best.best_config": b"staged"})
    (pack,) = first.cache.stage((), "")
    first.write({"best.best_config": b"changed before it was published"})
    first.cache.publish(pack)
    tick(local)
    first.publish()
    assert second.restored() == {"best.best_config": b"changed before it was published"}


# Two packs for the same thing.


def test_of_two_packs_with_a_logical_key_the_first_wins(store, machine):
    one, other, last = machine(store), machine(store), machine(store)
    one.write({"fxgraph/ab/fabc/one": b"one", "kernel.so": b"one"})
    other.write({"fxgraph/ab/fabc/other": b"other", "kernel.so": b"other", "only.so": b"other"})
    one.publish()
    tick(store)
    other.publish()
    assert last.restored() == {"fxgraph/ab/fabc/one": b"one", "kernel.so": b"one", "only.so": b"other"}


@pytest.mark.parametrize(("one", "other"), [("x", "x/file"), ("x/file", "x")])
def test_of_two_packs_whose_paths_exclude_each_other_the_first_wins(local, machine, one, other):
    first, second, last = machine(local), machine(local), machine(local)
    first.write({one: b"first", "kept.so": b"first"})
    second.write({other: b"second", "also-kept.so": b"second"})
    first.publish()
    tick(local)
    second.publish()
    assert last.restored() == {one: b"first", "kept.so": b"first", "also-kept.so": b"second"}


# What is wrong in a store costs only itself.


def damage_flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


DAMAGES = {
    "a flipped bit": damage_flip,
    "cut short": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "something else": lambda content: b"something else" * 100,
}


def published_pair(store: ObjectStore, machine: Callable[..., Machine]) -> tuple[str, str]:
    """The names of two packs in the store: of COLD, and of one more kernel."""
    first = machine(store)
    first.write(COLD)
    (one,) = first.publish()
    first.write({"more.so": b"more"})
    (other,) = first.publish()
    return first.cache.key.prefix + one.name, first.cache.key.prefix + other.name


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_pack_is_refused_by_name_and_the_others_are_used(store, machine, damage):
    bad, _ = published_pair(store, machine)
    store.put(bad, damage(store.read(bad)))
    before = stored(store)
    booted = machine(store)
    fetched = booted.restore()
    assert booted.files() == {"more.so": b"more"}
    assert [refused.name for refused in fetched.refused] == [bad]
    assert stored(store) == before


def test_what_a_refused_pack_had_is_published_again(store, machine):
    bad, _ = published_pair(store, machine)
    store.put(bad, b"damaged")
    booted, last = machine(store), machine(store)
    booted.restore()
    booted.write(COLD)
    assert sorted(packed_paths(booted.publish())) == sorted(COLD)
    assert len(last.restore().refused) == 1
    assert last.files() == {**COLD, "more.so": b"more"}


def test_a_pack_for_another_key_is_refused_by_both_keys(store, machine, key, tmp_path):
    published_pair(store, machine)
    (tmp_path / "kernel.so").write_bytes(b"foreign")
    another = replace(key, model_version="version-2")
    pack = write_pack(tmp_path, another, [Source(tmp_path / "kernel.so", "foreign.so", "foreign.so")], "")
    store.put(key.prefix + pack.name, pack.local)
    booted = machine(store)
    (refused,) = booted.restore().refused
    assert refused.name == key.prefix + pack.name
    assert refused.reason == f"it is for {another.prefix}, not for {key.prefix}"
    assert booted.files() == {**COLD, "more.so": b"more"}


@pytest.mark.parametrize(
    "name",
    ["notes.pack", ".pack", "..pack", "x" * 250 + ".pack", "backup/{pack}"],
    ids=["another name", "no name", "no name but a dot", "a long name", "a copy in a folder"],
)
def test_an_object_with_an_odd_name_costs_only_itself(local, machine, name):
    published, _ = published_pair(local, machine)
    prefix, _, pack = published.rpartition("/")
    local.put(f"{prefix}/{name.format(pack=pack)}", local.read(published))
    booted = machine(local)
    assert booted.restored() == {**COLD, "more.so": b"more"}


def test_a_pack_larger_than_allowed_is_refused_without_being_fetched(store, machine):
    large, _ = published_pair(store, machine)
    size_bytes = len(store.read(large))
    booted = machine(store, limits=Limits(size_bytes=size_bytes - 1))
    (refused,) = booted.restore().refused
    assert (refused.name, refused.reason) == (large, f"it has {size_bytes} bytes; {size_bytes - 1} are allowed")
    assert booted.files() == {"more.so": b"more"}


def test_a_pack_that_unpacks_to_more_than_allowed_is_refused(local, machine):
    large, _ = published_pair(local, machine)
    unpacked_bytes = sum(map(len, COLD.values()))
    booted = machine(local, limits=Limits(size_bytes=unpacked_bytes - 1))
    (refused,) = booted.restore().refused
    assert refused.name == large
    assert refused.reason == f"it unpacks to {unpacked_bytes} bytes; {unpacked_bytes - 1} are allowed"
    assert booted.files() == {"more.so": b"more"}


def test_a_pack_that_disappears_after_the_listing_costs_only_itself(store, machine):
    gone, _ = published_pair(store, machine)
    booted = machine(Meddled(store, lambda _: store.delete(gone)))
    fetched = booted.restore()
    assert booted.files() == {"more.so": b"more"}
    assert all(refused.name == gone for refused in fetched.refused)


def test_a_store_that_cannot_be_listed_is_an_error_of_the_store(s3_bucket, machine):
    from compile_cache.storage.stores.s3 import S3Store

    booted = machine(S3Store("no-such-bucket", ""))
    with pytest.raises(ObjectNotFound):
        booted.cache.fetch()


# An abandoned fetch.


def test_an_abandoned_fetch_fails_and_uses_nothing(store, machine):
    published_pair(store, machine)
    booted, abandoned = machine(store), threading.Event()
    abandoned.set()
    with pytest.raises(StoreError, match="the time is up"):
        booted.cache.fetch(abandoned)
    assert booted.files() == {}


def test_a_fetch_abandoned_in_the_middle_of_a_pack_fails_and_blames_no_pack(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.fetch.WHOLE_PACK_BYTES", 100)
    monkeypatch.setattr("compile_cache.storage.stores.transfer.READ_BYTES", 100)
    first = filled(machine(local), {"kernel.so": os.urandom(1000)})
    abandoned, reads = threading.Event(), []

    class AbandonedOnTheThirdRead(LocalStore):
        def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
            reads.append(start)
            if len(reads) == 3:
                abandoned.set()
            return super().read(name, start, size_bytes)

    booted = machine(AbandonedOnTheThirdRead(Path(local.location)))
    with pytest.raises(StoreError, match="the time is up"):
        booted.cache.fetch(abandoned)
    assert booted.files() == {}
    assert len(reads) == 3
    assert booted.restore().refused == ()
    assert booted.files() == first.files()


# What many boots do.


def test_only_the_frames_that_are_needed_are_read(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.fetch.WHOLE_PACK_BYTES", 4096)
    one, other, booted = machine(local), machine(local), machine(local)
    large = {f"{number}.so": os.urandom(MIB) for number in range(3)}
    one.write(large)
    other.write({**large, "fxgraph/ab/fabc/other": b"other"})
    (late,) = other.cache.stage((), "the test")
    (first,) = one.publish()
    tick(local)
    other.cache.publish(late)
    fetched = booted.restore()
    assert booted.files() == other.files()
    assert fetched.stored_bytes < first.stored_bytes + 10_000


def test_a_pack_that_adds_nothing_is_not_read_beyond_its_head(local, machine):
    one, other, booted = machine(local), machine(local), machine(local)
    one.write(COLD)
    other.write({**COLD, "fxgraph/ab/fabc/one": b"another compile of the same graph"})
    (late,) = other.cache.stage((), "the test")
    one.publish()
    tick(local)
    other.cache.publish(late)
    fetched = booted.restore()
    assert len(fetched.packs) == 1
    assert len(fetched.superfluous) == 1
    assert booted.files() == one.files()


def test_what_another_boot_has_published_meanwhile_is_not_published_again(store, machine):
    one, other = machine(store), machine(store)
    one.restore()
    other.restore()
    one.write(COLD)
    other.write({**COLD, "fxgraph/ab/fabc/one": b"other bytes", "own.so": b"own"})
    staged = other.cache.stage((), "the test")
    one.publish()
    other.cache.refresh()
    assert any(other.cache.is_superseded(pack) for pack in staged)
    assert packed_paths(other.publish()) == ["own.so"]


def test_a_pack_that_vanishes_during_a_fetch_is_found_where_it_was_merged_into(local, machine):
    """A reader that loses the race against a merge lists again."""
    publisher = published_five(machine(local))

    class Merged(LocalStore):
        is_done = False

        def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
            if not self.is_done and len(lists) == 1:
                self.is_done = True
                publisher.cache.merge("the test")
            return super().read(name, start, size_bytes)

        def list(self, prefix: str) -> Sequence[StoredObject]:
            lists.append(prefix)
            return super().list(prefix)

    lists: list[str] = []
    booted = machine(Merged(Path(local.location)))
    booted.restore()
    assert len(local.list("v1/")) == 2  # the merged pack and the environment's record
    assert booted.restored() == publisher.files()


def test_a_store_that_does_not_answer_makes_no_pack_a_refused_one(local, machine):
    published_pair(local, machine)
    answers = []

    class Silent(LocalStore):
        def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
            if not answers:
                raise StoreError("no answer")
            return super().read(name, start, size_bytes)

    booted = machine(Silent(Path(local.location)))
    assert [refused.is_final for refused in booted.restore().refused] == [False, False]
    answers.append("now")
    assert booted.restore().refused == ()
    assert booted.files() == {**COLD, "more.so": b"more"}


def test_all_packs_together_may_unpack_to_no_more_than_is_allowed(local, machine):
    published_pair(local, machine)
    both = sum(map(len, COLD.values())) + len(b"more")
    booted = machine(local, limits=Limits(size_bytes=both - 1))
    (refused,) = booted.restore().refused
    assert "all packs together unpack to more than" in refused.reason
    assert booted.files() == COLD


SMALL = {f"k{number}.so": b"kernel" for number in range(30)}
LARGE = {f"l{number}.so": os.urandom(MIB) for number in range(4)}
UNSTORABLE = {
    "case": ({**COLD, "AB/kernel.so": b"other", "Empty": b""}, LIMITS, 2),
    "a file as a folder": ({**COLD, "EMPTY/a": b"1", "Ab/WRAPPER.py/x": b"2"}, LIMITS, 2),
    "a deep path": ({**COLD, "d/" * 32 + "f": b""}, LIMITS, {"d/" * 32 + "f"}),
    "a long path": ({**COLD, "/".join(["y" * 205] * 5): b""}, LIMITS, {"/".join(["y" * 205] * 5)}),
    "a folder's name": ({**COLD, "a\nb/k.so": b"", "a\\b/k.so": b""}, LIMITS, {"a\nb/k.so", "a\\b/k.so"}),
    "one large file": ({**COLD, **LARGE}, Limits(size_bytes=MIB - 1), LARGE.keys()),
    "all bytes": (LARGE, Limits(size_bytes=3 * MIB + 20_000), 1),
    "a pack's bytes": (LARGE, Limits(size_bytes=3 * MIB), 2),
    "files": (SMALL, Limits(files=10), 20),
    "the manifest": (SMALL, Limits(manifest_bytes=4000), range(1, 25)),
    "the manifest, not ASCII": ({**SMALL, "größe.so": b""}, Limits(manifest_bytes=9000), range(1, 29)),
}


@pytest.mark.parametrize("is_in_two_packs", [False, True])
@pytest.mark.parametrize("case", UNSTORABLE)
def test_what_a_boot_would_refuse_is_left_out_and_named_and_the_rest_is_restored(local, machine, case, is_in_two_packs):
    files, limits, expected = UNSTORABLE[case]
    publisher = machine(local, limits=limits)
    paths = sorted(files, key=lambda path: path not in COLD)
    for part in [paths[: len(paths) // 2], paths] if is_in_two_packs else [paths]:
        publisher.write({path: files[path] for path in part})
        publisher.publish()
    booted = machine(local, limits=limits)
    fetched, restored = booted.restore(), booted.files()
    left_out = files.keys() - restored.keys()
    assert restored == {path: files[path] for path in restored}
    assert (fetched.refused, bool(restored)) == ((), True)
    is_expected = len(left_out) in expected if isinstance(expected, range) else expected in (left_out, len(left_out))
    assert is_expected, left_out
    assert sum(int(line.partition(" ")[0]) for line in publisher.cache.left_out) == len(left_out)
    assert any(repr(path)[:200] in line for path in left_out for line in publisher.cache.left_out)
    assert publisher.publish_after_a_look() == [] or isinstance(expected, range)
    assert machine(local, limits=limits).restore().refused == ()


def test_packs_that_reach_the_limits_together_leave_the_rest_out_and_get_no_more(local, machine):
    """No boot could read another one: each would publish the same again."""
    for name in ("a", "b", "c"):
        writer = machine(local)
        writer.write({f"{name}{number}.so": b"kernel" for number in range(4)})
        writer.publish()
        tick(local)
    booted = machine(local, limits=Limits(files=8))
    (refused,) = booted.restore().refused
    assert len(booted.files()) == 8
    assert "leave no room for it" in refused.reason
    assert not refused.is_final
    booted.write({"new.so": b"new"})
    assert booted.publish() == ()
    for name in [*booted.cache.packs.known]:
        local.delete(name)
    booted.cache.refresh()
    assert refused.name in booted.cache.packs.known
    assert packed_paths(booted.publish()) == ["new.so"]


# Signed packs.


def test_with_trusted_keys_only_packs_that_they_signed_are_used(store, machine):
    private, public = generate_keys()
    foreign, _ = generate_keys()
    for number, signer in enumerate([Signer(private), Signer(foreign), None]):
        writer = machine(store, signer=signer)
        writer.write({f"{number}.so": b"kernel"})
        writer.publish()
    booted = machine(store, trusted=TrustedKeys([public]))
    refused = booted.restore().refused
    assert booted.files() == {"0.so": b"kernel"}
    assert sorted("is not trusted" in one.reason or "is not signed" in one.reason for one in refused) == [True, True]


# Several graphs under one key of Inductor's.


def test_a_second_graph_compiled_beside_a_restored_one_is_published(store, machine):
    """With dynamic shapes Inductor keeps several graphs, each with its guards, under one key."""
    filled(machine(store), {"fxgraph/ab/fabc/small": b"up to 64"})
    second, third, last = machine(store), machine(store), machine(store)
    for other in (second, third):
        other.restore()
        other.write({"fxgraph/ab/fabc/large": b"from 64"})
    second.publish()
    third.cache.refresh()
    assert third.publish() == ()
    assert last.restored() == {"fxgraph/ab/fabc/small": b"up to 64", "fxgraph/ab/fabc/large": b"from 64"}


# Seeding.


def test_of_another_version_only_what_was_read_is_published_and_then_it_is_not_needed(store, machine, key):
    old, new, last = machine(store), machine(store, key=replace(key, model_version="2")), None
    old.write(COLD)
    old.publish()
    fetched = replace(fetch(PacksOfKey(store, key, Rules()), new.directory.inbox), seeded_from="version-1")
    new.cache.install(fetched)
    (new.directory.path / "fxgraph/ab/fabc/one").read_bytes()
    new.write({"new.so": b"new"})
    new.publish()
    for entry in store.list(key.prefix):
        store.delete(entry.name)
    last = machine(store, key=replace(key, model_version="2"))
    assert last.restored() == {"fxgraph/ab/fabc/one": COLD["fxgraph/ab/fabc/one"], "new.so": b"new"}


# Uses.


def test_a_use_is_recorded_once_a_day_as_an_empty_object(store, machine, key):
    first, second = machine(store), machine(store)
    first.cache.refresh()
    first.cache.mark_used("2026-11-20")
    assert stored(store) == {}  # nothing is stored yet that could be used
    first.write(COLD)
    first.publish()
    for day in ("2026-11-20", "2026-11-20", "2026-11-21"):
        second.cache.packs.list()
        second.restore()
        second.cache.mark_used(day)
    uses = {name: content for name, content in stored(store).items() if "used-" in name}
    assert uses == {f"{key.prefix}used-2026-11-21": b""}


# What review found.


def test_who_signs_and_trusts_nobody_trusts_itself_alone(local, machine):
    """It would otherwise merge what a stranger has put there into a pack with its own signature."""
    private, public = generate_keys()
    stranger, booted = machine(local), machine(local, signer=Signer(private))
    stranger.write({"evil.so": b"evil"})
    stranger.publish()
    assert [refused.is_final for refused in booted.restore().refused] == [True]
    published_five(booted)
    booted.write({"evil.so": b"evil"})
    assert booted.cache.merge("the test").packs == 5
    fleet = machine(local, trusted=TrustedKeys([public]))
    fleet.restore()
    assert "evil.so" not in fleet.files()


def test_a_merge_without_a_key_leaves_signed_packs_alone(local, machine):
    private, _ = generate_keys()
    published_five(machine(local, signer=Signer(private)))
    unsigned = machine(local)
    unsigned.restore()
    assert unsigned.cache.merge("the test").packs == 0
    assert len(unsigned.cache.packs.list()) == 5


def test_merging_leaves_one_pack_with_everything(store, machine):
    publisher, booted = published_five(machine(store)), machine(store)
    assert publisher.cache.merge("the test").packs == 5
    assert booted.restored() == publisher.files()
    assert len(booted.cache.packs.known) == 1


def test_four_packs_are_left_as_they_are(local, machine):
    publisher = published_five(machine(local))
    local.delete(publisher.cache.packs.list()[0].name)
    before = stored(local)
    assert publisher.cache.merge("the test").packs == 0
    assert stored(local) == before


def test_packs_with_a_file_that_is_not_here_or_is_another_stay(local, machine):
    publisher = published_five(machine(local))
    (publisher.directory.path / "3.so").unlink()
    publisher.write({"4.so": b"damaged in place"})
    booted = machine(local)
    assert publisher.cache.merge("the test").packs == 3
    booted.restore()
    assert len(booted.cache.packs.known) == 3
    assert sorted(booted.files()) == sorted([*publisher.files(), "3.so"])


def test_a_pack_that_only_repeats_others_is_merged_too(local, machine):
    """Or a boot would find too many packs again, and merge for nothing."""
    first, second = machine(local), machine(local)
    for one, content in ((first, b"one"), (second, b"two")):
        one.cache.refresh()
        one.write({"fxgraph/ab/fabc/" + content.decode(): content})
    staged = second.cache.stage((), "the test")
    published_five(first)
    for pack in staged:
        second.cache.publish(pack)
    assert first.cache.merge("the test").packs == 6
    assert len(first.cache.packs.list()) == 1


def test_merging_keeps_what_was_changed_in_place(local, machine):
    first, second, booted = filled(machine(local)), machine(local), machine(local)
    published_five(first)
    second.restore()
    second.write({"autotune/best.best_config": b"better"})
    second.publish()
    assert second.cache.merge("the test").packs == 7
    assert booted.restored() == second.files()
    assert booted.files()["autotune/best.best_config"] == b"better"


def test_a_merged_pack_that_does_not_verify_is_removed_and_nothing_else(local, machine):
    class Damaging(LocalStore):
        def put(self, name: str, content: Path | bytes) -> None:
            super().put(name, damage_flip(content.read_bytes()) if isinstance(content, Path) else content)

    published_five(machine(local))
    before = stored(local)
    merger = machine(Damaging(Path(local.location)))
    merger.restore()
    with pytest.raises(PackError):
        merger.cache.merge("the test")
    assert stored(local) == before


@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "removed"])
def test_a_merge_in_whose_middle_a_pack_goes_takes_its_own_pack_back(local, machine, is_merged):
    """Another container merges the same packs, or `compile-cache rm` removes one, just before this one would delete."""
    publisher = published_five(machine(local))
    other = machine(local)
    other.restore()
    removed = publisher.cache.packs.list()[0].name

    class Interrupted(LocalStore):
        def put(self, name: str, content: Path | bytes) -> None:
            super().put(name, content)
            if is_merged:
                assert other.cache.merge("the other").packs
            else:
                local.delete(removed)

    merger = machine(Interrupted(Path(local.location)))
    merger.restore()
    assert merger.cache.merge("the test").packs == 0
    booted = machine(local)
    booted.restore()
    assert len(booted.cache.packs.known) == (1 if is_merged else 4)
    assert (booted.files() == publisher.files()) == is_merged


def test_all_graphs_of_one_key_are_in_one_pack_however_large(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.publish._SMALLEST_PART_BYTES", 3000)
    first, second = machine(local), machine(local)
    first.write({f"fxgraph/ab/fabc/{number}": os.urandom(2000) for number in range(5)})
    first.write({f"{number}.so": os.urandom(2000) for number in range(5)})
    assert len(first.publish()) > 1
    assert second.restored() == first.files()


def test_a_read_that_breaks_off_is_tried_again(local, machine):
    published_pair(local, machine)
    reads: list[str] = []

    class Flaky(LocalStore):
        def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
            reads.append(name)
            if reads.count(name) == 1:
                raise StoreUnavailable("the connection was reset")
            return super().read(name, start, size_bytes)

    booted = machine(Flaky(Path(local.location)))
    assert booted.restore().refused == ()
    assert booted.files() == {**COLD, "more.so": b"more"}


def test_what_was_removed_from_the_store_is_brought_back_by_a_new_boot_alone(local, machine, key):
    serving, restored, new = machine(local), machine(local), machine(local)
    serving.write(COLD)
    serving.publish()
    restored.restore()
    for entry in local.list(key.prefix):
        local.delete(entry.name)
    for running in (serving, restored):
        running.write({"own.so": b"own"})
        running.cache.refresh()
        running.publish()
    assert new.restored() == {"own.so": b"own"}
    new.write(COLD)
    assert sorted(packed_paths(new.publish())) == sorted(COLD)


def test_what_a_damaged_pack_had_is_published_by_who_compiled_it_again(local, machine):
    first, second = machine(local), machine(local)
    first.write(COLD)
    (pack,) = first.publish()
    (entry,) = [entry for entry in local.list("v1/") if entry.name.endswith(".pack")]
    local.put(entry.name, damage_flip(pack.local.read_bytes()))
    second.restore()
    second.write(COLD)
    assert sorted(packed_paths(second.publish())) == sorted(COLD)


def test_tritons_record_of_a_kernel_is_not_restored_without_its_binary(local, machine):
    """Triton believes the record, and fails."""
    first, second = machine(local), machine(local)
    first.write({"triton/HASH/__grp__kernel.json": b"{}", "triton/HASH/kernel.ptx": b"text"})
    first.write({"triton/OTHER/__grp__kernel.json": b"{}", "triton/OTHER/kernel.cubin": b"binary"})
    first.publish()
    second.restore()
    assert sorted(second.files()) == [
        "triton/HASH/kernel.ptx",
        "triton/OTHER/__grp__kernel.json",
        "triton/OTHER/kernel.cubin",
    ]


def test_a_file_damaged_in_place_is_not_published_over_a_sound_one(local, machine):
    filled(machine(local))
    second = machine(local)
    second.restore()
    second.write({"ab/kernel.so": b"cut short"})
    assert second.publish() == ()
