"""A withdrawn pack counts as absent for every boot, is neither published again nor merged, and can come back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import put_pack, put_record
from withdrawals import COLD, MORE, Machine, boot_machine, contents, in_use, take_out

from compile_cache.errors import SettingsError
from compile_cache.store.base import ObjectStore, StoredObject
from compile_cache.store.layered import LayeredStore
from compile_cache.store.local import LocalStore
from compile_cache.versions.catalog import explain_miss, predecessors, read_catalog
from compile_cache.versions.compaction import Compacted, compact
from compile_cache.versions.withdrawal import Withdrawal, read_withdrawal
from compile_cache.versions.withdrawing import Reinstated, reinstate


@pytest.fixture
def machine(tmp_path, key, environment) -> Callable[..., Machine]:
    """Makes machines that use the store given."""
    numbers = itertools.count()

    def make(store: ObjectStore, writing: ObjectStore | None = None) -> Machine:
        return boot_machine(tmp_path / f"machine-{next(numbers)}", store, key, environment, writing)

    return make


# A boot.


def test_a_boot_misses_a_withdrawn_pack_compiles_publishes_the_same_keys_and_finds_them(store, machine, key):
    first, second, third = machine(store), machine(store), machine(store)
    first.write(COLD)
    (bad,) = first.publish_after_a_look()
    take_out(store, key)
    second.restore()
    assert second.files() == {}
    assert second.cache.is_empty
    second.write({"fxgraph/ab/fone/entry": b"a sound graph", "ab/kernel.so": b"sound"})
    (good,) = second.publish_after_a_look()
    third.restore()
    assert third.files() == second.files()
    assert in_use(store, key) == {good}
    assert bad in contents(store)


def test_a_reinstated_pack_is_restored_as_before(store, machine, key):
    first, second = machine(store), machine(store)
    first.write(COLD)
    (name,) = first.publish_after_a_look()
    before = contents(store)
    take_out(store, key, name)
    assert reinstate(store, store, key, [name]) == Reinstated(packs=(name,))
    assert contents(store) == before
    second.restore()
    assert second.files() == COLD


def test_only_the_withdrawn_pack_is_absent(store, machine, key):
    first, second = machine(store), machine(store)
    first.write(COLD)
    (bad,) = first.publish_after_a_look()
    first.write(MORE)
    first.publish_after_a_look()
    take_out(store, key, bad)
    assert second.restore().refused == ()
    assert second.files() == MORE


class Counting(LocalStore):
    """Writes down what it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[str, str]] = []

    def list(self, prefix: str) -> Sequence[StoredObject]:
        self.asked.append(("list", prefix))
        return super().list(prefix)

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        self.asked.append(("read", name))
        return super().read(name, start, size_bytes)


def test_withdrawals_cost_a_boot_no_request(local, machine, key):
    put_pack(local, key, COLD)
    take_out(local, key)
    good = put_pack(local, key, MORE)
    counting = Counting(Path(local.location))
    machine(counting).restore()
    assert counting.asked == [("list", key.prefix), ("read", good)]


@pytest.mark.parametrize(
    "name",
    [
        "{digest}.withdrawn",
        "{digest}.pack.withdrawn2",
        "x{digest}.pack.withdrawn",
        "{digest:.63}.pack.withdrawn",
        "{upper}.pack.withdrawn",
        "{digest}.pack.withdrawn/x",
        "deeper/{digest}.pack.withdrawn",
        "{other}.pack.withdrawn",
    ],
)
def test_only_the_exact_name_takes_a_pack_out_of_use(local, machine, key, name):
    digest = put_pack(local, key, COLD).rpartition("/")[2].removesuffix(".pack")
    local.put(key.prefix + name.format(digest=digest, upper=digest.upper(), other="0" * 64), b"{}")
    booted = machine(local)
    booted.restore()
    assert booted.files() == COLD
    assert len(in_use(local, key)) == 1
    assert [e.name for v in read_catalog(local).versions for e in v.withdrawals] == (
        [f"{key.prefix}{'0' * 64}.pack.withdrawn"] if "other" in name else []
    )


def test_a_withdrawal_in_another_versions_folder_takes_nothing_out_of_use(local, machine, key):
    name = put_pack(local, key, COLD)
    local.put(replace(key, model_version="other").prefix + name.rpartition("/")[2] + ".withdrawn", b"{}")
    booted = machine(local)
    booted.restore()
    assert booted.files() == COLD


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"\xff",
        b"[]",
        b'{"reason": 1, "withdrawn_s": "x"}',
        b'{"withdrawn_s": NaN}',
        b'{"withdrawn_s": 1e300, "reason": "\\u001b[31mred"}',
        json.dumps({"reason": "r" * 3000}).encode(),
        b'{"withdrawn_s": true}',
    ],
    ids=range(9),
)
def test_a_withdrawal_holds_whatever_it_says_and_nothing_odd_of_it_is_shown(local, machine, key, content):
    mark = put_pack(local, key, COLD) + ".withdrawn"
    local.put(mark, content)
    assert machine(local).restore().files == {}
    entry = next(entry for entry in local.list("") if entry.name == mark)
    found = read_withdrawal(local, entry)
    assert (found.since_s, found.reason) == (entry.modified_s, "")
    assert found.text.isprintable()


