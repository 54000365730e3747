"""CompileCache: one key's artifacts between an object store and a cache directory.

There is no index: a listing, ordered by the store's own time, is the index, and the state of a key is the union of its
packs. For each logical key the first pack wins, but for a file that was changed in place (autotuning results): there
the pack that names the content it replaces wins over the pack that has it.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from compile_cache.directory import CacheDirectory, FileStamp, logical_key
from compile_cache.environment import Environment
from compile_cache.errors import PackError, StoreError
from compile_cache.key import CacheKey
from compile_cache.pack import SUFFIX, Limits, Manifest, Pack, Source, sha256_of, unpack, write_pack
from compile_cache.report import RefusedPack
from compile_cache.store import ObjectStore, StoredObject

_THREADS = 8
_READ_BYTES = 8 << 20
_PACK_BYTES = 64 << 20
_PACK_NAME = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified packs, unpacked in the staging folder, oldest first; nothing is in the cache directory yet."""

    packs: tuple[tuple[Path, Manifest], ...] = ()
    refused: tuple[RefusedPack, ...] = ()
    stored_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Published:
    """What the store is known to have: each path with its content, and every logical key."""

    files: dict[str, tuple[str, FileStamp]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    staged: dict[str, FileStamp] = field(default_factory=dict)  # before it was read into a pack


class CompileCache:
    """Restores the artifacts of `key` from `store` into `directory`, and publishes what is new there."""

    def __init__(
        self, store: ObjectStore, key: CacheKey, environment: Environment, directory: CacheDirectory, limits: Limits
    ) -> None:
        self.store = store
        self.key = key
        self._environment = environment
        self._directory = directory
        self._limits = limits
        self._published = _Published()
        self._environment_published = False
        self._is_listed = False

    def list(self) -> Sequence[StoredObject]:
        """The packs of this key, oldest first; what has another name than packs have is none.

        Raises:
            StoreError: the store cannot be listed.
        """
        found = self.store.list(self.key.prefix)
        return [entry for entry in found if _PACK_NAME.fullmatch(entry.name.removeprefix(self.key.prefix))]

    def fetch(self, abandoned: threading.Event) -> Fetched:
        """Get, verify and unpack every pack of this key, in parallel. A pack that fails is refused, and the rest used.

        Ends early, with less, when `abandoned` is set.

        Raises:
            StoreError: the store cannot be listed.
            OSError: the staging folder cannot be written.
        """
        started = time.perf_counter()
        entries = self.list()
        outcomes: dict[str, tuple[Path, Manifest] | Exception] = {}
        with ThreadPoolExecutor(_THREADS, "compile-cache-unpack") as unpacking:

            def fetch_pack(entry: StoredObject) -> None:
                try:
                    outcomes[entry.name] = self._fetch_pack(entry, unpacking, abandoned)
                except Exception as error:  # raised again below, but for what concerns this pack alone
                    outcomes[entry.name] = error

            _in_daemon_threads(fetch_pack, entries)
        packs, refused, stored_bytes, size_bytes = [], [], 0, 0
        for entry in entries:
            outcome = outcomes[entry.name]
            if isinstance(outcome, PackError | StoreError):
                refused.append(RefusedPack(entry.name, str(outcome)))
            elif isinstance(outcome, Exception):
                raise outcome
            elif (size_bytes := size_bytes + outcome[1].size_bytes) > self._limits.size_bytes:
                refused.append(
                    RefusedPack(entry.name, f"all packs unpack to more than {self._limits.size_bytes} bytes")
                )
            else:
                packs.append(outcome)
                stored_bytes += entry.size_bytes
        return Fetched(tuple(packs), tuple(refused), stored_bytes, time.perf_counter() - started)

    def _fetch_pack(
        self, entry: StoredObject, unpacking: Executor, abandoned: threading.Event
    ) -> tuple[Path, Manifest]:
        if entry.size_bytes > self._limits.size_bytes:
            raise PackError(f"it has {entry.size_bytes} bytes, and {self._limits.size_bytes} are allowed")
        local = self._directory.inbox / os.path.basename(entry.name)
        folder = local.with_suffix("")
        folder.mkdir()
        with local.open("wb") as file:
            for start in range(0, entry.size_bytes, _READ_BYTES):
                if abandoned.is_set():
                    raise StoreError(f"{entry.name} was not fetched: the restore's time was up")
                file.write(self.store.read(entry.name, start, min(_READ_BYTES, entry.size_bytes - start)))
        manifest = unpack(local, folder, self.key, self._limits, unpacking)
        local.unlink()
        return folder, manifest

    def install(self, fetched: Fetched) -> int:
        """Move what `fetch` verified into the cache directory, each file at once and whole; returns how many.

        Raises:
            OSError: the cache directory cannot be written.
        """
        chosen, taken = _choose(fetched.packs)
        for path, (folder, sha256) in chosen.items():
            target = self._directory.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / path, target)
            self._published.files[path] = (sha256, _stamp(target))
        self._published.keys.update(taken)
        self._environment_published = bool(fetched.packs)
        self._is_listed = True
        return len(chosen)

    def _learn(self) -> None:
        """Find out what the store has, where no restore has: nothing is to be published twice."""
        self._directory.empty_inbox()
        for _, manifest in self.fetch(threading.Event()).packs:
            self._published.keys.update(entry.key for entry in manifest.files)
        self._is_listed = True

    def stage(self, withheld: Collection[str], creator: str) -> tuple[Pack, ...]:
        """Finished packs, most valuable first, of all that the store does not have yet, `withheld` paths left out.

        Raises:
            StoreError: the store cannot be listed, where that has not been done before.
            OSError: the staging folder cannot be written.
        """
        if not self._is_listed:
            self._learn()
        outbox = self._directory.empty_outbox()
        sources = sorted(self._unpublished(withheld), key=_by_value)
        return tuple(write_pack(outbox, self.key, part, creator) for part in _parts(sources) if part)

    def _unpublished(self, withheld: Collection[str]) -> Iterator[Source]:
        """New logical keys, and files whose content differs from the one published under their path."""
        for path, stamp in self._directory.scan().items():
            local, key = self._directory.path / path, logical_key(path)
            known = self._published.files.get(path)
            if path in withheld:
                continue
            self._published.staged[path] = stamp
            if known is None:
                if key not in self._published.keys:
                    yield Source(local, path, key)
            elif known[1] != stamp and (sha256 := sha256_of(local)) != known[0]:
                yield Source(local, path, key, replaces=known[0])
            elif known[1] != stamp:
                self._published.files[path] = (sha256, stamp)

    def publish(self, pack: Pack) -> None:
        """Put a staged pack into the store: one PUT of an immutable object. What it holds is not staged again.

        Raises:
            StoreError: it was not stored; nothing that was there has changed.
        """
        self.store.put(self.key.prefix + pack.name, pack.local)
        for entry in pack.manifest.files:
            self._published.keys.add(entry.key)
            self._published.files[entry.path] = (entry.sha256, self._published.staged[entry.path])
        if not self._environment_published:
            self.store.put(self.key.environment_prefix + "environment.json", self._environment.to_json().encode())
            self._environment_published = True


