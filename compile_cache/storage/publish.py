"""Publishes a key's files: finds what the store lacks, packs it, puts it, and merges packs if there are too many.

The store's listing, in the order of the store's own time, is the only index. All packs of a key add up. A pack's head
names its content, so a boot reads only the frames that it needs, and a publisher uploads only new files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError, StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.storage.directory import CacheDirectory, FileStamp, logical_key
from compile_cache.storage.fetch import USED, Fetched, PacksOfKey, choose, fetch
from compile_cache.storage.pack.format import Head, Pack, Source, sha256_of, write_pack
from compile_cache.storage.pack.manifest import PackFile, weight_of
from compile_cache.storage.rules import HEAD_READ_BYTES, Rules, StoredPack
from compile_cache.storage.stores.base import ObjectStore, StoredObject, Stores
from compile_cache.storage.verify import verify_pack

log = logging.getLogger("compile_cache")

MOST_PACKS = 4
# The first packs are small, so that the most valuable files are stored even if there is hardly any time.
_SMALLEST_PART_BYTES = 4 << 20
_LARGEST_PART_BYTES = 64 << 20
# torch rewrites these files in place. They have the best configuration that tuning found for a kernel.
_TUNED = ".best_config"


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


class Ledger:
    """Compares `directory` with the packs that the store has, or had: what was removed there meanwhile is not new."""

    def __init__(self, directory: CacheDirectory, packs: PacksOfKey) -> None:
        self._directory = directory
        self._packs = packs
        # By path: the digest of the stored content, and the file's stamp.
        self._stored: dict[str, tuple[str, FileStamp]] = {}
        # By path: the stamp and the logical key of another version's file.
        self._seeded: dict[str, tuple[FileStamp, str]] = {}
        self._staged: dict[str, FileStamp] = {}  # the stamps from before the files were read into packs

    def install(self, fetched: Fetched) -> int:
        """Move verified files into the cache directory, each atomically. Returns their number.

        Raises:
            OSError: the cache directory cannot be written.
        """
        for path, staged in fetched.files.items():
            target = f"{self._directory.path}/{path}"
            if fetched.seeded_from:
                _mark_unread(staged.local)
            try:
                os.replace(staged.local, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(staged.local, target)
            if fetched.seeded_from:
                self._seeded[path] = (_stamp(target), staged.file.key)
            else:
                self._stored[path] = (staged.file.sha256, _stamp(target))
        return len(fetched.files)

    def is_superseded(self, pack: Pack) -> bool:
        """Whether another container has meanwhile published a part of this staged pack."""
        keys = self._packs.seen
        return any(file.key in keys for file in pack.manifest.files if file.replaces is None)

    def published(self, pack: Pack) -> None:
        """Note that a staged pack was uploaded."""
        for file in pack.manifest.files:
            self._stored[file.path] = (file.sha256, self._staged[file.path])
            self._seeded.pop(file.path, None)

    def unpublished(self, withheld: Collection[str]) -> tuple[list[list[Source]], dict[str, str]]:
        """The files that the store lacks, in parts of a pack each, the most valuable first; and why no boot could
        restore some others, by path."""
        new = sorted(self._new(withheld), key=_by_value)
        refused = self._packs.refusals(new, self._staged)
        return [part for part in _parts(each for each in new if each.path not in refused) if part], refused

    def _new(self, withheld: Collection[str]) -> Iterator[Source]:
        """The files to publish: those with new logical keys, those whose content differs from the stored one, and the
        files of another version that this boot has read."""
        keys = self._packs.seen
        counts_all_read = bool(self._seeded) and not _records_reads(self._directory.inbox)
        siblings: dict[str, list[str]] = {}
        for path in self._stored:
            siblings.setdefault(logical_key(path), []).append(path)
        for path, stamp in self._directory.scan().items():
            local, key = self._directory.path / path, logical_key(path)
            if path in withheld:
                continue
            self._staged[path] = stamp
            if path in self._stored:
                yield from self._changed(local, path, key, stamp)
            elif (seed := self._seeded.get(path)) and seed[0] == stamp:
                if seed[1] not in keys and (counts_all_read or _is_read(local)):
                    yield Source(local, path, seed[1])
            elif key not in keys:
                yield Source(local, path, key)
            elif (more := siblings.get(key)) and (variant := _variant(key, more)) not in keys:
                yield Source(local, path, variant)

    def _changed(self, local: Path, path: str, key: str, stamp: FileStamp) -> Iterator[Source]:
        stored_sha256, stored_stamp = self._stored[path]
        if stored_stamp == stamp:
            return
        sha256 = sha256_of(local)
        if sha256 == stored_sha256:
            self._stored[path] = (sha256, stamp)
            return
        # Any other changed file is damaged. If there are several successors, the first one is used.
        if path.endswith(_TUNED):
            packed = [f for pack in self._packs.known.values() for f in pack.head.manifest.files if f.path == path]
            has_successor = any(file.replaces == stored_sha256 for file in packed)
            if not has_successor and any(file.sha256 == stored_sha256 for file in packed):
                yield Source(local, path, key, replaces=stored_sha256)


def _variant(key: str, siblings: Iterable[str]) -> str:
    """The logical key of a further entry under `key`. Inductor keeps several graphs under one key, with guards on
    sizes, and compiles another one if none of them applies."""
    names = "\n".join(sorted(os.path.basename(path) for path in siblings))
    return f"{key}/after/{hashlib.sha256(names.encode()).hexdigest()[:32]}"


def _stamp(path: str) -> FileStamp:
    stat = os.stat(path)
    return FileStamp(stat.st_size, stat.st_mtime_ns)


def _mark_unread(path: str) -> None:
    """Set a file's access time before its modification time. Then the first read updates it, also under relatime."""
    os.utime(path, ns=(0, os.stat(path).st_mtime_ns))


def _is_read(path: str | Path) -> bool:
    try:
        return os.stat(path).st_atime_ns != 0
    except FileNotFoundError:
        return False


def _records_reads(folder: Path) -> bool:
    """Whether the file system records access times. It does not if it is mounted with `noatime`."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"read")
        probe.flush()
        _mark_unread(probe.name)
        Path(probe.name).read_bytes()
        return _is_read(probe.name)


def _by_value(source: Source) -> tuple[int, str]:
    """The sort key by value: graph entries first, because they save lowering and code generation; then compiled code;
    then the rest."""
    if source.key != source.path:
        return 0, source.path
    return (1 if source.path.endswith((".so", ".cubin", ".hsaco", ".py")) else 2), source.path


def _parts(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """`sources` in order, in parts of limited size. Each limit is twice the one before."""
    part: list[Source] = []
    size_bytes, most_bytes = 0, _SMALLEST_PART_BYTES
    for source in sources:
        # All files of a logical key go into one pack, because a restore takes them from the first pack that has the
        # key.
        if part and size_bytes > most_bytes and source.key != part[-1].key:
            yield part
            part, size_bytes, most_bytes = [], 0, min(2 * most_bytes, _LARGEST_PART_BYTES)
        part.append(source)
        size_bytes += source.local.stat().st_size if source.local.exists() else 0
    yield part
