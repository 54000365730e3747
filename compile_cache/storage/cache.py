"""CompileCache: moves one key's artifacts between an object store and a cache directory.

The store's listing, in the order of the store's own time, is the only index. All packs of a key add up. A pack's head
names its content, so a boot reads only the frames that it needs, and a publisher uploads only new files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from compile_cache.errors import StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import Fetched, fetch
from compile_cache.storage.heads import HEAD_READ_BYTES, StoredPack
from compile_cache.storage.ledger import Ledger
from compile_cache.storage.merge import Merged, merge
from compile_cache.storage.pack.format import Head, Pack, write_pack
from compile_cache.storage.packs import USED, PacksOfKey
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, StoredObject, Stores

log = logging.getLogger("compile_cache")


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

    def for_version(self, key: CacheKey) -> CompileCache:
        """Another key's packs in the written store, fetched into the same staging folder.

        Raises:
            StoreError: no store is written.
        """
        return CompileCache(Stores(self.writing, self.writing), key, self.environment, self._directory, self.rules)

    @property
    def directory(self) -> CacheDirectory:
        """The directory into which artifacts are restored, and from which they are published."""
        return self._directory

    @property
    def staging(self) -> Path:
        """The folder into which packs are unpacked."""
        return self._directory.inbox

    @property
    def writing(self) -> ObjectStore:
        """The store that is written.

        Raises:
            StoreError: no store is written.
        """
        if self.stores.writing is None:
            raise StoreError("there is no store to write to: set COMPILE_CACHE_STORE")
        return self.stores.writing

    def list(self) -> Sequence[StoredObject]:
        """The packs of this key, oldest first. Raises StoreError if the store cannot be listed."""
        return self.packs.list()

    @property
    def pack_names(self) -> tuple[str, ...]:
        """The usable packs, as far as their heads tell, in the order of their listing."""
        return tuple(self.packs.known)

    @property
    def is_empty(self) -> bool:
        """Whether the store has no usable pack of this key. True before the first listing."""
        return not self.packs.known

    @property
    def is_fully_known(self) -> bool:
        """Whether the store has answered for every listed pack, with its head or with a final refusal."""
        return self.packs.is_fully_known

    def refresh(self, abandoned: threading.Event | None = None) -> None:
        """List the store, and read the heads of new packs. Raises StoreError if it cannot be listed, or `abandoned` was
        set."""
        self.packs.refresh(HEAD_READ_BYTES, abandoned)

    def fetch(self, abandoned: threading.Event | None = None, left_alone: Collection[str] = ()) -> Fetched:
        """Fetch the sum of this key's packs, without packs `left_alone`, into `staging` (fetch.py).

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
        """Finished packs of all files that the store lacks, the most valuable first, without the `withheld` paths. A
        key whose packs reach the limits gets no more packs, because no boot could read them.

        Raises:
            StoreError: the store was not listed before, and cannot be listed.
            OSError: the staging folder cannot be written.
        """
        if not self.packs.is_listed:
            self.refresh()
        outbox = self._directory.empty_outbox()
        if self.packs.is_full:
            log.warning(
                "publish.key_is_full The packs of %s reach the limits. Boots would not read further packs, so nothing "
                "more is published. List the packs with `compile-cache show`, and delete those that are not yours.",
                self.key.prefix,
            )
            return ()
        parts = self._ledger.unpublished(withheld)
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
        weight_bytes = len(pack.manifest.to_json())
        head = Head(pack.manifest, pack.stored_bytes - pack.manifest.frames_bytes, weight_bytes=weight_bytes)
        self.packs.add(StoredPack(StoredObject(name, pack.stored_bytes, pack.manifest.created_s), head))
        self._ledger.published(pack)
        if is_first:
            store.put(self.key.environment_prefix + "environment.json", self.environment.to_json().encode())

    def merge(self, creator: str) -> Merged:
        """Merge the packs of the written store into one, if there are too many (merge.py).

        Raises:
            StoreError: the store failed. Nothing is lost.
            PackError: the merged pack is damaged. Nothing was deleted.
            OSError: the staging folder cannot be written.
        """
        packs = PacksOfKey(self.writing, self.key, self.rules)
        return merge(packs, self._directory.path, self._directory.empty_outbox(), creator)

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
