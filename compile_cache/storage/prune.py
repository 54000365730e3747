"""Removes what a store no longer needs: versions by age and number, and packs that somebody names.

Versions are pruned whole: their packs add up, and a single pack is of little use. A version in use is never pruned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from compile_cache.storage.catalog import Catalog, Version, read_catalog
from compile_cache.storage.stores.base import ObjectStore, StoredObject
from compile_cache.storage.stores.local import index_folder

_DAY_S = 86_400.0


def plan_prune(
    catalog: Catalog,
    now_s: float,
    unused_days: float | None = None,
    keep_versions: int | None = None,
    in_use_days: float = 2.0,
) -> dict[Version, str]:
    """The versions that the rules remove, with the reasons, from the catalog of the written store. Changes nothing.
    Each rule that is not None removes versions by itself:

    | rule | removes |
    | --- | --- |
    | `unused_days` | versions that were not used for so many days |
    | `keep_versions` | of each model in each environment, all versions but this many, the last used ones |

    A version stays if any of its objects was written in the last `in_use_days`: a pack, or the mark of its use.

    Among them are versions without packs: marks of use that were left over.
    """
    removals: dict[Version, str] = {}
    ranks: Counter[tuple[str, str]] = Counter()
    for version in sorted(catalog.versions, key=lambda v: (v.used_s, v.published_s), reverse=True):
        group = version.key.environment, version.key.model_name
        ranks[group] += bool(version.packs)
        idle_days = (now_s - version.used_s) / _DAY_S
        if not idle_days > in_use_days:  # also where a store's time is no number
            continue
        if not version.packs:
            removals[version] = "its packs are gone"
        elif unused_days is not None and idle_days > unused_days:
            removals[version] = f"not used for {idle_days:.0f} days"
        elif keep_versions is not None and ranks[group] > keep_versions:
            removals[version] = f"not among the {keep_versions} last used"
    return removals


def apply_prune(store: ObjectStore, plan: Iterable[Version]) -> list[StoredObject]:
    """Remove the versions of `plan`, but keep each version with an object that was written after the plan was made.
    Returns the removed objects.

    Raises:
        StoreError: the store cannot be listed, or refuses to delete. The next plan has the rest.
    """

    def due() -> Iterator[StoredObject]:
        for planned in plan:
            for version in read_catalog(store, planned.key.prefix).versions:  # one, if it is still there
                if set(version.objects) <= set(planned.objects):
                    yield from version.objects  # if a process ends before the marks, the next plan has them

    return remove(store, due())


def remove(store: ObjectStore, due: Iterable[StoredObject]) -> list[StoredObject]:
    """Delete the objects `due` in their order, and return them. Also delete the records of environments in which
    nothing is left, and renew a folder's index.

    Raises:
        StoreError: the store cannot be listed, or refuses to delete.
    """
    removed = []
    for entry in due:
        store.delete(entry.name)
        removed.append(entry)
    catalog = read_catalog(store)
    for digest in catalog.records.keys() - {version.key.environment for version in catalog.versions}:
        store.delete(catalog.records[digest].name)
    index_folder(store)
    return removed
