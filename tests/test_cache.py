"""Publishing and restoring: what one machine publishes another restores; what is wrong in a store costs only itself."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import pytest
from filled_stores import flip_last, put_as_newest, put_pack, set_age
from machines import Machine, Watched, write_files

from compile_cache.errors import PackError, StoreError, StoreUnavailable
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.fetch import candidates, install
from compile_cache.storage.pack.format import Pack
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.pack.signing import Signer, generate_keys, trusted_keys
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore

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


@pytest.fixture
def machine(tmp_path, key, environment) -> Callable[..., Machine]:
    """Makes machines that use the store given."""
    numbers = itertools.count()

    def make(store: ObjectStore, limits: Limits = LIMITS, key: CacheKey = key, **keys: object) -> Machine:
        return Machine.at(tmp_path / f"machine-{next(numbers)}", store, key, environment, Rules(limits, **keys))

    return make


def stored(store: ObjectStore) -> dict[str, bytes]:
    return {entry.name: store.read(entry.name, 0, entry.size_bytes) for entry in store.list("v3/")}


def filled(machine: Machine, files: dict[str, bytes] = COLD) -> Machine:
    """A machine that has published these files as one pack."""
    machine.write(files)
    machine.publish()
    return machine


def after_restore(machine: Machine) -> Machine:
    """A machine that has restored what its store has."""
    machine.restore()
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


@pytest.mark.parametrize(
    "files", [COLD, {"large.so": os.urandom(9 * MIB), "small.so": b"small"}], ids=["small", "9 MiB"]
)
def test_another_machine_restores_the_same_files(store, machine, files):
    first, second = machine(store), machine(store)
    first.write(files)
    packs = first.publish()
    fetched = second.fetch()
    assert (second.files(), len(fetched.packs), fetched.refused) == ({}, len(packs), ())
    assert fetched.stored_bytes == sum(pack.stored_bytes for pack in packs)
    assert install(fetched, second.directory) == len(files)
    assert second.files() == files


def test_what_an_earlier_round_of_a_fetch_left_behind_is_not_installed(local, machine):
    first, second = machine(local), machine(local)
    first.write(COLD)
    (pack,) = first.publish()
    write_files(second.directory.inbox / pack.name.partition(".")[0], {"left.so": b"not verified"})
    assert second.restored() == COLD


def test_packs_are_listed_by_their_key_oldest_first_and_nothing_else_is(store, machine, key):
    first = machine(store)
    packs = []
    for number in range(2):
        first.write({f"{number}.so": b"kernel"})
        packs += first.publish()
        put_as_newest(store, "clock", b"")
    store.put(key.prefix + "notes.txt", b"")
    store.put(f"{key.environment_prefix}another/model/{'0' * 64}.pack", b"")
    assert [entry.name for entry in first.packs.list()] == [key.prefix + pack.name for pack in packs]
    assert machine(store, key=replace(key, model_version="version-2")).restored() == {}


def test_a_boot_tries_other_versions_of_this_model_and_environment_newest_pack_first(tmp_path, local, machine, key):
    for version, days in (("old", 3), ("oldest", 4), ("new", 1), ("middle", 2), ("mine", 0)):
        set_age(tmp_path / "store", put_pack(local, replace(key, model_version=version)), days, 1e9)
    put_pack(local, replace(key, model_name=key.model_name + "-2"))
    put_pack(local, replace(key, environment="0" * 32))
    local.put(replace(key, model_version="noted").prefix + "notes.txt", b"{}")
    tried = candidates(machine(local, key=replace(key, model_version="mine")).packs, local)
    assert [packs.key.model_version for packs in tried] == ["mine", "new", "middle", "old"]


def test_the_environments_record_is_stored_beside_the_packs_and_never_trusted(store, machine, key, environment):
    filled(machine(store))
    name = f"{key.environment_prefix}environment.json"
    assert msgspec.json.decode(store.read(name, 0, MIB), type=Environment) == environment
    store.put(name, b"forged")
    assert machine(store).restored() == COLD


# Only what is new is published.

KERNEL = "ab/kernel.so"
# What happens to the directory of a machine that has published or restored COLD.
NOTHING_NEW: dict[str, Callable[[Machine], object]] = {
    "nothing": lambda machine: None,
    "a file is touched": lambda machine: os.utime(machine.directory.path / KERNEL, ns=(1, 1)),
    "a file is removed": lambda machine: (machine.directory.path / KERNEL).unlink(),
    "files are changed in place": lambda machine: machine.write(
        {"autotune/best.best_config": b"tuned again", KERNEL: b"damaged in place"}
    ),
}


@pytest.mark.parametrize("is_restored", [True, False])
@pytest.mark.parametrize("change", NOTHING_NEW.values(), ids=NOTHING_NEW)
def test_what_the_store_has_is_not_published_again_and_the_first_wins(local, machine, change, is_restored):
    booted = filled(machine(local))
    if is_restored:
        booted = after_restore(machine(local))
    before = stored(local)
    change(booted)
    booted.directory.ledger.hand_over(COLD)
    assert booted.publish() == ()
    assert stored(local) == before
    assert machine(local).restored() == COLD


def test_other_bytes_under_a_graphs_logical_key_are_not_published(local, machine):
    """As a second cold compile makes them: the same lookup key, another file name and content."""
    filled(machine(local))
    second = machine(local)
    second.write({"fxgraph/ab/fabc/two": b"the same graph, other bytes", "aotautograd/aabc/two": b"other bytes"})
    assert second.publish() == ()


def test_the_most_valuable_files_come_first(local, machine, monkeypatch):
    """Graph entries, then what a compiler made, then the rest: if time runs out, the first are in the store."""
    monkeypatch.setattr("compile_cache.storage.publish._SMALLEST_PART_BYTES", 3000)
    rest = {f"{n}.json": b"rest" * 1000 for n in range(4)}
    files = {**rest, "b.so": b"kernel" * 1000, "fxgraph/ab/fabc/1": b"x" * 5000}
    first = machine(local)
    first.write(files)
    packs = [packed_paths([pack]) for pack in first.publish()]
    assert packs == [["fxgraph/ab/fabc/1"], ["b.so"], ["0.json", "1.json", "2.json"], ["3.json"]]
    assert machine(local).restored() == files


# What is wrong in a store costs only itself.


DAMAGES = {
    "a flipped bit": flip_last,
    "cut short": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "something else": lambda content: b"something else" * 100,
}


def published_pair(store: ObjectStore, machine: Callable[..., Machine]) -> list[str]:
    """The names of two packs in the store: of COLD, and of one more kernel."""
    first = machine(store)
    packs = []
    for files in (COLD, {"more.so": b"more"}):
        first.write(files)
        packs += first.publish()
    return [first.packs.key.prefix + pack.name for pack in packs]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_pack_is_refused_by_name_others_are_used_and_its_files_published_again(store, machine, damage):
    bad, _ = published_pair(store, machine)
    store.put(bad, damage(store.read(bad, 0, MIB)))
    before = stored(store)
    booted = machine(store)
    fetched = booted.restore()
    assert booted.files() == {"more.so": b"more"}
    assert [refused.name for refused in fetched.refused] == [bad]
    assert stored(store) == before
    booted.write(COLD)
    assert sorted(packed_paths(booted.publish())) == sorted(COLD)
    assert machine(store).restored() == {**COLD, "more.so": b"more"}


@pytest.mark.parametrize(
    "name",
    ["notes.pack", ".pack", "..pack", "x" * 250 + ".pack", "backup/{pack}"],
    ids=["another name", "no name", "no name but a dot", "a long name", "a copy in a folder"],
)
def test_an_object_with_an_odd_name_costs_only_itself(local, machine, name):
    published, _ = published_pair(local, machine)
    prefix, _, pack = published.rpartition("/")
    local.put(f"{prefix}/{name.format(pack=pack)}", local.read(published, 0, MIB))
    assert machine(local).restored() == {**COLD, "more.so": b"more"}


def test_a_pack_that_disappears_after_the_listing_costs_only_itself(local, machine):
    gone, _ = published_pair(local, machine)
    booted = machine(Watched(local.location, after_list=lambda _: local.delete(gone)))
    fetched = booted.restore()
    assert booted.files() == {"more.so": b"more"}
    assert all(refused.name == gone for refused in fetched.refused)


# What many boots do.


def published_late(store: ObjectStore, machine: Callable[..., Machine], files: dict[str, bytes]) -> tuple[Pack, Pack]:
    """A pack of these files without the other graph, and one of all that was staged before and published after it."""
    one, other = machine(store), machine(store)
    one.write({path: content for path, content in files.items() if path != OTHER_GRAPH})
    other.write(files)
    (late,) = other.stage()
    (first,) = one.publish()
    put_as_newest(store, "clock", b"")
    other.publication.publish(late)
    return first, late


OTHER_GRAPH = "fxgraph/ab/fabc/other"


def test_only_the_frames_that_are_needed_are_read(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.rules.HEAD_READ_BYTES", 4096)
    files = {**{f"{number}.so": os.urandom(MIB) for number in range(3)}, OTHER_GRAPH: b"other"}
    first, _ = published_late(local, machine, files)
    booted = machine(local)
    assert booted.restore().stored_bytes < first.stored_bytes + 10_000
    assert booted.files() == files


def test_a_pack_that_adds_nothing_is_not_read_beyond_its_head(local, machine):
    published_late(local, machine, {**COLD, OTHER_GRAPH: b"another compile of the same graph"})
    booted = machine(local)
    assert len(booted.restore().packs) == 1
    assert booted.files() == COLD


def test_what_another_boot_has_published_meanwhile_is_not_published_again(store, machine):
    one, other = after_restore(machine(store)), after_restore(machine(store))
    one.write(COLD)
    other.write({**COLD, "fxgraph/ab/fabc/one": b"other bytes", "own.so": b"own"})
    staged = other.stage()
    one.publish()
    other.packs.refresh()
    assert any(other.publication.is_superseded(pack) for pack in staged)
    assert packed_paths(other.publish()) == ["own.so"]


def test_a_pack_that_vanishes_during_a_fetch_is_found_where_it_was_merged_into(local, machine):
    """A reader that loses the race against a merge lists again."""
    publisher = published_five(machine(local))

    merges, lists = [publisher.publication.merge], []

    def read(name: str, *_: object) -> None:
        if merges and len(lists) == 1:
            merges.pop()("the test")

    booted = machine(Watched(local.location, read=read, after_list=lists.append))
    booted.restore()
    assert len(local.list("v3/")) == 2  # the merged pack and the environment's record
    assert booted.restored() == publisher.files()


LARGE = {f"l{number}.so": os.urandom(MIB) for number in range(4)}
LONG = "/".join(["y" * 205] * 5)
# Files, limits, and those files that no pack can have.
UNPACKABLE = {
    "a deep path": ({**COLD, "d/" * 32 + "f": b""}, LIMITS, {"d/" * 32 + "f"}),
    "a long path": ({**COLD, LONG: b""}, LIMITS, {LONG}),
    "a folder's name": ({**COLD, "a\nb/k.so": b"", "a\\b/k.so": b""}, LIMITS, {"a\nb/k.so", "a\\b/k.so"}),
    "large files": ({**COLD, **LARGE}, Limits(size_bytes=MIB - 1), LARGE.keys()),
    "none, in packs of few bytes": (LARGE, Limits(size_bytes=4 * MIB), set()),  # one pack of all would be larger
    "none, in packs of few files": (dict.fromkeys("abcdefgh", b""), Limits(manifest_bytes=1000), set()),
}


@pytest.mark.parametrize("case", UNPACKABLE)
def test_what_a_boot_would_refuse_is_left_out_and_named_once_and_the_rest_is_restored(local, machine, case, caplog):
    files, limits, left_out = UNPACKABLE[case]
    publisher, booted = machine(local, limits=limits), machine(local, limits=limits)
    publisher.write(files)
    publisher.stage()
    assert (len(publisher.publish()) > 1) == case.startswith("none")
    assert (booted.restore().refused, publisher.stage()) == ((), ())
    assert booted.files() == {path: files[path] for path in files.keys() - left_out}
    told = [record.message for record in caplog.records if "publish.left_out" in record.message]
    assert len(told) == len(left_out)
    assert all(any(f"path={path!r:.200}" in line for line in told) for path in left_out)


CLASHING = {"case": {"AB/kernel.so": b"other", "Empty": b""}, "a folder": {"EMPTY/a": b"1", "Ab/WRAPPER.py/x": b"2"}}


@pytest.mark.parametrize("is_in_two_packs", [False, True])
@pytest.mark.parametrize("clashing", CLASHING.values(), ids=CLASHING)
def test_of_files_whose_paths_clash_one_is_restored_and_none_published_again(local, machine, clashing, is_in_two_packs):
    publisher, booted = machine(local), machine(local)
    for files in [COLD, clashing] if is_in_two_packs else [{**COLD, **clashing}]:
        publisher.write(files)
        publisher.publish()
    assert booted.restore().refused == publisher.stage() == ()
    assert booted.files().items() <= {**COLD, **clashing}.items()
    assert len(booted.files()) == len(COLD)


def test_the_oldest_packs_are_used_up_to_their_number_and_the_others_named_until_there_is_room(local, machine, key):
    names = [put_pack(local, key, {name: b"kernel"}) for name in "abc"]
    booted = machine(local, limits=Limits(packs=2))
    (refused,) = booted.restore().refused
    assert booted.files().keys() == {"a", "b"}
    assert (refused.name, refused.is_final) == (names[2], False)
    assert "delete some with `compile-cache rm`" in refused.reason
    assert booted.packs.is_full
    local.delete(names[0])
    booted.packs.refresh()
    assert [*booted.packs.known] == names[1:]


def test_packs_that_may_not_be_used_do_not_count(local, machine, key):
    for name in "abc":
        put_pack(local, key, {name: b"kernel"})
    private, _ = generate_keys()
    signer = filled(machine(local, Limits(packs=2), signer=Signer(private)))
    assert not signer.packs.is_full
    assert machine(local, Limits(packs=2), signer=Signer(private)).restored() == COLD


# Several graphs under one key of Inductor's.


def test_a_second_graph_compiled_beside_a_restored_one_is_published(store, machine):
    """With dynamic shapes Inductor keeps several graphs, each with its guards, under one key."""
    filled(machine(store), {"fxgraph/ab/fabc/small": b"up to 64"})
    second, third, last = machine(store), machine(store), machine(store)
    for other in (second, third):
        other.restore()
        other.write({"fxgraph/ab/fabc/large": b"from 64"})
    second.publish()
    third.packs.refresh()
    assert third.publish() == ()
    assert last.restored() == {"fxgraph/ab/fabc/small": b"up to 64", "fxgraph/ab/fabc/large": b"from 64"}


# Seeding.


ONE, OTHER = "precompiled/a/1.aot", "precompiled/a/2.aot"
MARK = "precompiled/a/1.compared"
OWNERS = {ONE: ONE, MARK: MARK, OTHER: OTHER, "one.so": "Block", "gone.so": "Gone", "nobody's": ""}


@pytest.mark.parametrize(("used", "expected"), [((), set()), ((ONE,), {ONE}), ((OTHER, "Block"), {OTHER, "one.so"})])
def test_of_another_version_only_what_is_used_is_published(local, machine, key, used, expected):
    """And then the other version is not needed. The owners are handed on with the files."""
    old = machine(local)
    old.write({path: path.encode() for path in OWNERS})
    for path, owner in OWNERS.items():
        old.directory.ledger.hand_over([path], owner)
    (pack,) = old.publish()
    version = replace(key, model_version="2")
    new, last = machine(local, key=version), machine(local, key=version)
    install(replace(old.fetch(new.directory), seeded_from="1"), new.directory)
    for owner in used:
        new.directory.ledger.use(owner)
    new.write({"new.so": b"new"})
    new.publish()
    local.delete(key.prefix + pack.name)
    last.restore()
    restored = {file.path: file.owner for pack in last.packs.known.values() for file in pack.head.manifest.files}
    assert restored == {"new.so": "", **{path: OWNERS[path] for path in {"nobody's"} | expected}}


# Uses.


def test_a_use_is_recorded_once_a_day_as_an_empty_object(store, machine, key):
    first, second = machine(store), machine(store)
    first.packs.refresh()
    first.publication.mark_used("2026-11-20")
    assert stored(store) == {}  # nothing is stored yet that could be used
    filled(first)
    for day in ("2026-11-20", "2026-11-20", "2026-11-21"):
        second.packs.list()
        second.restore()
        second.publication.mark_used(day)
    uses = {name: content for name, content in stored(store).items() if "used-" in name}
    assert uses == {f"{key.prefix}used-2026-11-21": b""}


# What review found.


def test_who_signs_and_trusts_nobody_trusts_itself_alone(local, machine):
    """It would otherwise merge what a stranger has put there into a pack with its own signature."""
    private, public = generate_keys()
    filled(machine(local), {"evil.so": b"evil"})
    booted = machine(local, signer=Signer(private))
    assert [refused.is_final for refused in booted.restore().refused] == [True]
    published_five(booted)
    booted.write({"evil.so": b"evil"})
    assert booted.publication.merge("the test") == 5
    assert "evil.so" not in machine(local, trusted=trusted_keys([public])).restored()


def test_a_merge_without_a_key_leaves_signed_packs_alone(local, machine):
    private, _ = generate_keys()
    published_five(machine(local, signer=Signer(private)))
    unsigned = after_restore(machine(local))
    assert unsigned.publication.merge("the test") == 0
    assert len(unsigned.packs.list()) == 5


def test_four_packs_are_left_as_they_are(local, machine):
    publisher = published_five(machine(local))
    local.delete(publisher.packs.list()[0].name)
    before = stored(local)
    assert publisher.publication.merge("the test") == 0
    assert stored(local) == before


def test_packs_with_a_file_that_is_not_here_or_is_another_stay(local, machine):
    publisher = published_five(machine(local))
    (publisher.directory.path / "3.so").unlink()
    publisher.write({"4.so": b"damaged in place"})
    booted = machine(local)
    assert publisher.publication.merge("the test") == 3
    booted.restore()
    assert len(booted.packs.known) == 3
    assert sorted(booted.files()) == sorted([*publisher.files(), "3.so"])


def test_a_pack_that_only_repeats_others_is_merged_too(local, machine):
    """Or a boot would find too many packs again, and merge for nothing."""
    first, second = machine(local), machine(local)
    for one, content in ((first, b"one"), (second, b"two")):
        one.packs.refresh()
        one.write({"fxgraph/ab/fabc/" + content.decode(): content})
    staged = second.stage()
    published_five(first)
    for pack in staged:
        second.publication.publish(pack)
    assert first.publication.merge("the test") == 6
    assert len(first.packs.list()) == 1


@pytest.mark.parametrize(
    ("limits", "size_bytes", "files"),
    [(Limits(size_bytes=2 * MIB), MIB * 3 // 2, 1), (Limits(manifest_bytes=20_000), 9, 90)],
)
def test_the_smallest_packs_are_merged_if_one_pack_may_not_have_all_files(local, machine, limits, size_bytes, files):
    publisher = machine(local, limits=limits)
    for number in range(6):
        many = range(files if number < 2 else 1)
        publisher.write({f"{number}.{file}.so": os.urandom(size_bytes if number < 2 else 1000) for file in many})
        publisher.publish()
    assert publisher.publication.merge("the test") == 5
    assert len(publisher.packs.list()) == 2
    assert machine(local).restored() == publisher.files()


def test_a_merged_pack_that_does_not_verify_is_removed_and_nothing_else(local, machine):
    published_five(machine(local))
    before = stored(local)
    merger = machine(Watched(local.location, after_put=lambda n: local.put(n, flip_last(local.read(n, 0, MIB)))))
    merger.restore()
    with pytest.raises(PackError):
        merger.publication.merge("the test")
    assert stored(local) == before


@pytest.mark.parametrize("is_merged", [True, False], ids=["merged", "removed"])
def test_a_merge_in_whose_middle_a_pack_goes_takes_its_own_pack_back(local, machine, is_merged):
    """Another container merges the same packs, or `compile-cache rm` removes one, just before this one would delete."""
    publisher = published_five(machine(local))
    other = after_restore(machine(local))
    removed = publisher.packs.list()[0].name

    def put(name: str) -> None:
        if is_merged:
            assert other.publication.merge("the other")
        else:
            local.delete(removed)

    merger = after_restore(machine(Watched(local.location, after_put=put)))
    assert merger.publication.merge("the test") == 0
    booted = after_restore(machine(local))
    assert len(booted.packs.known) == (1 if is_merged else 4)
    assert (booted.files() == publisher.files()) == is_merged


def test_of_a_kept_file_the_last_one_counts_wherever_it_was_written_and_no_merge_loses_it(store, machine):
    def booted() -> Machine:
        one = after_restore(machine(store))
        return Machine(Publication(store, one.packs, one.publication._environment, one.directory))

    def write(one: Machine, content: bytes) -> bool:
        one.write({"kept/mine": content})
        return bool(one.publish())

    first = filled(booted(), {"kernel.so": b"a kernel", "kept/mine": b"1"})
    one, other = booted(), booted()
    assert one.files()["kept/mine"] == b"1"
    assert write(one, b"2")
    assert write(other, b"3")
    assert not one.publish(), "what another one wrote later stays"
    assert not first.publish()
    assert booted().files()["kept/mine"] == b"3"
    assert write(one, b"1"), "an earlier content again is new"
    assert not write(booted(), b"1")
    assert write(other, b"4")
    assert other.publication.merge("the test") == 4, "all but the last one's pack"
    assert write(one, b"5")
    assert booted().files() == {"kernel.so": b"a kernel", "kept/mine": b"5"}


def test_all_graphs_of_one_key_are_in_one_pack_however_large(local, machine, monkeypatch):
    monkeypatch.setattr("compile_cache.storage.publish._SMALLEST_PART_BYTES", 3000)
    first, second = machine(local), machine(local)
    paths = [path for number in range(5) for path in (f"fxgraph/ab/fabc/{number}", f"{number}.so")]
    first.write({path: os.urandom(2000) for path in paths})
    assert len(first.publish()) > 1
    assert second.restored() == first.files()


@pytest.mark.parametrize(("error", "refused"), [(StoreUnavailable("it was reset"), 0), (StoreError("no answer"), 2)])
def test_a_read_that_fails_is_tried_again_by_this_restore_or_the_next_one(local, machine, error, refused):
    """It makes no pack a refused one for good."""
    published_pair(local, machine)
    reads: list[str] = []

    def read(name: str, *_: object) -> None:
        reads.append(name)
        if reads.count(name) == 1:
            raise error

    booted = machine(Watched(local.location, read=read))
    assert [pack.is_final for pack in booted.restore().refused] == [False] * refused
    assert booted.restore().refused == ()
    assert booted.files() == {**COLD, "more.so": b"more"}


def test_what_was_removed_from_the_store_is_brought_back_by_a_new_boot_alone(local, machine, key):
    serving, restored, new = filled(machine(local)), after_restore(machine(local)), machine(local)
    for entry in local.list(key.prefix):
        local.delete(entry.name)
    for running in (serving, restored):
        running.write({"own.so": b"own"})
        running.packs.refresh()
        running.publish()
    assert new.restored() == {"own.so": b"own"}
    new.write(COLD)
    assert sorted(packed_paths(new.publish())) == sorted(COLD)


def test_tritons_record_of_a_kernel_is_not_restored_without_its_binary(local, machine):
    """Triton believes the record, and fails."""
    files = {"triton/HASH/kernel.ptx", "triton/OTHER/__grp__kernel.json", "triton/OTHER/kernel.cubin"}
    filled(machine(local), dict.fromkeys([*files, "triton/HASH/__grp__kernel.json"], b"{}"))
    assert machine(local).restored().keys() == files
