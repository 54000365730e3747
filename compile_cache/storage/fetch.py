"""Fetches a key's files: reads the heads of its packs, chooses the files, and unpacks and verifies them in a folder.

All packs of a key add up.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError, RefusedPack, StoreError, StoreUnavailable
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import read_catalog
from compile_cache.storage.directory import CacheDirectory, empty_folder, is_kept
from compile_cache.storage.pack.format import Run, runs, unpack
from compile_cache.storage.pack.manifest import Manifest, PackFile, folders_of
from compile_cache.storage.rules import Rules, StoredPack, read_stored_head, too_many
from compile_cache.storage.stores.base import ReadableStore, StoredObject
from compile_cache.storage.stores.transfer import in_daemon_threads, open_part

_MOST_LISTINGS = 5
_MOST_PREDECESSORS = 3


# The files that are taken from a pack, by path.
Chosen = Mapping[str, PackFile]


class PacksOfKey:
    """The packs of `key` in `store` whose heads verify under `rules`. For one thread at a time.

    `known` has these packs by name, oldest first. Beyond the number that the limits allow, the oldest count, so a flood
    of packs displaces none that were there before. `seen` has the logical key and the path of each file of all packs
    that were ever known, those deleted meanwhile among them, but not of damaged ones.
    """

    def __init__(self, store: ReadableStore, key: CacheKey, rules: Rules) -> None:
        self.store = store
        self.key = key
        self.rules = rules
        self.known: dict[str, StoredPack] = {}
        self.seen: set[tuple[str, str]] = set()
        # Packs that count as absent, by name, and those beyond the number that is used.
        self._refused: dict[str, PackError | StoreError] = {}
        self._unread: set[str] = set()

    @property
    def is_fully_known(self) -> bool:
        """Whether the store has answered for every listed pack, with its head or with a final refusal."""
        return not any(isinstance(error, StoreUnavailable) for error in self._refused.values())

    @property
    def refused(self) -> tuple[RefusedPack, ...]:
        """The packs that are left out, with the reasons."""
        unread = (RefusedPack(name, too_many(self.rules.limits), is_final=False) for name in self._unread)
        return (*(RefusedPack.after(name, error) for name, error in self._refused.items()), *unread)

    @property
    def is_full(self) -> bool:
        """Whether no boot would use one more pack of this key."""
        return len(self.known) >= self.rules.limits.packs

    def list(self) -> Sequence[StoredObject]:
        """The packs of this key, oldest first. Objects that are no packs are ignored.

        Raises:
            StoreError: the store cannot be listed.
        """
        return [pack for version in read_catalog(self.store, self.key.prefix).versions for pack in version.packs]

    def refresh(self) -> None:
        """List the store, and read the heads of new packs in parallel. A pack that vanishes before it is read was
        merged into another one: then list again.

        Raises:
            StoreError: the store cannot be listed.
        """
        for _ in range(_MOST_LISTINGS):
            before = self._vanished()
            self._look()
            if self._vanished() <= before:
                break  # the store lists these packs but does not have them, so they were not merged

    def _vanished(self) -> set[str]:
        return {name for name, error in self._refused.items() if isinstance(error, ObjectNotFound)}

    def _look(self) -> None:
        """List once, and read the heads of new packs."""
        entries = self.list()
        found = {entry.name: pack for entry in entries if (pack := self.known.get(entry.name))}
        self._refused = {name: error for name, error in self._refused.items() if isinstance(error, PackError)}
        most = self.rules.limits.packs

        def look(entry: StoredObject) -> None:
            if len(found) >= most:
                return  # the oldest are read first
            try:
                found[entry.name] = StoredPack(entry, read_stored_head(self.store, entry, self.rules))
            except (PackError, StoreError) as error:
                self._refuse(entry.name, error)

        unseen = [entry for entry in entries if entry.name not in found and entry.name not in self._refused]
        in_daemon_threads(look, unseen)
        self.known = dict([(entry.name, found[entry.name]) for entry in entries if entry.name in found][:most])
        self._unread = {entry.name for entry in entries} - self.known.keys() - self._refused.keys()
        self.seen |= self._files()

    def _files(self) -> set[tuple[str, str]]:
        return {pair for pack in self.known.values() for pair in _keys_and_paths(pack)}

    def add(self, pack: StoredPack) -> None:
        """Add a pack that was just uploaded."""
        self.known[pack.entry.name] = pack
        self.seen |= _keys_and_paths(pack)

    def drop(self, entry: StoredObject, error: PackError | StoreError) -> None:
        """Count a pack as absent, because reading more of it failed. The files of a damaged pack may be published
        again."""
        pack = self.known.pop(entry.name, None)
        if pack is not None and isinstance(error, PackError):
            self.seen -= _keys_and_paths(pack) - self._files()
        self._refuse(entry.name, error)

    def _refuse(self, name: str, error: PackError | StoreError) -> None:
        self._refused[name] = type(error)(str(error))  # without its traceback, which holds what was read

    def select(self) -> Sequence[tuple[StoredPack, Chosen]]:
        """The files to restore, and the packs that have them."""
        chosen = choose([pack.head.manifest for pack in self.known.values()])
        paths = set[str]().union(*chosen)
        needed = []
        for pack, files in zip(self.known.values(), chosen, strict=True):
            if whole := {path: file for path, file in files.items() if not _lacks_binary(path, paths)}:
                needed.append((pack, whole))
        return needed


def _keys_and_paths(pack: StoredPack) -> set[tuple[str, str]]:
    return {(file.key, file.path) for file in pack.head.manifest.files}


def candidates(own: PacksOfKey, writing: ReadableStore | None) -> Iterator[PacksOfKey]:
    """The keys' packs that a boot tries until it finds files: its own; if it has no usable ones, those of the model's
    newest other versions in the written store alone, so that a new version rolls a read-only layer back.

    Raises:
        StoreError: the store cannot be listed.
    """
    yield own
    if not own.known and writing is not None:
        versions = read_catalog(writing, f"{own.key.environment_prefix}{own.key.model_name}/").versions
        others = sorted((v for v in versions if v.packs and v.key != own.key), key=lambda v: -v.published_s)
        yield from (PacksOfKey(writing, version.key, own.rules) for version in others[:_MOST_PREDECESSORS])


def _lacks_binary(path: str, paths: Container[str]) -> bool:
    """Whether `path` is Triton's record of a kernel whose binary is not among `paths`. Triton would trust the record
    and fail. Without the record it compiles the kernel."""
    folder, _, name = path.rpartition("/")
    if not (path.startswith("triton/") and name.startswith("__grp__")):
        return False
    kernel = name.removeprefix("__grp__").rpartition(".")[0]
    return not any(f"{folder}/{kernel}{suffix}" in paths for suffix in (".cubin", ".hsaco"))


def choose(manifests: Sequence[Manifest]) -> list[dict[str, PackFile]]:
    """The files that are taken from each pack, by path. The packs are in the order of their listing.

    For each logical key, the first pack that has it wins; for a kept file, the pack that was made last: a store tells
    times in whole seconds. Paths that clash with a chosen one (file against folder, case) are skipped.
    """
    chosen: list[dict[str, PackFile]] = [{} for _ in manifests]
    owners: dict[str, int] = {}
    folded: set[str] = set()
    folders: set[str] = set()
    # Keep each folded path in memory once, because there may be many long paths.
    paths = {path: path for manifest in manifests for file in manifest.files for path in (file.path.casefold(),)}
    by_age = sorted(range(len(manifests)), key=lambda number: manifests[number].created_s)
    newest = {file.path: number for number in by_age for file in manifests[number].files if is_kept(file.path)}
    for number, manifest in enumerate(manifests):
        for file in manifest.files:
            path = paths[file.path.casefold()]
            parents = {paths[folder] for folder in folders_of(path) if folder in paths}
            is_free = path not in folded and path not in folders and not parents & folded
            if is_free and newest.get(file.path, number) == number and owners.setdefault(file.key, number) == number:
                chosen[number][file.path] = file
                folded.add(path)
                folders |= parents
    return chosen


def kept_files(packs: Iterable[StoredPack]) -> dict[str, str]:
    """The SHA-256 of each kept file that a boot takes from these packs, by path."""
    chosen = choose([pack.head.manifest for pack in packs])
    return {path: file.sha256 for files in chosen for path, file in files.items() if is_kept(path)}


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified files in the inbox: their owners, by the path inside the cache directory, which does not have them yet.
    They came from the objects `packs`."""

    files: Mapping[str, str] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    refused: tuple[RefusedPack, ...] = ()
    stored_bytes: int = 0
    seeded_from: str = ""


