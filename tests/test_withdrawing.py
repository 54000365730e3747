"""Withdrawing packs, and what layers, copies and prune do about them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import put_pack, put_record, set_age
from withdrawals import COLD, MORE, Machine, boot_machine, contents, in_use, take_out

from compile_cache.store.base import ObjectStore
from compile_cache.store.layered import LayeredStore
from compile_cache.store.local import LocalStore
from compile_cache.versions.catalog import read_catalog
from compile_cache.versions.compaction import compact
from compile_cache.versions.copy import Copied, copy_versions
from compile_cache.versions.prune import Pruned, PrunePolicy, apply_prune, plan_prune
from compile_cache.versions.rules import Rules
from compile_cache.versions.withdrawal import read_withdrawal
from compile_cache.versions.withdrawing import Reinstated, SharedFiles, plan_withdrawal, reinstate, withdraw

NOW_S = 2e9


@pytest.fixture
def machine(tmp_path, key, environment) -> Callable[..., Machine]:
    """Makes machines that use the store given."""
    numbers = itertools.count()

    def make(store: ObjectStore, writing: ObjectStore | None = None) -> Machine:
        return boot_machine(tmp_path / f"machine-{next(numbers)}", store, key, environment, writing)

    return make


@pytest.fixture
def target(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "target")


# The withdrawing itself.


def test_a_pack_that_was_merged_since_it_was_looked_at_is_withdrawn_with_what_it_was_merged_into(local, machine, key):
    bad, _ = put_pack(local, key, COLD), put_pack(local, key, MORE)
    (version,) = read_catalog(local).versions
    plan = plan_withdrawal(local, version, [bad], Rules())
    merging = machine(local)
    assert compact(merging.cache, merging.cache.staging, "the test").packs == 2
    (merged,) = in_use(local, key)
    done = withdraw(local, local, plan, "", Rules())
    assert [pack.name for pack in done.packs] == [bad, merged]
    assert in_use(local, key) == set()


def test_what_is_published_for_a_version_while_it_is_withdrawn_is_withdrawn_too(local, key):
    put_pack(local, key, COLD)
    (version,) = read_catalog(local).versions
    plan = plan_withdrawal(local, version, None, Rules())
    meanwhile = put_pack(local, key, MORE)
    done = withdraw(local, local, plan, "", Rules())
    assert meanwhile in {pack.name for pack in done.packs}
    assert (in_use(local, key), done.left) == (set(), ())


def test_packs_in_use_with_the_same_bytes_are_named(store, key):
    bad = put_pack(store, key, COLD)
    seeded = put_pack(store, replace(key, model_version="2"), {**COLD, **MORE})
    put_pack(store, replace(key, model_version="3"), {path: b"other" for path in COLD})
    put_pack(store, replace(key, model_name="another"), COLD)
    assert take_out(store, key, bad).shared == (SharedFiles(seeded, 2, 3),)


def test_the_first_reason_stays(local, key):
    name = put_pack(local, key, COLD)
    (version,) = read_catalog(local).versions
    plan = plan_withdrawal(local, version, None, Rules())
    for reason in ("the first", "the second"):
        withdraw(local, local, plan, reason, Rules())
    entry = next(entry for entry in local.list("") if entry.name == name + ".withdrawn")
    assert read_withdrawal(local, entry).reason == "the first"


# Layers.


@pytest.fixture
def layers(tmp_path) -> tuple[LocalStore, LocalStore]:
    return LocalStore(tmp_path / "baked"), LocalStore(tmp_path / "store")


def test_a_withdrawal_in_any_layer_hides_the_pack_of_all_layers(layers, machine, key):
    name = put_pack(layers[0], key, COLD)
    layers[1].put(name, layers[0].read(name))
    for marked in layers:
        marked.put(name + ".withdrawn", b"{}")
        assert machine(LayeredStore(layers)).restore().files == {}
        marked.delete(name + ".withdrawn")
    assert len(machine(LayeredStore(layers)).restore().files) == 2


def test_a_baked_pack_is_withdrawn_in_the_written_store(layers, machine, key):
    baked, written = layers
    name = put_pack(baked, key, COLD)
    take_out(written, key, name, reading=LayeredStore(layers))
    assert machine(LayeredStore(layers)).restore().files == {}
    assert list(contents(baked)) == [name]
    assert list(contents(written)) == [name + ".withdrawn"]


def test_what_another_layer_withdraws_stays_out_of_use_and_is_named(layers, key):
    _, written = layers
    name = put_pack(written, key, COLD)
    for layer in layers:
        layer.put(name + ".withdrawn", b"{}")
    assert reinstate(LayeredStore(layers), written, key, [name]) == Reinstated(withdrawn_elsewhere=(name,))


# Copies.


def copied(source: LocalStore, target: ObjectStore, with_withdrawals: bool = False) -> Copied:
    return copy_versions(source, target, lambda key: True, Rules(), with_withdrawals=with_withdrawals)


def test_withdrawn_packs_are_not_copied_and_are_named(local, target, key):
    bad, good = put_pack(local, key, COLD), put_pack(local, key, MORE)
    take_out(local, key, bad, reason="wrong")
    found = copied(local, target)
    assert (found.packs, found.refused) == (1, ())
    assert [(w.pack, w.reason) for w in found.withdrawn] == [(bad, "wrong")]
    assert list(contents(target)) == [good]


def test_a_mirror_withdraws_what_its_source_has_withdrawn_and_keeps_the_reason(local, target, key):
    name = put_pack(local, key, COLD)
    copied(local, target)
    take_out(local, key, name, reason="wrong")
    first = contents(local)
    copied(local, target)
    assert in_use(target, key) == {name}
    copied(local, target, with_withdrawals=True)
    assert contents(target) == first
    assert in_use(target, key) == set()


def test_a_copy_reinstates_nothing_and_says_so(local, target, key):
    name = put_pack(local, key, COLD)
    copied(local, target)
    take_out(target, key, name)
    assert copied(local, target, with_withdrawals=True).withdrawn_in_target == (name,)
    assert in_use(target, key) == set()


# Prune.


def prune(local: LocalStore, **rules: float) -> Pruned:
    policy = PrunePolicy(**{"in_use_days": 0.0, **rules})
    return apply_prune(local, plan_prune(read_catalog(local), policy, NOW_S))


def test_prune_removes_a_withdrawn_pack_and_keeps_its_withdrawal_and_the_environments_record(local, key, environment):
    name = put_pack(local, key, COLD)
    put_record(local, environment)
    take_out(local, key)
    set_age(Path(local.location), "v1/", 40, NOW_S)
    assert plan_prune(read_catalog(local), PrunePolicy(unused_days=30), NOW_S).environments == ()
    assert prune(local, unused_days=30).packs == 1
    left = {name + ".withdrawn", f"v1/{key.environment}/environment.json"}
    assert set(contents(local)) == left
    assert prune(local, unused_days=30) == Pruned()
    assert set(contents(local)) == left


def test_a_pruned_pack_that_a_layer_still_has_stays_out_of_use(layers, machine, key):
    baked, written = layers
    name = put_pack(baked, key, COLD)
    written.put(name, baked.read(name))
    take_out(written, key)
    set_age(Path(written.location), "v1/", 40, NOW_S)
    prune(written, unused_days=30)
    assert machine(LayeredStore(layers)).restore().files == {}


def test_a_version_withdrawn_a_day_ago_stays_so_that_it_can_be_reinstated(local, key):
    name = put_pack(local, key, COLD)
    take_out(local, key)
    set_age(Path(local.location), name, 40, NOW_S)
    set_age(Path(local.location), name + ".withdrawn", 1, NOW_S)
    assert prune(local, unused_days=30, in_use_days=2.0) == Pruned()
    assert name in contents(local)


def test_a_withdrawn_version_takes_no_other_versions_place(local, key):
    keys = [replace(key, model_version=str(number)) for number in range(3)]
    packs = [put_pack(local, k, COLD) for k in keys]
    take_out(local, keys[2])
    for age, name in zip((3, 2, 1), packs, strict=True):
        set_age(Path(local.location), name, age, NOW_S)
    prune(local, keep_versions=2)
    assert {name for name in contents(local) if name.endswith(".pack")} == set(packs[:2])


def test_a_version_withdrawn_after_the_plan_was_made_is_not_pruned(local, key):
    name = put_pack(local, key, COLD)
    set_age(Path(local.location), "v1/", 40, NOW_S)
    plan = plan_prune(read_catalog(local), PrunePolicy(unused_days=30), NOW_S)
    take_out(local, key)
    assert apply_prune(local, plan).skipped == (key,)
    assert name in contents(local)
