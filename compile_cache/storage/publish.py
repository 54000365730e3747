"""Publishes a key's files: finds what the store lacks, packs it, puts it, and merges packs if there are too many.

The store's listing, in the order of the store's own time, is the only index. All packs of a key add up. A pack's head
names its content, so a boot reads only the frames that it needs, and a publisher uploads only new files.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from compile_cache.errors import ObjectNotFound, PackError, log
from compile_cache.files import blank_file
from compile_cache.key.environment import Environment
from compile_cache.storage.catalog import RECORD, read_catalog
from compile_cache.storage.directory import CacheDirectory, empty_folder, is_kept, logical_key
from compile_cache.storage.fetch import PacksOfKey, choose, kept_files
from compile_cache.storage.pack.format import Pack, Source, batches, read_head, write_pack
from compile_cache.storage.pack.manifest import PackFile
from compile_cache.storage.rules import StoredPack, verify_pack
from compile_cache.storage.stores.base import ObjectStore, StoredObject

MOST_PACKS = 4
# torch's folders of graphs, which have texts for people.
_GRAPHS = {"fxgraph", "aotautograd"}
# Each pack has up to twice the bytes of the one before: the first are small, so that the most valuable files are stored
# even if there is hardly any time.
_SMALLEST_PART_BYTES = 4 << 20
_LARGEST_PART_BYTES = 64 << 20


class Publication:
    """Publishes files of `directory` under the key of `packs`. For one thread at a time.

    Without a store to write, nothing may be published: see `Settings.may_publish`.
    """

    def __init__(
        self, store: ObjectStore | None, packs: PacksOfKey, environment: Environment, directory: CacheDirectory
    ) -> None:
        self.packs = packs
        self.directory = directory
        self._writing = cast(ObjectStore, store)
        self._environment = environment
        # The SHA-256 of each kept file as this process has restored or published it. What another one publishes
        # meanwhile is newer, and stays.
        self._kept = kept_files(packs.known.values())

    def stage(self, files: Mapping[str, str], creator: str) -> tuple[Pack, ...]:
        """Finished packs of those `files` that the store lacks, the most valuable first. The files are given with their
        owners, as `Ledger.ready` has them. Files that no boot could restore are left out, and named in the log.

        Raises:
            StoreError: the store cannot be listed.
            OSError: the staging folder cannot be written.
        """
        self.packs.refresh()
        empty_folder(self.directory.outbox)
        most_bytes = (min(_SMALLEST_PART_BYTES << number, _LARGEST_PART_BYTES) for number in itertools.count())
        parts = batches(sorted(self._new(files), key=_by_value), most_bytes)
        return tuple(pack for part in parts for pack in self._write(part, creator))

    def _new(self, files: Mapping[str, str]) -> Iterator[Source]:
        """The files that the store lacks. It has, or had, a file whose path or whose logical key is in a known pack. It
        lacks a kept file that has changed here."""
        keys, paths = ({pair[place] for pair in self.packs.seen} for place in (0, 1))
        newest = kept_files(self.packs.known.values())
        for path, owner in files.items():
            local, key = self.directory.path / path, logical_key(path)
            if is_kept(path):
                if (digest := _digest(local)) == newest.get(path, ""):
                    self._kept[path] = digest
                elif digest != self._kept.get(path, ""):
                    yield Source(local, path, path)
                continue
            if path not in paths and key in keys:
                here = (other for other in paths if logical_key(other) == key)
                key = _variant(key, [other for other in here if (self.directory.path / other).exists()])
            if path not in paths and key not in keys:
                if not _GRAPHS.isdisjoint(path.split("/")):
                    blank_file(local)
                yield Source(local, path, key, owner)

    def _write(self, part: list[Source], creator: str) -> Iterator[Pack]:
        """Write a part as a pack. If a boot would refuse it, write its halves instead, and leave out the files of a
        single logical key."""
        try:
            yield self._packed(self.directory.outbox, part, creator)
        except PackError as error:
            cuts = [place for place in range(1, len(part)) if part[place].key != part[place - 1].key]
            if not cuts:
                log.warning("publish.left_out files=%d path=%.200r reason=%s", len(part), part[0].path, error)
                self.directory.ledger.withheld.update(source.path for source in part)
                return
            middle = cuts[len(cuts) // 2]
            yield from self._write(part[:middle], creator)
            yield from self._write(part[middle:], creator)

    def _packed(self, folder: Path, sources: Sequence[Source], creator: str) -> Pack:
        """Write a pack into `folder`, and read its head as a boot reads it.

        Raises:
            PackError: a boot would refuse the pack, so it is deleted.
        """
        rules = self.packs.rules
        pack = write_pack(folder, self.packs.key, sources, creator, rules.signer)
        try:
            with pack.local.open("rb") as file:
                read_head(file, pack.name, rules.limits, rules.trusted)
        except PackError:
            pack.local.unlink()
            raise
        return pack

    def is_superseded(self, pack: Pack) -> bool:
        """Whether another container has meanwhile published a part of this staged pack."""
        files = (file for file in pack.manifest.files if not is_kept(file.path))
        return not {key for key, _ in self.packs.seen}.isdisjoint(file.key for file in files)

    def publish(self, pack: Pack) -> None:
        """Upload a staged pack: one PUT of an immutable object. Its files are not staged again.

        Raises:
            StoreError: the pack was not stored. No stored object has changed.
        """
        name, is_first = self.packs.key.prefix + pack.name, not self.packs.known
        self._writing.put(name, pack.local)
        self.packs.add(StoredPack(StoredObject(name, pack.stored_bytes, pack.manifest.created_s), pack))
        self._kept |= {file.path: file.sha256 for file in pack.manifest.files}
        if is_first:
            record = self.packs.key.environment_prefix + RECORD
            self._writing.put(record, self._environment.to_json().encode())

    def merge(self, creator: str) -> int:
        """If the written store has more than four packs of this key, merge those whose files the directory has. The new
        pack is read back before the others are deleted. Returns how many were merged.

        Any number of processes may merge at once, and each may be killed at any moment. Whoever deletes a pack has
        stored its files in a later one, and has then seen that all merged packs were still there. If one of them is
        gone, somebody else has merged or removed it, and the new pack is deleted instead.

        Raises:
            StoreError: the store failed. Nothing is lost.
            PackError: the merged pack is damaged. Nothing was deleted.
            OSError: the staging folder cannot be written.
        """
        store, directory, key, rules = self._writing, self.directory.path, self.packs.key, self.packs.rules
        packs = PacksOfKey(store, key, rules)
        packs.refresh()
        if len(packs.known) <= MOST_PACKS:
            return 0
        merged, files = _mergeable(packs, directory)
        if len(merged) < 2:
            return 0
        sources = [Source(directory / path, path, file.key, file.owner) for path, file in files.items()]
        with tempfile.TemporaryDirectory(dir=self.directory.outbox) as folder:
            pack = self._packed(Path(folder), sources, creator)
            if [file.sha256 for file in pack.manifest.files] != [file.sha256 for file in files.values()]:
                return 0  # torch has just rewritten a file
            name = key.prefix + pack.name
            store.put(name, pack.local)
        try:
            verify_pack(store, StoredObject(name, pack.stored_bytes, pack.manifest.created_s), rules)
        except ObjectNotFound:  # somebody else has merged it already
            return 0
        except PackError:
            store.delete(name)
            raise
        if not merged.keys() <= {entry.name for entry in packs.list()}:
            store.delete(name)
            return 0
        for old in merged:
            store.delete(old)
        return len(merged)

    def mark_used(self, today: str) -> None:
        """Record in the store that this key was used on the day `today` (YYYY-MM-DD), once: an empty object.

        The name has no time of day, so a thousand boots in a day write one object.

        Raises:
            StoreError: the use cannot be recorded.
        """
        if not self.packs.known:
            return
        prefix = f"{self.packs.key.prefix}used-"
        uses = [mark.name for version in read_catalog(self._writing, prefix).versions for mark in version.marks]
        if prefix + today not in uses:
            self._writing.put(prefix + today, b"")
        for older in [use for use in uses if use < prefix + today]:
            self._writing.delete(older)


def _mergeable(packs: PacksOfKey, directory: Path) -> tuple[Mapping[str, StoredPack], Mapping[str, PackFile]]:
    """The packs of this signer (unsigned ones, if there is none) of which every file is here, or has a logical key that
    comes from another of these packs; and the files to put into the merged pack, by path. A pack with the newest of a
    kept file stays: one that is put meanwhile is newer. So do the largest packs, if one pack may not have all files."""
    signer, limits = packs.rules.signer, packs.rules.limits
    own = signer.public_key if signer else None
    taken = zip(packs.known.items(), choose([pack.head.manifest for pack in packs.known.values()]), strict=True)
    found = {name: p for (name, p), files in taken if p.head.signed_by == own and not any(map(is_kept, files))}
    size_bytes = manifest_bytes = 0
    for name, pack in sorted(found.items(), key=lambda item: item[1].head.stored_bytes):
        size_bytes += pack.head.manifest.size_bytes
        manifest_bytes += pack.head.manifest_bytes
        if size_bytes > limits.size_bytes or manifest_bytes > limits.manifest_bytes:
            del found[name]
    while True:
        chosen: dict[str, PackFile] = {}
        for files in choose([pack.head.manifest for pack in found.values()]):
            chosen |= {path: file for path, file in files.items() if not is_kept(path)}
        missing = {file.key for path, file in chosen.items() if _digest(directory / path) != file.sha256}
        keys = {file.key for file in chosen.values()} - missing
        whole = {
            name: pack
            for name, pack in found.items()
            if all(file.key in keys or is_kept(file.path) for file in pack.head.manifest.files)
        }
        if len(whole) == len(found):
            return whole, chosen
        found = whole


def _digest(local: Path) -> str:
    """A file's SHA-256; empty without the file."""
    try:
        with local.open("rb") as content:  # read piece by piece, without the GIL
            return hashlib.file_digest(content, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def _variant(key: str, siblings: Sequence[str]) -> str:
    """The logical key of a further entry under `key`, beside the stored `siblings` that this process has. Without any,
    `key` itself: the entry is for the same as a stored one.

    Inductor keeps several graphs under one key, with guards on sizes, and compiles another one if none of them applies.
    """
    if not siblings:
        return key
    names = "\n".join(sorted(os.path.basename(path) for path in siblings))
    return f"{key}/after/{hashlib.sha256(names.encode()).hexdigest()[:32]}"


def _by_value(source: Source) -> tuple[int, str]:
    """The sort key by value: graph entries first, because they save lowering and code generation; then compiled code;
    then the rest."""
    if source.key != source.path:
        return 0, source.path
    return (1 if source.path.endswith((".so", ".cubin", ".hsaco", ".py")) else 2), source.path