def fetch(packs: PacksOfKey, inbox: Path | None) -> Fetched:
    """Read, verify and unpack the selected files of all packs into the inbox, in parallel. Other frames are not read.
    Without an inbox, only heads are: the answer is what would be fetched, as far as they tell.

    If anything in a pack is wrong, the whole pack is refused, and files are taken from other packs that have them. If a
    pack vanishes meanwhile, because it was merged into another one, the store is listed again.

    Raises:
        StoreError: the store cannot be listed.
        OSError: the staging folder cannot be written.
    """
    packs.refresh()
    listings = 1
    while True:
        needed = packs.select()
        failures = _unpack(packs.store, inbox, needed) if inbox else ()
        if not failures:
            break
        for pack, error in failures:
            packs.drop(pack.entry, error)
        if any(isinstance(error, ObjectNotFound) for _, error in failures) and listings < _MOST_LISTINGS:
            listings += 1
            packs.refresh()
    owners: dict[str, str] = {}
    stored_bytes = 0
    for pack, chosen in needed:
        owners |= {path: file.owner for path, file in chosen.items()}
        stored_bytes += pack.head.start + sum(run.end - run.start for run in runs(pack.head, chosen))
    names = tuple(pack.entry.name for pack, _ in needed)
    return Fetched(owners, names, packs.refused, stored_bytes)


