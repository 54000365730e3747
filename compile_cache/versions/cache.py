"""CompileCache: one key's artifacts between an object store and a cache directory.

There is no index: a listing, ordered by the store's own time, is the index, and the state of a key is the union of its
packs (union.py). What is in a pack is known from its head alone, so a boot reads only the frames that it needs, and a
publisher sends only what nobody has.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError, StoreError, StoreUnavailable
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.lifecycle.report import RefusedPack
from compile_cache.pack.format import (
    PACK_NAME,
    Head,
    Pack,
    Run,
    Source,
    head_bytes,
    read_head,
    runs,
    sha256_of,
    unpack_run,
    write_pack,
)
from compile_cache.pack.manifest import Limits, PackFile
from compile_cache.pack.reading import READ_BYTES, Abandoned, ObjectReader, in_daemon_threads, read_exactly
from compile_cache.pack.signing import Signer, TrustedKeys
from compile_cache.store.base import ObjectStore, StoredObject, Stores
from compile_cache.versions.directory import CacheDirectory, FileStamp, logical_key
from compile_cache.versions.refusals import Refusals
from compile_cache.versions.union import choose

log = logging.getLogger("compile_cache")

# A first read gets a pack of usual size whole; where a key has many packs, their heads.
_FIRST_READ_BYTES = 1 << 20
HEAD_READ_BYTES = 64 << 10
_MANY_PACKS = 16
_MOST_LISTINGS = 5
# The first packs are small, so that what is most valuable is stored first, even when there is hardly any time.
_SMALLEST_PART_BYTES = 4 << 20
_LARGEST_PART_BYTES = 64 << 20
# What torch writes again in place: the best configuration that tuning has found for a kernel.
_TUNED = ".best_config"
# In an object's name no time of day: a thousand boots of a day write one object.
_USED = "used-"


@dataclass(frozen=True, slots=True)
class _StoredPack:
    """A pack in the store: its head, verified, and the first bytes of it that have been read already."""

    entry: StoredObject
    head: Head
    beginning: bytes = b""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Verified files in the staging folder; nothing is in the cache directory yet. `files` maps a path inside the cache
    directory to the staged file and its line of the manifest. `packs` are the objects that they came from,
    `superfluous` those that had nothing of their own."""

    files: dict[str, tuple[Path, PackFile]] = field(default_factory=dict)
    packs: tuple[str, ...] = ()
    superfluous: tuple[str, ...] = ()
    refused: tuple[RefusedPack, ...] = ()
    stored_bytes: int = 0
    seconds: float = 0.0
    seeded_from: str = ""


@dataclass(slots=True)
class _Published:
    """What the store is known to have: each path with its content, and every logical key."""

    files: dict[str, tuple[str, FileStamp]] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    staged: dict[str, FileStamp] = field(default_factory=dict)  # before it was read into a pack