@pytest.mark.parametrize("reason", ["two\nlines", "r" * 201, "\x1b[2J"], ids=["lines", "long", "escape"])
def test_a_reason_is_one_short_line(reason):
    with pytest.raises(SettingsError, match="one line of at most 200 characters"):
        Withdrawal("pack", 0.0, reason)


# Other versions, and why a boot found nothing.


def test_a_withdrawn_version_seeds_no_other(store, machine, key):
    old, older = replace(key, model_version="old"), replace(key, model_version="older")
    put_pack(store, older, MORE)
    put_pack(store, old, COLD)
    take_out(store, old)
    assert predecessors(store, key) == [older]


def test_a_withdrawn_pack_of_a_predecessor_is_not_taken(local, machine, key):
    old = replace(key, model_version="old")
    bad = put_pack(local, old, COLD)
    put_pack(local, old, MORE)
    take_out(local, old, bad)
    booted = machine(local)
    assert set(booted.cache.for_version(old).fetch().files) == set(MORE)


def test_a_miss_says_since_when_and_why_a_version_is_withdrawn(store, key, environment):
    put_pack(store, key, COLD)
    put_record(store, environment)
    take_out(store, key, reason="wrong pictures on H100")
    told = explain_miss(store, key, environment)
    assert told.startswith(
        "every pack stored for version version-1 of org--model is withdrawn; the last one is withdrawn "
    )
    assert told.endswith(" UTC: wrong pictures on H100")


# A container that has restored already.


def test_a_container_that_has_the_files_does_not_publish_them_again(store, machine, key):
    publisher, restorer = machine(store), machine(store)
    publisher.write(COLD)
    publisher.publish_after_a_look()
    restorer.restore()
    take_out(store, key)
    for serving in (publisher, restorer):
        assert serving.publish_after_a_look() == []
        serving.write({f"ab/{id(serving)}.so": b"new"})
        assert len(serving.publish_after_a_look()) == 1  # what is compiled later is in use
    booted = machine(store)
    booted.restore()
    assert set(booted.files().values()) == {b"new"}


def test_a_container_whose_packs_were_merged_before_does_not_publish_them_again(local, machine, key):
    """It has never seen the pack that was withdrawn, only those that it was merged from."""
    serving, other = machine(local), machine(local)
    serving.write(COLD)
    serving.publish_after_a_look()
    serving.write(MORE)
    serving.publish_after_a_look()
    assert compact(other.cache.of_written_store(), other.cache.staging, "the test").packs == 2
    take_out(local, key)
    assert serving.publish_after_a_look() == []


def test_a_better_configuration_of_a_withdrawn_one_is_not_published(local, machine, key):
    serving = machine(local)
    serving.write({"ab/k.best_config": b"1"})
    serving.publish_after_a_look()
    take_out(local, key)
    serving.write({"ab/k.best_config": b"better"})
    assert serving.publish_after_a_look() == []


# Compaction.


def test_a_compaction_neither_merges_nor_deletes_a_withdrawn_pack(store, machine, key):
    bad, *good = [put_pack(store, key, {f"ab/{number}.so": b"%d" % number}) for number in range(3)]
    take_out(store, key, bad)
    before = contents(store)
    merging = machine(store)
    assert compact(merging.cache, merging.cache.staging, "the test").packs == 2
    after = contents(store)
    assert set(before) - set(after) == set(good)
    booted = machine(store)
    booted.restore()
    assert set(booted.files()) == {"ab/1.so", "ab/2.so"}


def test_a_compaction_leaves_what_a_layer_has_withdrawn(tmp_path, local, machine, key):
    layer = LocalStore(tmp_path / "layer")
    bad = put_pack(local, key, COLD)
    good = [put_pack(local, key, files) for files in (MORE, {"ef/other.so": b"o"})]
    layer.put(bad + ".withdrawn", b"{}")
    serving = machine(LayeredStore([layer, local]), writing=local)
    serving.cache.refresh()
    written = serving.cache.of_written_store()
    assert compact(written, written.staging, "the test").packs == 2
    assert bad in contents(local)
    assert not set(good) & set(contents(local))


def test_a_pack_withdrawn_during_a_compaction_is_not_merged(local, machine, key):
    """It is withdrawn when the merged pack is stored: that one is taken back, and nothing is deleted."""
    packs = [put_pack(local, key, files) for files in (COLD, MORE)]

    class Withdrawing(LocalStore):
        def put(self, name: str, content: Path | bytes) -> None:
            super().put(name, content)
            if name.endswith(".pack"):
                take_out(local, key, packs[0])

    merging = machine(Withdrawing(Path(local.location)))
    assert compact(merging.cache, merging.cache.staging, "the test") == Compacted()
    assert set(contents(local)) >= set(packs)
    assert in_use(local, key) == {packs[1]}
