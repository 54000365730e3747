"""The page's facts from a store: versions, environments, first boots, and why reported boots found nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compile_cache.errors import StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.lifecycle.history import HISTORY, PastBoot, read_first
from compile_cache.lifecycle.report import BootReport
from compile_cache.settings import Settings
from compile_cache.store.base import ObjectStore
from compile_cache.versions.catalog import Catalog, Version, explain_miss, read_catalog, read_record
from compile_cache.versions.fetch import fetch
from compile_cache.versions.packs import PacksOfKey, Selection
from compile_cache.versions.portion import Portion
from compile_cache.versions.refused_earlier import RefusedEarlier
from compile_cache.versions.rules import Rules

# Each costs some requests to the store.
_MOST_FIRST_BOOTS = 25
_MOST_KEYS = 10
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Content:
    """A store's versions, the one used last first, and its environments' records by digest, None where none can be
    read. `first_boots` are those that the packs name. `today` says what a boot of a report's key would find
    now. `problems` are the layers that could not be listed."""

    location: str
    versions: Sequence[Version] = ()
    environments: Mapping[str, Environment | None] = field(default_factory=dict)
    first_boots: Mapping[CacheKey, PastBoot] = field(default_factory=dict)
    today: Mapping[CacheKey, str] = field(default_factory=dict)
    strangers: int = 0
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _FirstBoot(Portion):
    """Only the file about the key's first boot."""

    def of(self, selection: Selection) -> Selection:
        """The same packs with only this file chosen."""
        return replace(selection, files={path: file for path, file in selection.files.items() if path == HISTORY})


def key_of(report: BootReport) -> CacheKey | None:
    """The key under which a boot looked; None if it did not get so far."""
    if not (report.environment and report.model_name and report.model_version):
        return None
    return CacheKey(report.environment, report.model_name, report.model_version)


def read_content(store: ObjectStore, settings: Settings, reports: Iterable[BootReport]) -> Content:
    """List a store, and read the little that the page needs: heads, records, first boots. No pack is read whole.

    Raises:
        StoreError: the store cannot be listed.
    """
    catalog = read_catalog(store)
    versions = [version for version in catalog.versions if version.all_packs]
    versions.sort(key=lambda version: (-version.used_s, version.key.prefix))
    packs = _PacksOf(store, settings)
    missed = {
        key: None for report in reports if report.restore.outcome not in ("hit", "off") and (key := key_of(report))
    }
    return Content(
        store.location,
        versions,
        {digest: read_record(store, catalog, digest) for digest in {v.key.environment: None for v in versions}},
        {v.key: first for v in versions[:_MOST_FIRST_BOOTS] if v.packs and (first := packs.first_boot(v.key))},
        {key: _today(store, catalog, key) for key in list(missed)[:_MOST_KEYS]},
        len(catalog.strangers),
        list(getattr(store, "problems", ())),
    )


class _PacksOf:
    """Reads small files from packs, verified as a restore verifies them."""

    def __init__(self, store: ObjectStore, settings: Settings) -> None:
        self._store, self._rules = store, Rules.of(settings)
        self._earlier = RefusedEarlier(Path(settings.dir) / "refused", store.location, self._rules, is_read_only=True)

    def first_boot(self, key: CacheKey) -> PastBoot | None:
        """The first boot of `key`; None if its packs do not say, or cannot be read."""
        packs = PacksOfKey(self._store, key, self._rules, self._earlier)
        with tempfile.TemporaryDirectory(prefix="compile-cache-") as folder:
            try:
                fetched = fetch(packs, Path(folder), portion=_FirstBoot("", 1, _MOST_BYTES))
            except StoreError:
                return None
            staged = fetched.files.get(HISTORY)
            return read_first(Path(staged.local)) if staged else None


def _today(store: ObjectStore, catalog: Catalog, key: CacheKey) -> str:
    """What a boot of this key would find now."""
    packs = sum(len(version.packs) for version in catalog.versions if version.key == key)
    if packs:
        return f"now stored: {packs} {'pack' if packs == 1 else 'packs'} for this version and environment"
    environment = read_record(store, catalog, key.environment)
    if environment is None and any(version.key.model_name == key.model_name for version in catalog.versions):
        return "the model is stored, but not for this version and environment; no record says how they differ"
    return explain_miss(store, key, environment) if environment else f"no version of {key.model_name} is stored"