class CompileCache:
    """Restores the artifacts of `key` from `stores` into `directory`, and publishes what is new there.

    `trusted` keys decide whose packs are used, `signer` signs what is published; a signer without trusted keys trusts
    itself alone. Used by one thread at a time.
    """

    def __init__(
        self,
        stores: Stores,
        key: CacheKey,
        environment: Environment,
        directory: CacheDirectory,
        limits: Limits,
        trusted: TrustedKeys | None = None,
        signer: Signer | None = None,
    ) -> None:
        self.stores = stores
        self.key = key
        self.limits = limits
        # Who signs would otherwise pass on, with its own signature, what anybody has put there.
        self.trusted = trusted or TrustedKeys([signer.public_key] if signer else [])
        self.signer = signer
        self._store = stores.reading
        self.environment = environment
        self._directory = directory
        self._refusals = Refusals(directory.refused, self._store.location, limits, self.trusted)
        self._packs: dict[str, _StoredPack] = {}
        self._refused: dict[str, RefusedPack] = {}
        self._unavailable: set[str] = set()
        self._left_alone: set[str] = set()
        self._uses: set[str] = set()
        self._published = _Published()
        self._seeded: dict[str, tuple[FileStamp, str]] = {}
        self._environment_published = False
        self._is_listed = False

    def of_written_store(self) -> CompileCache:
        """The same key in the store that is written alone, with a staging folder of its own: for compaction.

        Raises:
            StoreError: there is none.
            OSError: the staging folder cannot be made.
        """
        stores = Stores(self.writing, self.writing)
        annex = self._directory.annex()
        return CompileCache(stores, self.key, self.environment, annex, self.limits, self.trusted, self.signer)

    def forget_annex(self) -> None:
        """Give back the disk that `of_written_store` has taken."""
        self._directory.empty_annex()

    @property
    def staging(self) -> Path:
        """The folder where what is fetched is unpacked."""
        return self._directory.inbox

    def for_version(self, key: CacheKey) -> CompileCache:
        """Another key's packs in the same stores, fetched into the same staging folder."""
        return CompileCache(self.stores, key, self.environment, self._directory, self.limits, self.trusted, self.signer)

    def list(self) -> Sequence[StoredObject]:
        """The packs of this key, oldest first; what has another name than packs have is none.

        Raises:
            StoreError: the store cannot be listed.
        """
        found = self._store.list(self.key.prefix)
        names = [entry.name.removeprefix(self.key.prefix) for entry in found]
        self._uses = {name for name in names if name.startswith(_USED)}
        return [entry for entry, name in zip(found, names, strict=True) if PACK_NAME.fullmatch(name)]

    @property
    def pack_names(self) -> tuple[str, ...]:
        """The packs that can be used, as far as their heads tell, in the order of their listing."""
        return tuple(self._packs)

    @property
    def is_empty(self) -> bool:
        """Whether the store has no pack of this key that could be used; True before it has been listed."""
        return not self._packs

    @property
    def is_fully_known(self) -> bool:
        """Whether the store has answered for every pack listed: with its head, or that it cannot be had."""
        return not self._unavailable

    def refresh(self, abandoned: threading.Event | None = None) -> None:
        """List the store, and read the heads of packs not seen before, in parallel. The store is listed again where one
        vanishes before it is read, because it was merged into another one.

        Raises:
            StoreError: the store cannot be listed, or `abandoned` was set.
        """
        self._refresh(abandoned, HEAD_READ_BYTES)

    def _refresh(self, abandoned: threading.Event | None, first_bytes: int) -> None:
        vanished: Sequence[str] = ()
        for _ in range(_MOST_LISTINGS):
            before, vanished = vanished, self._look(abandoned, first_bytes)
            if not set(vanished) - set(before):
                break  # what a store lists and does not have was not merged into another one
        for name in vanished:
            self._refused[name] = RefusedPack(name, "it is listed, and not there", is_final=False)
        self._is_listed = True

    def _look(self, abandoned: threading.Event | None, first_bytes: int) -> Sequence[str]:
        """One listing, and the heads of what is new in it; the names of packs that vanished meanwhile."""
        entries = self.list()
        first_bytes = first_bytes if len(entries) <= _MANY_PACKS else HEAD_READ_BYTES
        found = {entry.name: pack for entry in entries if (pack := self._packs.get(entry.name))}
        vanished: list[str] = []
        # What only could not be read is tried again.
        self._refused = {name: refused for name, refused in self._refused.items() if refused.is_final}
        self._unavailable = set()

        def look(entry: StoredObject) -> None:
            if abandoned is not None and abandoned.is_set():
                raise Abandoned(f"{entry.name} was not read: the time was up")
            try:
                found[entry.name] = self._read_head(entry, first_bytes)
            except ObjectNotFound:
                vanished.append(entry.name)
            except PackError as error:
                self._refuse(entry, str(error))
            except StoreError as error:
                self._refused[entry.name] = RefusedPack(entry.name, str(error), is_final=False)
                if isinstance(error, StoreUnavailable):
                    self._unavailable.add(entry.name)

        unseen = [entry for entry in entries if entry.name not in found and entry.name not in self._refused]
        in_daemon_threads(look, unseen)
        is_gone = self._packs.keys() - found.keys() - set(vanished) - self._refused.keys()
        self._packs = {entry.name: found[entry.name] for entry in entries if entry.name in found}
        if is_gone:  # merged, mostly; but what was pruned is to be published again by whoever still has it
            self._forget_published()
        self._published.keys.update(file.key for pack in self._packs.values() for file in pack.head.manifest.files)
        self._environment_published |= bool(found)
        return vanished

    def _refuse(self, entry: StoredObject, reason: str) -> None:
        self._packs.pop(entry.name, None)
        self._refused[entry.name] = RefusedPack(entry.name, reason)
        try:
            self._refusals.remember(entry, reason)
        except OSError as error:  # a full disk; then the next boot judges it again
            log.info("refusal.not_remembered pack=%s error=%s", entry.name, error)

    def _read_head(self, entry: StoredObject, first_bytes: int) -> _StoredPack:
        if reason := self._refusals.reason(entry):
            raise PackError(reason)
        head, beginning = fetch_head(self._store, entry.name, entry.size_bytes, first_bytes, self.limits, self.trusted)
        if head.manifest.key != self.key:
            raise PackError(f"it is for {head.manifest.key.prefix}, not for {self.key.prefix}")
        return _StoredPack(entry, head, beginning)

    def fetch_mergeable(self, abandoned: threading.Event | None = None) -> Fetched:
        """As `fetch`, but only of packs that this cache may merge: signed by its own signer, or, where it has none, by
        nobody; and without files that replace another pack's, because they lose their meaning where that one is not
        merged with them.

        Raises:
            StoreError, OSError: as `fetch`; or some pack cannot be read just now.
        """
        self.refresh(abandoned)
        own = self.signer.public_key if self.signer else None
        for name, pack in self._packs.items():
            if pack.head.signed_by != own or any(file.replaces for file in pack.head.manifest.files):
                self._left_alone.add(name)
        fetched = self.fetch(abandoned)
        if not self.is_fully_known:
            raise StoreUnavailable(f"some packs of {self.key.prefix} cannot be read: they are merged another time")
        return fetched

    def fetch(self, abandoned: threading.Event | None = None) -> Fetched:
        """Get, verify and unpack what the packs of this key add up to, in parallel; frames without use are not read.

        A pack of which anything is wrong is refused whole, and the others make up for it where they can. Where a pack
        vanishes meanwhile, because it was merged into another one, the store is listed again.

        Raises:
            StoreError: the store cannot be listed, or `abandoned` was set.
            OSError: the staging folder cannot be written.
        """
        started = time.perf_counter()
        task = _Unpacking(self._store, self._directory.inbox, abandoned)
        self._refresh(abandoned, _FIRST_READ_BYTES)
        listings = 1
        while True:
            packs, too_large = self._within_limits()
            chosen = choose([pack.head.manifest for pack in packs])
            needed: dict[str, set[str]] = {}
            for choice in chosen.values():
                needed.setdefault(packs[choice.pack].entry.name, set()).add(choice.file.path)
            failures = task.unpack([(pack, needed[pack.entry.name]) for pack in packs if pack.entry.name in needed])
            if not failures:
                break
            for pack, error in failures:
                self._drop(pack.entry, error)
            if any(isinstance(error, ObjectNotFound) for _, error in failures) and listings < _MOST_LISTINGS:
                listings += 1
                self._refresh(abandoned, _FIRST_READ_BYTES)
        folders = [task.folder(pack) for pack in packs]
        files = {path: (folders[c.pack] / path, c.file) for path, c in chosen.items()}
        files = {path: staged for path, staged in files.items() if not _lacks_binary(path, files)}
        superfluous = tuple(pack.entry.name for pack in packs if pack.entry.name not in needed)
        refused = (*self._refused.values(), *too_large)
        # What was read of them has been used, and this cache lives as long as the process.
        self._packs = {name: replace(pack, beginning=b"") for name, pack in self._packs.items()}
        seconds = time.perf_counter() - started
        return Fetched(files, tuple(needed), superfluous, refused, task.stored_bytes, seconds)

    def _drop(self, entry: StoredObject, error: PackError | StoreError) -> None:
        """Take a pack for absent, and what it alone has for not published."""
        if isinstance(error, PackError):
            self._refuse(entry, str(error))
        else:
            self._packs.pop(entry.name, None)
            self._refused[entry.name] = RefusedPack(entry.name, str(error), is_final=False)
        self._forget_published()

    def _forget_published(self) -> None:
        """Count as published only what the packs that are known now have."""
        self._published.keys = {file.key for pack in self._packs.values() for file in pack.head.manifest.files}
        paths = {file.path for pack in self._packs.values() for file in pack.head.manifest.files}
        self._published.files = {path: file for path, file in self._published.files.items() if path in paths}

    def _within_limits(self) -> tuple[Sequence[_StoredPack], Sequence[RefusedPack]]:
        """The packs, in order, that together unpack to no more than is allowed, and the others."""
        packs, too_large = [], []
        keys: set[str] = set()
        size_bytes = files = 0
        for name, pack in self._packs.items():
            if name in self._left_alone:
                continue
            new = [f for f in pack.head.manifest.files if f.key not in keys or f.replaces is not None]
            more_bytes = sum(file.size_bytes for file in new)
            if size_bytes + more_bytes > self.limits.size_bytes or files + len(new) > self.limits.files:
                reason = f"all packs unpack to more than {self.limits.size_bytes} bytes or {self.limits.files} files"
                too_large.append(RefusedPack(pack.entry.name, reason))
                continue
            packs.append(pack)
            keys.update(file.key for file in new)
            size_bytes, files = size_bytes + more_bytes, files + len(new)
        return packs, too_large

    def install(self, fetched: Fetched) -> int:
        """Move what `fetch` verified into the cache directory, each file at once and whole; returns how many.

        Raises:
            OSError: the cache directory cannot be written.
        """
        for path, (staged, file) in fetched.files.items():
            target = f"{self._directory.path}/{path}"
            if fetched.seeded_from:
                _mark_unread(staged)
            try:
                os.replace(staged, target)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                os.replace(staged, target)
            if fetched.seeded_from:
                self._seeded[path] = (_stamp(target), file.key)
            else:
                self._published.files[path] = (file.sha256, _stamp(target))
        return len(fetched.files)

    def stage(self, withheld: Collection[str], creator: str) -> tuple[Pack, ...]:
        """Finished packs, most valuable first, of all that the store does not have yet, `withheld` paths left out.

        Raises:
            StoreError: the store cannot be listed, where that has not been done before.
            OSError: the staging folder cannot be written.
        """
        if not self._is_listed:
            self.refresh()
        outbox = self._directory.empty_outbox()
        sources = sorted(self._unpublished(withheld), key=_by_value)
        return tuple(write_pack(outbox, self.key, part, creator, self.signer) for part in _parts(sources) if part)

    def _unpublished(self, withheld: Collection[str]) -> Iterator[Source]:
        """New logical keys, files whose content differs from the one published under their path, and of the files of
        another version those that this boot has read."""
        everything_read = bool(self._seeded) and not _records_reads(self._directory.inbox)
        siblings: dict[str, list[str]] = {}
        for path in self._published.files:
            siblings.setdefault(logical_key(path), []).append(path)
        for path, stamp in self._directory.scan().items():
            local, key = self._directory.path / path, logical_key(path)
            known = self._published.files.get(path)
            if path in withheld:
                continue
            self._published.staged[path] = stamp
            if known is not None:
                yield from self._changed(local, path, key, known, stamp)
            elif (seed := self._seeded.get(path)) and seed[0] == stamp:
                if seed[1] not in self._published.keys and (everything_read or _is_read(local)):
                    yield Source(local, path, seed[1])
            elif key not in self._published.keys:
                yield Source(local, path, key)
            elif (more := siblings.get(key)) and (variant := _variant(key, more)) not in self._published.keys:
                yield Source(local, path, variant)

    def _changed(
        self, local: Path, path: str, key: str, known: tuple[str, FileStamp], stamp: FileStamp
    ) -> Iterator[Source]:
        if known[1] == stamp:
            return
        sha256 = sha256_of(local)
        if sha256 != known[0]:
            # Nothing else is written twice, unless it is damaged; and of several successors the first is used.
            if path.endswith(_TUNED) and not self._has_successor(path, known[0]):
                yield Source(local, path, key, replaces=known[0])
        else:
            self._published.files[path] = (sha256, stamp)

    def _has_successor(self, path: str, sha256: str) -> bool:
        files = (file for pack in self._packs.values() for file in pack.head.manifest.files)
        return any(file.path == path and file.replaces == sha256 for file in files)

    def is_superseded(self, pack: Pack) -> bool:
        """Whether the store has meanwhile got something that this staged pack would publish again."""
        return any(file.key in self._published.keys for file in pack.manifest.files if file.replaces is None)

    def publish(self, pack: Pack) -> None:
        """Put a staged pack into the store: one PUT of an immutable object. What it holds is not staged again.

        Raises:
            StoreError: it was not stored; nothing that was there has changed.
        """
        store = self.writing
        name = self.key.prefix + pack.name
        store.put(name, pack.local)
        head = Head(pack.manifest, pack.stored_bytes - pack.manifest.frames_bytes)
        self._packs[name] = _StoredPack(StoredObject(name, pack.stored_bytes, pack.manifest.created_s), head)
        for file in pack.manifest.files:
            self._published.keys.add(file.key)
            self._published.files[file.path] = (file.sha256, self._published.staged[file.path])
            self._seeded.pop(file.path, None)
        if not self._environment_published:
            store.put(self.key.environment_prefix + "environment.json", self.environment.to_json().encode())
            self._environment_published = True

    def mark_used(self, today: str) -> None:
        """Record in the store that this key was used on the day `today` (YYYY-MM-DD), once: an empty object.

        Raises:
            StoreError: it cannot be recorded.
        """
        name = _USED + today
        if self.is_empty or name in self._uses:
            return
        store = self.writing
        store.put(self.key.prefix + name, b"")
        for older in [use for use in self._uses if use < name]:
            store.delete(self.key.prefix + older)
        self._uses = {name}

    @property
    def writing(self) -> ObjectStore:
        """The store that is written.

        Raises:
            StoreError: there is none.
        """
        if self.stores.writing is None:
            raise StoreError("there is no store to write to: set COMPILE_CACHE_STORE")
        return self.stores.writing


