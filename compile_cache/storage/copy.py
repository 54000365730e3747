"""Copies packs between stores, for example into a folder that goes into an image or behind a web server."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compile_cache.errors import ObjectNotFound, RefusedPack, StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import MOST_RECORD_BYTES, ROOT, Catalog, Version, names_record, read_catalog
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, StoredObject
from compile_cache.storage.stores.local import LocalStore
from compile_cache.storage.stores.transfer import READ_BYTES
from compile_cache.storage.verify import PackState, verify_heads, verify_whole

_MOST_LISTINGS = 3


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy. `present_packs` were in the target already. `refused` packs were not copied."""

    versions: int = 0
    packs: int = 0
    stored_bytes: int = 0
    present_packs: int = 0
    refused: tuple[RefusedPack, ...] = ()


def copy_versions(
    source: ObjectStore,
    target: ObjectStore,
    is_wanted: Callable[[CacheKey], bool],
    rules: Rules,
) -> Copied:
    """Copy the packs of each wanted version, and their environments' records, if `target` does not have them.

    Each pack is read into a temporary folder and verified there; then `target` gets it in one put. So an interrupted
    copy leaves only whole and sound packs, and the next copy goes on from there. If packs are merged meanwhile, the
    source is listed again.

    Raises:
        StoreError: a store cannot be listed, or `target` cannot be written.
        OSError: the temporary folder cannot be written.
    """
    copy = _Copy(source, target, rules)
    for _ in range(_MOST_LISTINGS):
        catalog = read_catalog(source)
        versions = [version for version in catalog.versions if version.packs and is_wanted(version.key)]
        copy.packs(versions)
        if not copy.vanished:
            break
    copy.records(catalog, {version.key.environment for version in versions})
    return Copied(
        len(versions),
        len(copy.copied),
        sum(copy.copied.values()),
        len(copy.present),
        (*copy.refused.values(), *copy.vanished.values()),
    )


@dataclass(slots=True)
class _Copy:
    """One copy in progress."""

    source: ObjectStore
    target: ObjectStore
    rules: Rules
    present: set[str] = field(default_factory=set)
    refused: dict[str, RefusedPack] = field(default_factory=dict)
    vanished: dict[str, RefusedPack] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)

    def packs(self, versions: Sequence[Version]) -> None:
        """Copy missing packs, oldest first, so that the target lists them in the same order."""
        there = {(entry.name, entry.size_bytes) for entry in self.target.list(ROOT)}
        self.vanished = {}
        packs = [pack for version in versions for pack in version.packs if pack.name not in self.copied]
        self.present |= {pack.name for pack in packs if (pack.name, pack.size_bytes) in there}
        missing = [pack for pack in packs if pack.name not in self.present and pack.name not in self.refused]
        for pack in missing:
            with tempfile.TemporaryDirectory(prefix="compile-cache-") as folder:
                self._copy_pack(pack, Path(folder))

    def _copy_pack(self, pack: StoredObject, folder: Path) -> None:
        local = folder / pack.name
        if pack.size_bytes > READ_BYTES:  # check the head first: the rest may not be worth reading
            for found in verify_heads(self.source, [pack], self.rules):
                if found.state is not PackState.SOUND:
                    self.refused[pack.name] = found.refusal
                    return
        try:
            self._read(pack, local)
        except StoreError as error:
            failed = self.vanished if isinstance(error, ObjectNotFound) else self.refused
            failed[pack.name] = RefusedPack.after(pack.name, error)
            return
        verified = verify_whole(LocalStore(folder), pack, self.rules)
        assert verified is not None  # it was written just now
        if verified.state is not PackState.SOUND:
            self.refused[pack.name] = verified.refusal
            return
        self.target.put(pack.name, local)
        self.copied[pack.name] = pack.size_bytes

    def _read(self, pack: StoredObject, local: Path) -> None:
        """Read a pack, a part after the other."""
        local.parent.mkdir(parents=True)
        with local.open("wb") as file:
            for start in range(0, pack.size_bytes, READ_BYTES):
                file.write(self.source.read(pack.name, start, min(READ_BYTES, pack.size_bytes - start)))

    def records(self, catalog: Catalog, environments: set[str]) -> None:
        """Copy the environments' records that match their digests."""
        there = {(entry.name, entry.size_bytes) for entry in self.target.list(ROOT)}
        for digest in sorted(environments & catalog.records.keys()):
            entry = catalog.records[digest]
            if (entry.name, entry.size_bytes) in there:
                continue
            try:
                content = self.source.read(entry.name, 0, MOST_RECORD_BYTES)
            except StoreError as error:
                self.refused[entry.name] = RefusedPack.after(entry.name, error)
                continue
            if names_record(digest, content):
                self.target.put(entry.name, content)
            else:
                self.refused[entry.name] = RefusedPack(entry.name, "its content does not match its folder's name")
