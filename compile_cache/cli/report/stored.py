"""The page's facts from a store: versions, environments, and why reported boots found nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.lifecycle.report import BootReport
from compile_cache.store.base import ObjectStore
from compile_cache.versions.catalog import Catalog, Version, explain_miss, read_catalog, read_record

# Each costs some requests to the store.
_MOST_KEYS = 10


@dataclass(frozen=True, slots=True)
class Content:
    """A store's versions, the one used last first, and its environments' records by digest, None where none can be
    read. `today` says what a boot of a report's key would find now. `problems` name layers that could not be listed."""

    location: str
    versions: Sequence[Version] = ()
    environments: Mapping[str, Environment | None] = field(default_factory=dict)
    today: Mapping[CacheKey, str] = field(default_factory=dict)
    strangers: int = 0
    problems: Sequence[str] = ()


def key_of(report: BootReport) -> CacheKey | None:
    """The key under which a boot looked; None if it did not get so far."""
    if not (report.environment and report.model_name and report.model_version):
        return None
    return CacheKey(report.environment, report.model_name, report.model_version)


def read_content(store: ObjectStore, reports: Iterable[BootReport]) -> Content:
    """List a store, and read the environments' records. No pack is opened.

    Raises:
        StoreError: the store cannot be listed.
    """
    catalog = read_catalog(store)
    versions = [version for version in catalog.versions if version.packs]
    versions.sort(key=lambda version: (-version.used_s, version.key.prefix))
    missed = {
        key: None for report in reports if report.restore.outcome not in ("hit", "off") and (key := key_of(report))
    }
    return Content(
        store.location,
        versions,
        {digest: read_record(store, catalog, digest) for digest in {v.key.environment: None for v in versions}},
        {key: _today(store, catalog, key) for key in list(missed)[:_MOST_KEYS]},
        len(catalog.strangers),
        list(getattr(store, "problems", ())),
    )


def _today(store: ObjectStore, catalog: Catalog, key: CacheKey) -> str:
    """What a boot of this key would find now."""
    packs = sum(len(version.packs) for version in catalog.versions if version.key == key)
    if packs:
        return f"now stored: {packs} {'pack' if packs == 1 else 'packs'} for this version and environment"
    environment = read_record(store, catalog, key.environment)
    if environment is None and any(version.key.model_name == key.model_name for version in catalog.versions):
        return "the model is stored, but not for this version and environment; no record says how they differ"
    return explain_miss(store, key, environment) if environment else f"no version of {key.model_name} is stored"
