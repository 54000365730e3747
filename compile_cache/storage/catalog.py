"""The catalog of a store: environments, model names, versions, packs and times of last use.

It is made from the names, sizes and times of a listing. No pack is opened, and nothing in the catalog is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field

import msgspec

from compile_cache.errors import StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import FORMAT_VERSION, Environment
from compile_cache.storage.pack.format import PACK_NAME
from compile_cache.storage.stores.base import ReadableStore, StoredObject

ROOT = f"v{FORMAT_VERSION}/"

# Only names that `object_name` can make. Anybody who may write to a store can choose names, and names are printed and
# logged.
_PART = r"(?![.-])[A-Za-z0-9._-]{1,128}"
RECORD = "environment.json"
_NAME = re.compile(
    rf"{ROOT}(?P<environment>{_PART})/(?:{re.escape(RECORD)}|(?P<model>{_PART})/(?P<version>{_PART})/"
    rf"(?:(?P<pack>{PACK_NAME.pattern})|used-\d{{4}}-\d{{2}}-\d{{2}}))"
)
_MOST_RECORD_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Version:
    """One key's objects: its packs, oldest first, and the marks of its use. Times are seconds since 1970."""

    key: CacheKey
    packs: tuple[StoredObject, ...] = ()
    marks: tuple[StoredObject, ...] = ()

    @property
    def objects(self) -> tuple[StoredObject, ...]:
        """The packs, then the marks."""
        return (*self.packs, *self.marks)

    @property
    def size_bytes(self) -> int:
        """The size of all packs."""
        return sum(pack.size_bytes for pack in self.packs)

    @property
    def published_s(self) -> float:
        """The time when the newest pack was stored; 0 without packs."""
        return max((pack.modified_s for pack in self.packs), default=0.0)

    @property
    def used_s(self) -> float:
        """The day of the last use: the store's time of the last recorded use, or of the newest pack."""
        return max(entry.modified_s for entry in self.objects)


@dataclass(frozen=True, slots=True)
class Catalog:
    """A store's content. `records` has the environments' records by digest. Objects with names that this library does
    not use are left out."""

    versions: tuple[Version, ...] = ()
    records: dict[str, StoredObject] = field(default_factory=dict)


def read_catalog(store: ReadableStore, prefix: str = ROOT) -> Catalog:
    """The catalog of all objects below `prefix`. Takes one request per 1,000 objects.

    Raises:
        StoreError: the store cannot be listed.
    """
    return catalog_of(store.list(prefix))


def catalog_of(entries: Iterable[StoredObject]) -> Catalog:
    """The catalog of a listing."""
    objects: dict[CacheKey, tuple[list[StoredObject], list[StoredObject]]] = {}
    records: dict[str, StoredObject] = {}
    for entry in entries:
        name = _NAME.fullmatch(entry.name)
        if name and name["model"] is None:
            records[name["environment"]] = entry
        elif name:
            packs, marks = objects.setdefault(CacheKey(*name.group("environment", "model", "version")), ([], []))
            (packs if name["pack"] else marks).append(entry)
    versions = tuple(Version(key, tuple(packs), tuple(marks)) for key, (packs, marks) in objects.items())
    return Catalog(versions, records)


def explain_miss(store: ReadableStore, key: CacheKey, environment: Environment) -> str:
    """Why nothing was found, in one line: mostly the differences to the environment of the newest stored version.

    Lists the whole store: one request per 1,000 objects.

    Raises:
        StoreError: the store cannot be listed.
    """
    catalog = read_catalog(store)
    same_model = [v for v in catalog.versions if v.packs and v.key.model_name == key.model_name]
    elsewhere = [v for v in same_model if v.key.environment != key.environment]
    if not same_model:
        names = sorted({version.key.model_name for version in catalog.versions if version.packs})
        return f"no version of {key.model_name} is stored" + (f", only {', '.join(names[:5])}" if names else "")
    if any(version.key == key for version in same_model):
        return f"none of the packs stored for version {key.model_version} of {key.model_name} can be used"
    if len(elsewhere) < len(same_model):
        return f"version {key.model_version} of {key.model_name} is not stored"
    newest = max(elsewhere, key=lambda version: (version.key.model_version == key.model_version, version.published_s))
    record = read_record(store, catalog, newest.key.environment)
    if record is None:
        return f"{key.model_name} is stored for another environment, whose record cannot be read"
    return "stored for another environment: " + ", ".join(record.differences(environment))


def read_record(store: ReadableStore, catalog: Catalog, digest: str) -> Environment | None:
    """The record of an environment; None if there is none that can be read. It only informs, and is never trusted."""
    entry = catalog.records.get(digest)
    if entry is None:
        return None
    try:
        record = msgspec.json.decode(store.read(entry.name, 0, _MOST_RECORD_BYTES), type=Environment)
    except (StoreError, msgspec.DecodeError, RecursionError):
        return None
    # Without escape codes and line ends.
    is_clean = "".join([*record.variables, *map(str, astuple(record))]).isprintable()
    return record if record.digest == digest and is_clean else None