def _in_daemon_threads(work: Callable[[StoredObject], None], entries: Sequence[StoredObject]) -> None:
    """Do `work` for all, a few at a time. Not in a ThreadPoolExecutor, whose threads the interpreter joins before it
    runs exit hooks: a read that hangs would cost the hook its time."""
    waiting = iter(entries)
    lock = threading.Lock()

    def drain() -> None:
        while True:
            with lock:
                entry = next(waiting, None)
            if entry is None:
                return
            work(entry)

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(min(_THREADS, len(entries)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _choose(packs: Sequence[tuple[Path, Manifest]]) -> tuple[dict[str, tuple[Path, str]], set[str]]:
    """Of each path the content that wins, with the folder it is in, and all logical keys there are.

    The first pack wins, then, step by step, the first that replaces what has won: a store's clock is too coarse to
    list every successor after what it replaces. A path that the paths chosen before it exclude is left out.
    """
    chosen: dict[str, tuple[Path, str]] = {}
    owners: dict[str, int] = {}
    folders: set[str] = set()
    successors: dict[tuple[str, str | None], list[tuple[Path, str]]] = {}
    for number, (folder, manifest) in enumerate(packs):
        for entry in manifest.files:
            parents = {str(parent) for parent in PurePosixPath(entry.path).parents}
            if owners.setdefault(entry.key, number) == number and not (
                entry.path in chosen or entry.path in folders or parents & chosen.keys()
            ):
                chosen[entry.path] = (folder, entry.sha256)
                folders |= parents
            else:
                successors.setdefault((entry.path, entry.replaces), []).append((folder, entry.sha256))
    for path in chosen:
        while following := successors.get((path, chosen[path][1])):
            chosen[path] = following.pop(0)
    return chosen, set(owners)


def _stamp(path: Path) -> FileStamp:
    stat = path.stat()
    return FileStamp(stat.st_size, stat.st_mtime_ns)


def _by_value(source: Source) -> tuple[int, str]:
    """Graph entries save the most, by far: lowering and code generation. Then what a compiler made, then the rest."""
    if source.key != source.path:
        return 0, source.path
    return (1 if source.path.endswith((".so", ".cubin", ".hsaco", ".py")) else 2), source.path


def _parts(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """`sources` in their order, cut where a pack would grow past its usual size."""
    part: list[Source] = []
    size_bytes = 0
    for source in sources:
        if part and size_bytes > _PACK_BYTES:
            yield part
            part, size_bytes = [], 0
        part.append(source)
        size_bytes += source.local.stat().st_size if source.local.exists() else 0
    yield part
