"""Pruning: what is in use stays, whatever the rules say; what goes is what was planned, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from filled_stores import DAY_S
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import Catalog, Version, catalog_of
from compile_cache.storage.prune import apply_prune, plan_prune
from compile_cache.storage.stores.base import StoredObject

NOW_S = 2_000_000_000.0
HARSH = dict(unused_days=0, keep_versions=0)
MONTH = dict(unused_days=30)
USED = "used-2026-11-20"


def pack(version: str, number: int, days: float, model: str = "m", environment: str = "e") -> StoredObject:
    return other(version, f"{number:064x}.pack", days, model, environment)


def other(version: str, name: str, days: float, model: str = "m", environment: str = "e") -> StoredObject:
    return StoredObject(f"v3/{environment}/{model}/{version}/{name}", 100, NOW_S - days * DAY_S)


def plan(policy: dict[str, Any], *entries: StoredObject) -> dict[Version, str]:
    return plan_prune(catalog_of(entries), NOW_S, **policy)


def removed(found: Iterable[Version]) -> list[str]:
    return [version.key.model_version for version in found]


# The rules.

VERSIONS = [
    pack("published-last", 1, 5),
    pack("used-last", 2, 50),
    other("used-last", USED, 3),
    pack("published-first", 3, 60),
    pack("only-one", 4, 70, model="other"),
    pack("only-one", 5, 80, environment="f"),
]


@pytest.mark.parametrize(
    ("policy", "entries", "gone"),
    [
        (MONTH, [pack("old", 1, 41), pack("new", 2, 29)], ["old"]),
        (MONTH, [pack("old", 1, 41), other("old", USED, 20)], []),
        (dict(keep_versions=1), VERSIONS, ["published-last", "published-first"]),
        (dict(keep_versions=2), VERSIONS, ["published-first"]),
        (dict(keep_versions=3), VERSIONS, []),
        (dict(unused_days=59, keep_versions=2), VERSIONS, ["published-first", "only-one", "only-one"]),
        (dict(), [pack("1", 1, 1000)], []),
        # What was touched in the last two days stays.
        (HARSH, [pack("1", 1, 1)], []),
        (HARSH, [pack("1", 1, 100), pack("1", 2, 1)], []),
        (HARSH, [pack("1", 1, 100), other("1", USED, 1)], []),
        (dict(HARSH, in_use_days=0), [pack("1", 1, 1)], ["1"]),
        (dict(HARSH, in_use_days=7), [pack("1", 1, 6)], []),
        (dict(HARSH, in_use_days=float("nan")), [pack("1", 1, 6)], []),
        # A version in use counts among those kept.
        (dict(keep_versions=1), [pack("in-use", 1, 1), pack("older", 2, 10)], ["older"]),
        # Marks without packs go once they are old; they are no versions to keep, and objects of others are no marks.
        (MONTH, [other("old", USED, 5), other("young", USED, 1)], ["old"]),
        (dict(keep_versions=1), [other("0", USED, 5), pack("1", 1, 9)], ["0"]),
        (HARSH, [other("1", "notes.txt", 500)], []),
    ],
)
def test_what_the_rules_remove(policy, entries, gone):
    assert removed(plan(policy, *entries)) == gone


def test_the_reason_says_how_long_a_version_was_unused_or_how_many_are_kept():
    assert [*plan(MONTH, pack("old", 1, 41)).values()] == ["not used for 41 days"]
    assert "not among the 2 last used" in plan(dict(keep_versions=2), *VERSIONS).values()


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


def test_packs_go_before_marks_and_objects_of_others_stay():
    entries = [other("1", USED, 50), other("1", "notes.txt", 50), pack("1", 1, 50), pack("1", 2, 50)]
    store = Memory(entries)
    found = apply_prune(store, plan(MONTH, *entries))
    assert found == [entries[2], entries[3], entries[0]]
    assert store.deleted == [entry.name for entry in found]


@pytest.mark.parametrize(
    "since", [pack("1", 9, 0), other("1", "used-2026-11-21", 0), pack("1", 1, 49)], ids=["published", "used", "again"]
)
def test_a_version_touched_since_the_plan_is_kept(since):
    entries = [pack("1", 1, 50), pack("2", 2, 50)]
    store = Memory([*entries, since])
    gone = pack("gone by now", 3, 50)
    assert apply_prune(store, plan(MONTH, *entries, gone)) == [entries[1]]
    assert store.deleted == [entries[1].name]


@pytest.mark.parametrize(
    ("stays", "record_stays"), [([], False), ([pack("new", 2, 0)], True), ([other("old", "my.txt", 9)], False)]
)
def test_a_record_goes_with_the_last_version_of_its_environment_and_objects_of_others_stay(stays, record_stays):
    record = StoredObject("v3/e/environment.json", 10, NOW_S - 50 * DAY_S)
    entries = [record, StoredObject("v3/empty/environment.json", 10, NOW_S), pack("old", 1, 40), *stays]
    store = Memory(entries)
    apply_prune(store, plan(MONTH, *entries))
    assert list(store.entries.values()) == ([record, *stays] if record_stays else stays)


# For any store and any policy.

days = st.floats(0, 100)
names = st.sampled_from(["a", "b", "c"])
folders = st.builds("v3/{}/{}/{}/".format, st.sampled_from(["e", "f"]), st.sampled_from(["m", "n"]), names)
objects = st.builds(
    lambda folder, name, size, age: StoredObject(folder + name, size, NOW_S - age * DAY_S),
    folders,
    st.one_of(
        st.builds("{:064x}.pack".format, st.integers(0, 5)), st.sampled_from([USED, "used-2026-10-01", "notes.txt"])
    ),
    st.integers(0, 1000),
    days,
)
records = st.builds(
    lambda environment, age: StoredObject(f"v3/{environment}/environment.json", 7, NOW_S - age * DAY_S),
    st.sampled_from(["e", "f"]),
    days,
)
stores = st.lists(st.one_of(objects, records), max_size=30, unique_by=lambda entry: entry.name)
policies = st.builds(
    dict,
    unused_days=st.none() | days,
    keep_versions=st.none() | st.integers(0, 4),
    in_use_days=st.sampled_from([0.0, 2.0, 30.0]),
)


def youngest_days(version: Version) -> float:
    return min((NOW_S - entry.modified_s) / DAY_S for entry in version.objects)


def with_packs(catalog: Catalog) -> dict[CacheKey, Version]:
    return {version.key: version for version in catalog.versions if version.packs}


@given(stores, policies)
def test_a_plan_touches_nothing_in_use_removes_what_it_says_and_leaves_nothing_to_do(entries, policy):
    catalog = catalog_of(entries)
    found = plan_prune(catalog, NOW_S, **policy)
    assert all(youngest_days(version) > policy["in_use_days"] * (1 - 1e-9) for version in found)
    store = Memory(entries)
    gone = apply_prune(store, found)
    assert {entry.name for entry in entries} - store.entries.keys() == set(store.deleted)
    assert {entry.name for entry in gone} >= {pack.name for version in found for pack in version.packs}
    left = catalog_of(store.list("v3/"))
    removed_keys = {version.key for version in found}
    assert {key: version.packs for key, version in with_packs(left).items()} == {
        key: version.packs for key, version in with_packs(catalog).items() if key not in removed_keys
    }
    assert all("notes.txt" not in name for name in store.deleted)
    assert plan_prune(left, NOW_S, **policy) == {}
    assert left.records.keys() <= {version.key.environment for version in left.versions}
