"""Pruning: what is in use stays, whatever the rules say; what goes is what was planned, and frees what was claimed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from filled_stores import DAY_S, put_pack, put_record, set_age
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.errors import SettingsError, StoreAccessDenied
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import Catalog, Version, catalog_of, read_catalog
from compile_cache.storage.prune import Pruned, PrunePlan, PrunePolicy, apply_prune, plan_prune
from compile_cache.storage.stores.base import LayeredStore, StoredObject

NOW_S = 2_000_000_000.0


def pack(version: str, number: int, days: float, size_bytes: int = 100, model: str = "m", environment: str = "e"):
    name = f"v2/{environment}/{model}/{version}/{number:064x}.pack"
    return StoredObject(name, size_bytes, NOW_S - days * DAY_S)


def other(version: str, name: str, days: float, model: str = "m", environment: str = "e") -> StoredObject:
    return StoredObject(f"v2/{environment}/{model}/{version}/{name}", 0, NOW_S - days * DAY_S)


def plan(policy: PrunePolicy, *entries: StoredObject) -> PrunePlan:
    return plan_prune(catalog_of(entries), policy, NOW_S)


def removed(found: PrunePlan) -> list[str]:
    return [removal.version.key.model_version for removal in found.removals]


# The rules.


def test_a_version_unused_for_longer_than_allowed_goes_and_the_reason_says_how_long():
    found = plan(PrunePolicy(unused_days=30), pack("old", 1, 41), pack("new", 2, 29))
    assert removed(found) == ["old"]
    assert found.removals[0].reason == "not used for 41 days"
    assert (found.freed_bytes, found.kept_bytes) == (100, 100)
    # A mark of use keeps an old pack.
    assert removed(plan(PrunePolicy(unused_days=30), pack("1", 1, 41), other("1", "used-2026-11-20", 20))) == []


def test_of_each_model_and_environment_the_versions_used_last_are_kept():
    entries = [
        pack("published last", 1, 5),
        pack("used last", 2, 50),
        other("used last", "used-2026-11-20", 3),
        pack("published first", 3, 60),
        pack("only one", 4, 70, model="other"),
        pack("only one", 5, 80, environment="f"),
    ]
    entries = [replace(entry, name=entry.name.replace(" ", "-")) for entry in entries]
    assert removed(plan(PrunePolicy(keep_versions=1), *entries)) == ["published-last", "published-first"]
    assert removed(plan(PrunePolicy(keep_versions=2), *entries)) == ["published-first"]
    assert removed(plan(PrunePolicy(keep_versions=3), *entries)) == []


def test_what_was_used_longest_ago_goes_until_the_rest_fits():
    entries = [pack(str(days), days, days) for days in (10, 20, 30, 40)]
    assert removed(plan(PrunePolicy(most_bytes=400), *entries)) == []
    assert removed(plan(PrunePolicy(most_bytes=399), *entries)) == ["40"]
    assert removed(plan(PrunePolicy(most_bytes=200), *entries)) == ["40", "30"]
    assert removed(plan(PrunePolicy(most_bytes=0), *entries)) == ["40", "30", "20", "10"]


def test_what_another_rule_removes_makes_room():
    entries = [pack("old", 1, 50, 1000), pack("middle", 2, 20), pack("new", 3, 10)]
    assert removed(plan(PrunePolicy(unused_days=30, most_bytes=200), *entries)) == ["old"]
    # Without rules, nothing goes.
    assert plan(PrunePolicy(), pack("1", 1, 1000)).is_empty


@pytest.mark.parametrize("values", [{"unused_days": -1.0}, {"most_bytes": -1}, {"in_use_days": float("nan")}])
def test_a_policy_that_makes_no_sense_is_refused(values):
    with pytest.raises(SettingsError):
        PrunePolicy(**values)


# What is in use.

HARSH = PrunePolicy(unused_days=0, keep_versions=0, most_bytes=0)


@pytest.mark.parametrize(
    "entries",
    [
        [pack("1", 1, 1)],
        [pack("1", 1, 100), pack("1", 2, 1)],
        [pack("1", 1, 100), other("1", "used-2026-11-20", 1)],
    ],
    ids=["published", "published again", "used"],
)
def test_what_was_touched_in_the_last_two_days_stays_whatever_the_rules_say(entries):
    assert plan(HARSH, *entries).is_empty


def test_how_long_something_is_in_use_can_be_chosen():
    assert removed(plan(replace(HARSH, in_use_days=0), pack("1", 1, 1))) == ["1"]
    assert removed(plan(replace(HARSH, in_use_days=7), pack("1", 1, 6))) == []


def test_a_version_in_use_counts_among_those_kept():
    entries = [pack("in-use", 1, 1), pack("older", 2, 10)]
    assert removed(plan(PrunePolicy(keep_versions=1), *entries)) == ["older"]


def test_what_is_in_use_and_does_not_fit_is_told():
    found = plan(PrunePolicy(most_bytes=10), pack("in-use", 1, 1), pack("old", 2, 10))
    assert removed(found) == ["old"]
    assert found.kept_bytes == 100


# Leftovers.


def test_marks_without_packs_go_once_they_are_old():
    old, young = other("old", "used-2026-11-16", 5), other("young", "used-2026-11-20", 1)
    found = plan(PrunePolicy(unused_days=30), old, young)
    assert [version.key.model_version for version in found.leftovers] == ["old"]
    # Objects of others are no leftovers.
    assert plan(HARSH, other("1", "notes.txt", 500)).is_empty


def test_a_record_goes_with_the_last_version_of_its_environment():
    record = StoredObject("v2/e/environment.json", 10, NOW_S - 50 * DAY_S)
    assert plan(PrunePolicy(unused_days=30), record, pack("old", 1, 40)).environments == ("e",)
    assert plan(PrunePolicy(unused_days=30), record, pack("old", 1, 40), pack("new", 2, 1)).environments == ()
    assert plan(PrunePolicy(unused_days=30), record, pack("old", 1, 40), other("old", "my.txt", 9)).environments == ()
    assert plan(PrunePolicy(unused_days=30), record).environments == ("e",)


# Doing it.


class Memory:
    """A store in memory that counts what is deleted; nothing else fails in it."""

    location = "memory"

    def __init__(self, entries: Sequence[StoredObject]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.deleted: list[str] = []

    def list(self, prefix: str) -> Sequence[StoredObject]:
        return [entry for name, entry in self.entries.items() if name.startswith(prefix)]

    def delete(self, name: str) -> None:
        self.deleted.append(name)
        self.entries.pop(name, None)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries.values())


def test_packs_go_before_marks():
    entries = [other("1", "used-2026-11-20", 50), pack("1", 1, 50), pack("1", 2, 50)]
    store = Memory(entries)
    pruned = apply_prune(store, plan(PrunePolicy(unused_days=30), *entries))
    assert [name.rpartition("/")[2].partition(".")[2] or name[-15:] for name in store.deleted] == [
        "pack",
        "pack",
        "used-2026-11-20",
    ]
    assert (pruned.versions, pruned.packs, pruned.freed_bytes, pruned.skipped) == (1, 2, 200, ())


@pytest.mark.parametrize(
    "since",
    [pack("1", 9, 0), other("1", "used-2026-11-21", 0), pack("1", 1, 49)],
    ids=["published", "used", "put again"],
)
def test_a_version_touched_since_the_plan_is_skipped_and_named(since):
    entries = [pack("1", 1, 50), pack("2", 2, 50)]
    found = plan(PrunePolicy(unused_days=30), *entries)
    store = Memory([*entries, since])
    pruned = apply_prune(store, found)
    assert pruned.skipped == (CacheKey("e", "m", "1"),)
    assert store.deleted == [entries[1].name]


def test_a_version_that_is_gone_by_now_frees_nothing():
    found = plan(PrunePolicy(unused_days=30), pack("1", 1, 50))
    assert apply_prune(Memory([]), found) == Pruned()


def test_a_record_stays_when_its_environment_is_published_to_meanwhile():
    record = StoredObject("v2/e/environment.json", 10, NOW_S - 50 * DAY_S)
    entries = [record, pack("old", 1, 40)]
    store = Memory([*entries, pack("new", 2, 0)])
    apply_prune(store, plan(PrunePolicy(unused_days=30), *entries))
    assert store.deleted == [entries[1].name]


def test_objects_of_others_in_a_version_stay():
    entries = [pack("1", 1, 50), other("1", "notes.txt", 50)]
    store = Memory(entries)
    apply_prune(store, plan(PrunePolicy(unused_days=30), *entries))
    assert list(store.entries) == [entries[1].name]


def test_a_store_that_may_not_be_written_says_so(local, key):
    set_age(Path(local.location), put_pack(local, key), 50, NOW_S)
    found = plan_prune(read_catalog(local), PrunePolicy(unused_days=30), NOW_S)
    with pytest.raises(StoreAccessDenied):
        apply_prune(LayeredStore([local]), found)


def test_a_real_store_is_pruned_to_what_is_kept(local, key, environment):
    put_pack(local, replace(key, model_version="old"))
    new = put_pack(local, key)
    put_pack(local, replace(key, environment="0" * 32))
    put_record(local, environment)
    local.put(f"v2/{'0' * 32}/environment.json", b"{}")
    set_age(Path(local.location), "v2/", 50, NOW_S)
    set_age(Path(local.location), new, 1, NOW_S)
    found = plan_prune(read_catalog(local), PrunePolicy(unused_days=30), NOW_S)
    pruned = apply_prune(local, found)
    assert {entry.name for entry in local.list("")} == {new, f"v2/{environment.digest}/environment.json"}
    assert (pruned.versions, pruned.packs, pruned.freed_bytes) == (2, 2, found.freed_bytes)


# For any store and any policy.

days = st.floats(0, 100)
names = st.sampled_from(["a", "b", "c"])
folders = st.builds("v2/{}/{}/{}/".format, st.sampled_from(["e", "f"]), st.sampled_from(["m", "n"]), names)
objects = st.builds(
    lambda folder, name, size, age: StoredObject(folder + name, size, NOW_S - age * DAY_S),
    folders,
    st.one_of(
        st.builds("{:064x}.pack".format, st.integers(0, 5)),
        st.sampled_from(["used-2026-11-20", "used-2026-10-01", "notes.txt"]),
    ),
    st.integers(0, 1000),
    days,
)
records = st.builds(
    lambda environment, age: StoredObject(f"v2/{environment}/environment.json", 7, NOW_S - age * DAY_S),
    st.sampled_from(["e", "f"]),
    days,
)
stores = st.lists(st.one_of(objects, records), max_size=30, unique_by=lambda entry: entry.name)
policies = st.builds(
    PrunePolicy,
    st.none() | days,
    st.none() | st.integers(0, 4),
    st.none() | st.integers(0, 5000),
    st.sampled_from([0.0, 2.0, 30.0]),
)


def youngest_days(version: Version) -> float:
    return min((NOW_S - entry.modified_s) / DAY_S for entry in (*version.packs, *version.others))


def with_packs(catalog: Catalog) -> list[Version]:
    return [version for version in catalog.versions if version.packs]


@given(stores, policies)
def test_a_plan_never_contains_a_version_in_use(entries, policy):
    catalog = catalog_of(entries)
    found = plan_prune(catalog, policy, NOW_S)
    for version in [*(removal.version for removal in found.removals), *found.leftovers]:
        assert youngest_days(version) > policy.in_use_days * (1 - 1e-9)


@given(stores, policies)
def test_a_plan_frees_what_it_claims_and_leaves_what_it_says(entries, policy):
    catalog = catalog_of(entries)
    found = plan_prune(catalog, policy, NOW_S)
    store = Memory(entries)
    before_bytes = store.size_bytes
    pruned = apply_prune(store, found)
    assert before_bytes - store.size_bytes >= found.freed_bytes == pruned.freed_bytes
    left = catalog_of(store.list("v2/"))
    assert left.size_bytes == found.kept_bytes
    removed_keys = {removal.version.key for removal in found.removals}
    kept = {version.key: version.packs for version in with_packs(catalog) if version.key not in removed_keys}
    assert {version.key: version.packs for version in with_packs(left)} == kept
    assert all("notes.txt" not in name for name in store.deleted)


@given(stores, policies)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(entries, policy):
    store = Memory(entries)
    apply_prune(store, plan_prune(catalog_of(entries), policy, NOW_S))
    assert plan_prune(catalog_of(list(store.entries.values())), policy, NOW_S).is_empty


@given(stores, st.integers(0, 4))
def test_of_each_model_and_environment_no_version_kept_was_used_before_one_removed(entries, keep):
    catalog = catalog_of(entries)
    found = plan_prune(catalog, PrunePolicy(keep_versions=keep, in_use_days=0), NOW_S)
    gone = {removal.version.key for removal in found.removals}
    groups: dict[tuple[str, str], list[Version]] = {}
    for version in with_packs(catalog):
        groups.setdefault((version.key.environment, version.key.model_name), []).append(version)
    for group in groups.values():
        kept = [version for version in group if version.key not in gone]
        lost = [version for version in group if version.key in gone]
        in_use = [version for version in group if youngest_days(version) == 0]
        assert min(keep, len(group)) <= len(kept) <= max(keep, keep + len(in_use))
        assert all(mine.used_s <= yours.used_s for mine in lost for yours in kept if yours not in in_use)


@given(stores, st.integers(0, 5000))
def test_a_store_fits_afterwards_or_all_that_is_left_is_in_use(entries, most_bytes):
    policy = PrunePolicy(most_bytes=most_bytes)
    catalog = catalog_of(entries)
    found = plan_prune(catalog, policy, NOW_S)
    gone = {removal.version.key for removal in found.removals}
    if found.kept_bytes > most_bytes:
        assert all(policy.is_in_use(version, NOW_S) for version in with_packs(catalog) if version.key not in gone)
