"""Takes packs out of use for every boot that reads a store, and brings them back (withdrawal.py)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from compile_cache.key.cache_key import CacheKey
from compile_cache.store.base import ObjectStore, StoredObject
from compile_cache.versions.catalog import Version, catalog_of, stored_versions
from compile_cache.versions.rules import Rules
from compile_cache.versions.verify import verify_heads
from compile_cache.versions.withdrawal import WITHDRAWN, Withdrawal

_MOST_LOOKS = 5

# A file's path and the SHA-256 of its content.
_Content = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WithdrawalPlan:
    """The packs to take out of use: all of `version` as it was listed, or some. `contents` has the files of each pack
    whose head could be read."""

    version: Version
    packs: tuple[StoredObject, ...]
    is_whole_version: bool
    contents: dict[str, frozenset[_Content]]


@dataclass(frozen=True, slots=True)
class SharedFiles:
    """A pack in use, and how many of its files are equal to files of withdrawn packs."""

    pack: str
    shared: int
    files: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The packs taken out of use. `left` packs were published faster than they could be withdrawn. `shared` packs have
    files of withdrawn packs: mostly they were seeded from them, or compiled to the same bytes."""

    packs: tuple[StoredObject, ...] = ()
    left: tuple[StoredObject, ...] = ()
    shared: tuple[SharedFiles, ...] = ()


@dataclass(frozen=True, slots=True)
class Reinstated:
    """The packs brought back into use. `missing` packs are no longer stored. `withdrawn_elsewhere` are still out of
    use, because a read-only layer withdraws them."""

    packs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    withdrawn_elsewhere: tuple[str, ...] = ()


def plan_withdrawal(
    reading: ObjectStore, version: Version, packs: Collection[str] | None, rules: Rules
) -> WithdrawalPlan:
    """Read the heads of the packs to withdraw: the packs of `version` in use, or those of them named in `packs`.

    Changes nothing. If a head cannot be read, only the plan's `contents` are incomplete.
    """
    found = tuple(pack for pack in version.packs if packs is None or pack.name in packs)
    return WithdrawalPlan(version, found, packs is None, _contents(reading, found, rules))


def withdraw(reading: ObjectStore, writing: ObjectStore, plan: WithdrawalPlan, reason: str, rules: Rules) -> Withdrawn:
    """Carry out `plan`: store a withdrawal in `writing` for each pack.

    `reading` has the layers of a boot, `writing` among them. They are listed again. For a whole version, packs
    published meanwhile are withdrawn too. For single packs, packs into which they were merged meanwhile are. Packs
    published later are in use.

    Raises:
        SettingsError: the reason cannot be stored.
        StoreError: a store cannot be listed, or `writing` cannot be written. Some packs may be withdrawn. Try again.
    """
    before = {pack.name for pack in plan.version.objects}
    contents = dict(plan.contents)
    withdrawn: dict[str, StoredObject] = {}
    due: Sequence[StoredObject] = plan.packs
    for _ in range(_MOST_LOOKS):
        for pack in due:
            mark = Withdrawal(pack.name, time.time(), reason)
            writing.put_if_absent(pack.name + WITHDRAWN, mark.to_json())
            withdrawn[pack.name] = pack
        version = _version(reading, plan.version.key)
        new = [pack for pack in version.packs if pack.name not in before]
        contents |= _contents(reading, [pack for pack in new if pack.name not in contents], rules)
        due = version.packs if plan.is_whole_version else _merged_from(plan, new, contents)
        if not due:
            break
    gone = frozenset[_Content]().union(*(contents.get(name, frozenset()) for name in withdrawn))
    return Withdrawn(tuple(withdrawn.values()), tuple(due), _sharing(reading, plan.version.key, gone, rules))


def reinstate(reading: ObjectStore, writing: ObjectStore, key: CacheKey, packs: Iterable[str]) -> Reinstated:
    """Delete the withdrawals of `packs`, which are names of objects of `key`, from `writing`.

    Raises:
        StoreError: a store cannot be listed, or `writing` refuses to delete.
    """
    names = sorted(packs)
    for name in names:
        writing.delete(name + WITHDRAWN)
    version = _version(reading, key)
    in_use = {pack.name for pack in version.packs}
    still = {entry.name.removesuffix(WITHDRAWN) for entry in version.withdrawals}
    return Reinstated(
        tuple(name for name in names if name in in_use),
        tuple(name for name in names if name not in in_use and name not in still),
        tuple(name for name in names if name in still),
    )


def _version(store: ObjectStore, key: CacheKey) -> Version:
    found = catalog_of(store.list(key.prefix)).versions
    return next((version for version in found if version.key == key), Version(key))


def _contents(store: ObjectStore, packs: Sequence[StoredObject], rules: Rules) -> dict[str, frozenset[_Content]]:
    """The files of the packs whose heads can be read and verified."""
    return {
        pack.entry.name: frozenset((file.path, file.sha256) for file in pack.head.manifest.files)
        for pack in verify_heads(store, packs, rules)
        if pack.head
    }


def _merged_from(
    plan: WithdrawalPlan, new: Sequence[StoredObject], contents: dict[str, frozenset[_Content]]
) -> list[StoredObject]:
    """The `new` packs that have every file of a pack to withdraw: compaction made them meanwhile."""
    gone = [contents[pack.name] for pack in plan.packs if contents.get(pack.name)]
    return [pack for pack in new if any(content <= contents.get(pack.name, frozenset()) for content in gone)]


def _sharing(reading: ObjectStore, key: CacheKey, gone: frozenset[_Content], rules: Rules) -> tuple[SharedFiles, ...]:
    """The packs in use, of all versions of the model in this environment, that have files of `gone`."""
    found = []
    for version in stored_versions(reading, key) if gone else ():
        for name, content in _contents(reading, version.packs, rules).items():
            if shared := len(content & gone):
                found.append(SharedFiles(name, shared, len(content)))
    return tuple(found)
