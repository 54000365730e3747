"""Fetches the chosen files of a key's packs from the store into a staging folder, and verifies them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError, RefusedPack, StoreError
from compile_cache.storage.pack.format import Run, runs, unpack_run
from compile_cache.storage.pack.manifest import PackFile
from compile_cache.storage.selection import PacksOfKey
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.storage.stores.transfer import READ_BYTES, Abandoned, ObjectReader, in_daemon_threads
from compile_cache.storage.verify import WHOLE_PACK_BYTES, StoredPack

_MOST_LISTINGS = 5


@dataclass(frozen=True, slots=True)
class Staged:
    """A verified file in the staging folder, and its line of the manifest."""

    local: str
    file: PackFile


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified files in the staging folder, by their path inside the cache directory, which does not have them yet.
    They came from the objects `packs`; `superfluous` objects had no file that others lack."""

    files: dict[str, Staged] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    refused: tuple[RefusedPack, ...] = ()
    stored_bytes: int = 0
    seconds: float = 0.0
    seeded_from: str = ""


def fetch(
    packs: PacksOfKey, inbox: Path, abandoned: threading.Event | None = None, left_alone: Collection[str] = ()
) -> Fetched:
    """Read, verify and unpack the selected files of all packs but `left_alone`, in parallel. Other frames are not read.

    If anything in a pack is wrong, the whole pack is refused, and files are taken from other packs that have them. If a
    pack vanishes meanwhile, because it was merged into another one, the store is listed again.

    Raises:
        StoreError: the store cannot be listed, or `abandoned` was set.
        OSError: the staging folder cannot be written.
    """
    started = time.perf_counter()
    task = _Unpacking(packs.store, inbox, abandoned)
    packs.refresh(WHOLE_PACK_BYTES, abandoned)
    listings = 1
    while True:
        selection = packs.select(left_alone)
        needed = selection.needed
        failures = task.unpack([(p, needed[p.entry.name]) for p in selection.packs if p.entry.name in needed])
        if not failures:
            break
        for pack, error in failures:
            packs.drop(pack.entry, error)
        if any(isinstance(error, ObjectNotFound) for _, error in failures) and listings < _MOST_LISTINGS:
            listings += 1
            packs.refresh(WHOLE_PACK_BYTES, abandoned)
    packs.forget_beginnings()
    folders = [task.folder(pack) for pack in selection.packs]
    files = {path: Staged(f"{folders[c.pack]}/{path}", c.file) for path, c in selection.files.items()}
    superfluous = tuple(pack.entry.name for pack in selection.packs if pack.entry.name not in needed)
    seconds = time.perf_counter() - started
    return Fetched(files, tuple(needed), superfluous, selection.refused, task.stored_bytes, seconds)


class _Unpacking:
    """Unpacks frames, each pack into its own folder, and knows the frames unpacked so far."""

    def __init__(self, store: ObjectStore, inbox: Path, abandoned: threading.Event | None) -> None:
        self.stored_bytes = 0
        self._store = store
        self._inbox = inbox
        self._abandoned = abandoned
        self._done: set[tuple[str, int]] = set()
        self._counted: set[str] = set()
        self._lock = threading.Lock()

    def folder(self, pack: StoredPack) -> Path:
        """The folder of the pack's files."""
        return self._inbox / os.path.basename(pack.entry.name).partition(".")[0]

    def unpack(self, packs: Sequence[tuple[StoredPack, set[str]]]) -> list[tuple[StoredPack, PackError | StoreError]]:
        """Unpack the runs that hold the given paths of each pack. Returns the packs that failed, with their errors."""
        failures: dict[str, tuple[StoredPack, PackError | StoreError]] = {}

        def work(task: tuple[StoredPack, list[Run]]) -> None:
            pack, group = task
            if pack.entry.name in failures:
                return
            try:
                self._unpack_group(pack, group)
            except Abandoned:
                raise
            except (PackError, StoreError) as error:
                failures[pack.entry.name] = pack, error

        tasks = [(pack, group) for pack, paths in packs for group in self._groups(pack, paths)]
        in_daemon_threads(work, tasks)
        return list(failures.values())

    def _groups(self, pack: StoredPack, paths: set[str]) -> Iterator[list[Run]]:
        """The runs to unpack, with neighbours grouped into one request."""
        group: list[Run] = []
        end = 0
        for run in runs(pack.head):
            if (pack.entry.name, run.start) in self._done or not any(file.path in paths for file in run.files):
                continue
            if group and (run.start != end or run.start + run.stored_bytes - group[0].start > READ_BYTES):
                yield group
                group = []
            group.append(run)
            end = run.start + run.stored_bytes
        if group:
            yield group

    def _unpack_group(self, pack: StoredPack, group: list[Run]) -> None:
        start, end = group[0].start, group[-1].start + group[-1].stored_bytes
        reader = ObjectReader(self._store, pack.entry.name, start, end, pack.beginning, self._abandoned)
        for run in group:
            unpack_run(reader, run, self.folder(pack))
        with self._lock:
            self._done.update((pack.entry.name, run.start) for run in group)
            self.stored_bytes += reader.requested_bytes
            if pack.entry.name not in self._counted:
                self._counted.add(pack.entry.name)
                self.stored_bytes += len(pack.beginning)