def fetch_head(
    store: ObjectStore, name: str, size_bytes: int, first_bytes: int, limits: Limits, trusted: TrustedKeys
) -> tuple[Head, bytes]:
    """The verified head of a pack of `size_bytes`, and the first bytes that were read for it: `first_bytes`, or more.

    Raises:
        PackError: says what is wrong.
        StoreError: it cannot be read.
    """
    if size_bytes > limits.size_bytes:
        raise PackError(f"it has {size_bytes} bytes, and {limits.size_bytes} are allowed")
    beginning = read_exactly(store, name, 0, min(first_bytes, size_bytes))
    missing_bytes = min(head_bytes(beginning, limits), size_bytes) - len(beginning)
    if missing_bytes > 0:
        beginning += read_exactly(store, name, len(beginning), missing_bytes)
    head = read_head(beginning, os.path.basename(name), limits, trusted)
    if head.stored_bytes != size_bytes:
        raise PackError(f"it has {size_bytes} bytes, and its manifest describes {head.stored_bytes}")
    return head, beginning


class _Unpacking:
    """The frames unpacked so far, each pack into a folder of its own."""

    def __init__(self, store: ObjectStore, inbox: Path, abandoned: threading.Event | None) -> None:
        self.stored_bytes = 0
        self._store = store
        self._inbox = inbox
        self._abandoned = abandoned
        self._done: set[tuple[str, int]] = set()
        self._counted: set[str] = set()
        self._lock = threading.Lock()

    def folder(self, pack: _StoredPack) -> Path:
        """Where the pack's files are."""
        return self._inbox / os.path.basename(pack.entry.name).partition(".")[0]

    def unpack(self, packs: Sequence[tuple[_StoredPack, set[str]]]) -> list[tuple[_StoredPack, PackError | StoreError]]:
        """Unpack those runs of each pack that hold one of its paths; the packs with which something is wrong."""
        failures: dict[str, tuple[_StoredPack, PackError | StoreError]] = {}

        def work(task: tuple[_StoredPack, list[Run]]) -> None:
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

    def _groups(self, pack: _StoredPack, paths: set[str]) -> Iterator[list[Run]]:
        """The runs still to be unpacked, those that lie together in one request."""
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

    def _unpack_group(self, pack: _StoredPack, group: list[Run]) -> None:
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


