"""CompileCache: moves one key's artifacts between an object store and a cache directory.

The store's listing, in the order of the store's own time, is the only index. All packs of a key add up. A pack's head
names its content, so a boot reads only the frames that it needs, and a publisher uploads only new files. If a key has
too many packs, a publisher merges them into one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError, StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import Fetched, fetch
from compile_cache.storage.ledger import Ledger
from compile_cache.storage.pack.format import Head, Pack, Source, sha256_of, write_pack
from compile_cache.storage.pack.manifest import PackFile, weight_of
from compile_cache.storage.selection import USED, PacksOfKey, choose
from compile_cache.storage.stores.base import ObjectStore, StoredObject, Stores
from compile_cache.storage.verify import HEAD_READ_BYTES, Rules, StoredPack, verify_pack

log = logging.getLogger("compile_cache")

MOST_PACKS = 4


@dataclass(frozen=True, slots=True)
class Merged:
    """How many packs were merged and deleted, and the length of the pack that was stored instead, if any."""

    packs: int = 0
    stored_bytes: int = 0


class CompileCache:
    """Restores the artifacts of `key` from `stores` into `directory`, and publishes new ones from there.

    For one thread at a time.
    """

    def __init__(
        self, stores: Stores, key: CacheKey, environment: Environment, directory: CacheDirectory, rules: Rules
    ) -> None:
        self.stores = stores
        self.key = key
        self.environment = environment
        self.rules = rules
        self._directory = directory
        self.packs = PacksOfKey(stores.reading, key, rules)
        self._ledger = Ledger(directory, self.packs)
        # Files that the last `stage` left out, because no boot could restore them: for each reason, a line.
        self.left_out: list[str] = []

    def for_version(self, key: CacheKey) -> CompileCache:
        """Another key's packs in the written store, fetched into the same staging folder.

        Raises:
            StoreError: no store is written.
        """
        return CompileCache(Stores(self.writing, self.writing), key, self.environment, self._directory, self.rules)

    @property
    def writing(self) -> ObjectStore:
        """The store that is written.

        Raises:
            StoreError: no store is written.
        """
        if self.stores.writing is None:
            raise StoreError("there is no store to write to: set COMPILE_CACHE_STORE")
        return self.stores.writing

    @property
    def is_empty(self) -> bool:
        """Whether the store has no usable pack of this key. True before the first listing."""
        return not self.packs.known

    def refresh(self, abandoned: threading.Event | None = None) -> None:
        """List the store, and read the heads of new packs. Raises StoreError if it cannot be listed, or `abandoned` was
        set."""
        self.packs.refresh(HEAD_READ_BYTES, abandoned)

    def fetch(self, abandoned: threading.Event | None = None, left_alone: Collection[str] = ()) -> Fetched:
        """Fetch the sum of this key's packs, without packs `left_alone`, into the staging folder.

        Raises:
            StoreError: the store cannot be listed, or `abandoned` was set.
            OSError: the staging folder cannot be written.
        """
        return fetch(self.packs, self._directory.inbox, abandoned, left_alone)

    def install(self, fetched: Fetched) -> int:
        """Move fetched files into the cache directory. Returns their number.

        Raises:
            OSError: the cache directory cannot be written.
        """
        return self._ledger.install(fetched)

    def stage(self, withheld: Collection[str], creator: str) -> tuple[Pack, ...]:
        """Finished packs of all files that the store lacks, the most valuable first, without the `withheld` paths.
        Files that no boot could restore are left out: see `left_out`.

        Raises:
            StoreError: the store was not listed before, and cannot be listed.
            OSError: the staging folder cannot be written.
        """
        if not self.packs.is_listed:
            self.refresh()
        outbox = self._directory.empty_outbox()
        parts, refused = self._ledger.unpublished(withheld)
        named = {why: [path for path in refused if refused[path] == why] for why in refused.values()}
        self.left_out = [f"{len(paths)} files, such as {paths[0]!r:.200}: {why}" for why, paths in named.items()]
        return tuple(write_pack(outbox, self.key, part, creator, self.rules.signer) for part in parts)

    def is_superseded(self, pack: Pack) -> bool:
        """Whether another container has meanwhile published a part of this staged pack."""
        return self._ledger.is_superseded(pack)

    def publish(self, pack: Pack) -> None:
        """Upload a staged pack: one PUT of an immutable object. Its files are not staged again.

        Raises:
            StoreError: the pack was not stored. No stored object has changed.
        """
        store, name = self.writing, self.key.prefix + pack.name
        is_first = self.is_empty
        store.put(name, pack.local)
        weight_bytes = weight_of(pack.manifest.to_json())
        head = Head(pack.manifest, pack.stored_bytes - pack.manifest.frames_bytes, weight_bytes=weight_bytes)
        self.packs.add(StoredPack(StoredObject(name, pack.stored_bytes, pack.manifest.created_s), head))
        self._ledger.published(pack)
        if is_first:
            store.put(self.key.environment_prefix + "environment.json", self.environment.to_json().encode())

    def merge(self, creator: str) -> Merged:
        """If the written store has more than four packs of this key, merge those whose files the directory has. The new
        pack is read back before the others are deleted.

        Any number of processes may merge at once, and each may be killed at any moment. Whoever deletes a pack has
        stored its files in a later one, and has then seen that all merged packs were still there. If one of them is
        gone, somebody else has merged or removed it, and the new pack is deleted instead.

        Raises:
            StoreError: the store failed. Nothing is lost.
            PackError: the merged pack is damaged. Nothing was deleted.
            OSError: the staging folder cannot be written.
        """
        store, directory = self.writing, self._directory.path
        packs = PacksOfKey(store, self.key, self.rules)
        packs.refresh()
        if len(packs.known) <= MOST_PACKS:
            return Merged()
        merged, files = _mergeable(packs, directory)
        if len(merged) < 2:
            return Merged()
        sources = [Source(directory / path, path, file.key) for path, file in files.items()]
        pack = write_pack(self._directory.empty_outbox(), self.key, sources, creator, self.rules.signer)
        if {file.path: file.sha256 for file in pack.manifest.files} != {path: f.sha256 for path, f in files.items()}:
            return Merged()  # torch has just rewritten a file
        name = self.key.prefix + pack.name
        store.put(name, pack.local)
        pack.local.unlink()
        try:
            verify_pack(store, name, pack.stored_bytes, self.rules)
        except ObjectNotFound:  # somebody else has merged it already
            return Merged()
        except PackError:
            store.delete(name)
            raise
        if not merged.keys() <= {entry.name for entry in packs.list()}:
            store.delete(name)
            return Merged()
        for old in merged:
            store.delete(old)
        return Merged(len(merged), pack.stored_bytes)

    def mark_used(self, today: str) -> None:
        """Record in the store that this key was used on the day `today` (YYYY-MM-DD), once: an empty object.

        The name has no time of day, so a thousand boots in a day write one object.

        Raises:
            StoreError: the use cannot be recorded.
        """
        name = USED + today
        if self.is_empty or name in self.packs.uses:
            return
        store = self.writing
        store.put(self.key.prefix + name, b"")
        for older in [use for use in self.packs.uses if use < name]:
            store.delete(self.key.prefix + older)
        self.packs.uses = {name}


def _mergeable(packs: PacksOfKey, directory: Path) -> tuple[Mapping[str, StoredPack], Mapping[str, PackFile]]:
    """The packs of this signer (unsigned ones, if there is none) of which every file is here, or has a logical key that
    comes from another of these packs; and the files to put into the merged pack, by path."""
    signer = packs.rules.signer
    own = signer.public_key if signer else None
    found = {name: pack for name, pack in packs.known.items() if pack.head.signed_by == own}
    while True:
        chosen = {path: choice.file for path, choice in choose([p.head.manifest for p in found.values()]).items()}
        missing = {file.key for path, file in chosen.items() if not _is_here(directory / path, file)}
        keys = {file.key for file in chosen.values()} - missing
        whole = {name: p for name, p in found.items() if all(file.key in keys for file in p.head.manifest.files)}
        if len(whole) == len(found):
            return whole, chosen
        found = whole


def _is_here(local: Path, file: PackFile) -> bool:
    try:
        return local.stat().st_size == file.size_bytes and sha256_of(local) == file.sha256
    except FileNotFoundError:
        return False