def install(fetched: Fetched, directory: CacheDirectory) -> int:
    """Move fetched files into the cache directory, each atomically. Returns their number.

    Raises:
        OSError: the cache directory cannot be written.
    """
    if fetched.seeded_from:
        directory.ledger.plant(fetched.files)
    directory.ledger.expect(fetched.files)
    _move_into(str(directory.inbox), str(directory.path))
    return len(fetched.files)


def _move_into(source: str, target: str) -> None:
    """Move what is in a folder into another one: whole folders where the other one has none of their name."""
    for name in os.listdir(source):
        if os.path.isdir(f"{target}/{name}"):
            _move_into(f"{source}/{name}", f"{target}/{name}")
        else:
            os.rename(f"{source}/{name}", f"{target}/{name}")


def _unpack(
    store: ReadableStore, inbox: Path, needed: Sequence[tuple[StoredPack, Chosen]]
) -> Sequence[tuple[StoredPack, PackError | StoreError]]:
    """Unpack the chosen files of each pack into the emptied inbox. Returns the packs that failed, with their errors."""
    empty_folder(inbox)  # only what this round verifies is installed
    failures: dict[str, tuple[StoredPack, PackError | StoreError]] = {}

    def work(task: tuple[StoredPack, Chosen, Run]) -> None:
        pack, chosen, run = task
        if pack.entry.name in failures:
            return
        try:
            unpack(open_part(store, pack.entry.name, run.start, run.end), run.files, inbox, chosen)
        except (PackError, StoreError) as error:
            failures[pack.entry.name] = pack, error

    in_daemon_threads(work, [(pack, chosen, run) for pack, chosen in needed for run in runs(pack.head, chosen)])
    return list(failures.values())