def _variant(key: str, siblings: Iterable[str]) -> str:
    """The logical key of an entry that was compiled although these had been found under `key`: Inductor keeps several
    graphs under one key, with guards on sizes, and none of these applied."""
    names = "\n".join(sorted(os.path.basename(path) for path in siblings))
    return f"{key}/after/{hashlib.sha256(names.encode()).hexdigest()[:32]}"


def _stamp(path: str) -> FileStamp:
    stat = os.stat(path)
    return FileStamp(stat.st_size, stat.st_mtime_ns)


def _mark_unread(path: Path) -> None:
    """Give a file an access time before its modification time: the first read then sets it, under relatime too."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns))


def _records_reads(folder: Path) -> bool:
    """Whether the file system sets access times: not where it is mounted with `noatime`."""
    with tempfile.NamedTemporaryFile(dir=folder) as probe:
        probe.write(b"read")
        probe.flush()
        _mark_unread(Path(probe.name))
        Path(probe.name).read_bytes()
        return _is_read(Path(probe.name))


def _lacks_binary(path: str, files: Mapping[str, object]) -> bool:
    """Whether `path` is Triton's record of a kernel whose binary is not among `files`. Triton believes the record, and
    fails; without it, it compiles the kernel."""
    folder, _, name = path.rpartition("/")
    if not (path.startswith("triton/") and name.startswith("__grp__")):
        return False
    kernel = name.removeprefix("__grp__").rpartition(".")[0]
    return not any(f"{folder}/{kernel}{suffix}" in files for suffix in (".cubin", ".hsaco"))


def _is_read(path: Path) -> bool:
    try:
        return path.stat().st_atime_ns != 0
    except FileNotFoundError:
        return False


def _by_value(source: Source) -> tuple[int, str]:
    """Graph entries save the most, by far: lowering and code generation. Then what a compiler made, then the rest."""
    if source.key != source.path:
        return 0, source.path
    return (1 if source.path.endswith((".so", ".cubin", ".hsaco", ".py")) else 2), source.path


def _parts(sources: Iterable[Source]) -> Iterator[list[Source]]:
    """`sources` in their order, cut where a pack would grow past its size: each twice the one before."""
    part: list[Source] = []
    size_bytes, most_bytes = 0, _SMALLEST_PART_BYTES
    for source in sources:
        # All files of a logical key are in one pack: the first pack that has the key is the one that they come from.
        if part and size_bytes > most_bytes and source.key != part[-1].key:
            yield part
            part, size_bytes, most_bytes = [], 0, min(2 * most_bytes, _LARGEST_PART_BYTES)
        part.append(source)
        size_bytes += source.local.stat().st_size if source.local.exists() else 0
    yield part
