"""Explains what a boot on this machine would find, and why it would not find more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile_cache.errors import RefusedPack
from compile_cache.key.cache_key import CacheKey, environment_for, key_for, version_for
from compile_cache.key.environment import Environment
from compile_cache.settings import Settings
from compile_cache.storage.catalog import explain_miss, predecessors, stored_versions
from compile_cache.storage.fetch import PacksOfKey
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import Stores


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a boot on this machine would find.

    `outcome` is `hit`, `seeded` (from the version `seeded_from`) or `miss`, and `reason` says why. Files would be taken
    from `packs`, as far as their heads tell. `refused` packs are left out.

    `stored_versions` of the model have packs for this environment. `assumes_no_sources`: the version would be
    another one if the predictor names sources.
    """

    key: CacheKey
    environment: Environment
    outcome: str
    reason: str = ""
    packs: int = 0
    stored_bytes: int = 0
    seeded_from: str = ""
    refused: tuple[RefusedPack, ...] = ()
    stored_versions: tuple[str, ...] = ()
    assumes_no_sources: bool = False


def explain_boot(
    settings: Settings, stores: Stores, model: str, sources: Sequence[str | Path], environ: Mapping[str, str]
) -> Explanation:
    """Find what a boot would restore, by the boot's own rules, without torch and without a cache directory.

    The directory's number is assumed to be 0, as in a container. This reads only the packs' heads.

    Raises:
        StoreError: a store cannot be listed.
        SettingsError: a path in `sources` does not exist.
    """
    store = stores.reading
    environment = environment_for(settings, Path(settings.dir) / "0", environ)
    key = key_for(settings, environment, model, version_for(settings, model, sources))
    rules = Rules.of(settings)
    found = Explanation(
        key,
        environment,
        "miss",
        stored_versions=tuple(version.key.model_version for version in stored_versions(store, key)),
        assumes_no_sources=not sources and not settings.model_version,
    )
    refused: list[RefusedPack] = []
    others = predecessors(stores.writing, key) if stores.writing else ()
    for candidate in (key, *others):
        packs = PacksOfKey(store if candidate == key or stores.writing is None else stores.writing, candidate, rules)
        packs.refresh()
        selection = packs.select()
        refused += selection.refused
        if selection.files:
            used = [pack.entry for pack in selection.packs if pack.entry.name in selection.needed]
            size_bytes = sum(entry.size_bytes for entry in used)
            found = replace(found, packs=len(used), stored_bytes=size_bytes, refused=tuple(refused))
            if candidate == key:
                return replace(found, outcome="hit")
            reason = f"nothing in {key.prefix}"
            return replace(found, outcome="seeded", reason=reason, seeded_from=candidate.model_version)
    return replace(found, reason=explain_miss(store, key, environment), refused=tuple(refused))
