"""Pruning: finds the versions that a store does not need, and removes them. Versions in use are never touched.

Versions are removed whole: their packs add up, and a single pack is of little use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from compile_cache.errors import SettingsError
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import RECORD, ROOT, USED_NAME, Catalog, Version, catalog_of
from compile_cache.storage.stores.base import ObjectStore, StoredObject

_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """The rules for removal. Each rule that is not None removes versions by itself:

    | rule | removes |
    | --- | --- |
    | `unused_days` | versions that were not used for so many days |
    | `keep_versions` | of each model in each environment, all versions but this many, the last used ones |
    | `most_bytes` | the least recently used versions, until all packs fit |

    A version stays if any of its objects was written in the last `in_use_days`: a pack, or the mark of its use.
    """

    unused_days: float | None = None
    keep_versions: int | None = None
    most_bytes: int | None = None
    in_use_days: float = 2.0

    def __post_init__(self) -> None:
        """Raises:
        SettingsError: a number is negative.
        """
        for value in (self.unused_days, self.keep_versions, self.most_bytes, self.in_use_days):
            if value is not None and not value >= 0:
                raise SettingsError(f"{value} is no limit to prune by: give a number that is not negative")

    def is_in_use(self, version: Version, now_s: float) -> bool:
        """Whether `version` stays regardless of the rules."""
        return now_s - max((entry.modified_s for entry in version.objects), default=0.0) <= self.in_use_days * _DAY_S


@dataclass(frozen=True, slots=True)
class Removal:
    """A version to remove, and the reason."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The objects to remove: versions with their packs, `leftovers` (marks of versions without packs), and
    the records of `environments` in which nothing is left. `kept_bytes` is the size of the packs that stay."""

    removals: tuple[Removal, ...] = ()
    leftovers: tuple[Version, ...] = ()
    environments: tuple[str, ...] = ()
    kept_bytes: int = 0

    @property
    def freed_bytes(self) -> int:
        """The size of all packs to remove."""
        return sum(removal.version.size_bytes for removal in self.removals)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.removals or self.leftovers or self.environments)


@dataclass(frozen=True, slots=True)
class Pruned:
    """The removed objects. `skipped` versions were used or published after the plan was made."""

    versions: int = 0
    packs: int = 0
    freed_bytes: int = 0
    skipped: tuple[CacheKey, ...] = ()


def plan_prune(catalog: Catalog, policy: PrunePolicy, now_s: float) -> PrunePlan:
    """A plan from the catalog of the written store. Changes nothing."""
    versions = [version for version in catalog.versions if version.packs]
    kept = {version.key: version for version in versions}
    removals: list[Removal] = []

    def remove(version: Version, reason: str) -> bool:
        if version.key not in kept or policy.is_in_use(version, now_s):
            return False
        del kept[version.key]
        removals.append(Removal(version, reason))
        return True

    if policy.unused_days is not None:
        for version in versions:
            if now_s - version.used_s > policy.unused_days * _DAY_S:
                remove(version, f"not used for {(now_s - version.used_s) / _DAY_S:.0f} days")
    if policy.keep_versions is not None:
        for rank, version in _beyond(policy.keep_versions, versions):
            remove(version, f"{rank} other version{'s' if rank > 1 else ''} of the model used after it")
    if policy.most_bytes is not None:
        excess_bytes = sum(version.size_bytes for version in kept.values()) - policy.most_bytes
        for version in reversed(_by_use(kept.values())):
            if excess_bytes > 0 and remove(version, "used longest ago, and not all fit"):
                excess_bytes -= version.size_bytes
    empty = (version for version in catalog.versions if not version.packs and _ours(version.others))
    leftovers = tuple(version for version in empty if not policy.is_in_use(version, now_s))
    gone = {removal.version.key for removal in removals} | {version.key for version in leftovers}
    return PrunePlan(
        tuple(removals),
        leftovers,
        _left_empty(catalog, gone, policy, now_s),
        sum(version.size_bytes for version in kept.values()),
    )


def apply_prune(store: ObjectStore, plan: PrunePlan) -> Pruned:
    """Carry out `plan`, but keep each version with an object that was written after the plan was made.

    Packs are deleted first. If the process ends in between, the next plan has the other objects as leftovers.

    Raises:
        StoreError: the store cannot be listed, or refuses to delete. The next plan has the rest.
    """
    versions = packs = freed_bytes = 0
    skipped: list[CacheKey] = []
    for planned in (*(removal.version for removal in plan.removals), *plan.leftovers):
        entries = store.list(planned.key.prefix)
        if set(entries) - set(planned.objects):
            skipped.append(planned.key)
            continue
        for version in catalog_of(entries).versions:
            for entry in (*version.packs, *_ours(version.others)):
                store.delete(entry.name)
            versions += bool(version.packs)
            packs += len(version.packs)
            freed_bytes += version.size_bytes
    for digest in plan.environments:
        folder = f"{ROOT}{digest}/"
        left = catalog_of(store.list(folder))
        if not left.versions and digest in left.records:
            store.delete(folder + RECORD)
    return Pruned(versions, packs, freed_bytes, tuple(skipped))


def remove_packs(store: ObjectStore, version: Version, packs: Collection[str] | None = None) -> list[StoredObject]:
    """Delete the packs of `version` with the names `packs` (all, if that is None) and return them. Of a whole version,
    packs that a container publishes or merges meanwhile are deleted too.

    Raises:
        StoreError: the store cannot be listed, or refuses to delete.
    """
    removed: list[StoredObject] = []
    due = [pack for pack in version.packs if packs is None or pack.name in packs]
    while due:
        for pack in due:
            store.delete(pack.name)
        removed += due
        gone = {pack.name for pack in removed}
        left = next((v.packs for v in catalog_of(store.list(version.key.prefix)).versions), ())
        due = [pack for pack in left if packs is None and pack.name not in gone]
    return removed


def _by_use(versions: Iterable[Version]) -> list[Version]:
    """The versions by last use, the latest first; at equal times, the latest published first."""
    return sorted(versions, key=lambda v: (v.used_s, v.published_s), reverse=True)


def _beyond(count: int, versions: Iterable[Version]) -> list[tuple[int, Version]]:
    """For each model in each environment, all versions but the `count` last used ones, with their rank."""
    groups: dict[tuple[str, str], list[Version]] = {}
    for version in _by_use(versions):
        groups.setdefault((version.key.environment, version.key.model_name), []).append(version)
    return [(rank, version) for group in groups.values() for rank, version in enumerate(group) if rank >= count]


def _ours(entries: Iterable[StoredObject]) -> list[StoredObject]:
    """The marks of use. Other objects in a version's folder do not belong to this library."""
    return [entry for entry in entries if USED_NAME.fullmatch(entry.name.rpartition("/")[2])]


def _left_empty(catalog: Catalog, gone: set[CacheKey], policy: PrunePolicy, now_s: float) -> tuple[str, ...]:
    """The environments of which only the record would be left, unless somebody has just begun to publish there."""
    inhabited = {
        version.key.environment
        for version in catalog.versions
        if version.key not in gone or len(_ours(version.others)) < len(version.others)
    }
    return tuple(
        sorted(
            digest
            for digest, record in catalog.records.items()
            if digest not in inhabited and now_s - record.modified_s > policy.in_use_days * _DAY_S
        )
    )
