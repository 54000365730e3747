"""Compaction: many packs of a key become one. Nothing is deleted before what replaces it was read back and verified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import PackError
from compile_cache.pack.format import Head, Source, runs, unpack_run, write_pack
from compile_cache.pack.manifest import Limits
from compile_cache.pack.reading import ObjectReader, in_daemon_threads
from compile_cache.pack.signing import TrustedKeys
from compile_cache.store.base import ObjectStore
from compile_cache.versions.cache import HEAD_READ_BYTES, CompileCache, fetch_head


@dataclass(frozen=True, slots=True)
class Compacted:
    """What one compaction did: how many packs it deleted, and the length of the one that it stored, if it had to."""

    packs: int = 0
    stored_bytes: int = 0


def compact(
    cache: CompileCache,
    folder: Path,
    creator: str,
    is_wanted: Callable[[], bool] = lambda: True,
    stopped: threading.Event | None = None,
) -> Compacted:
    """Merge all packs of `cache`, which reads and writes one store and no other, into one, which is made in `folder`.

    Any number of compactions at once are safe, and so is one that is killed at any moment: each deletes only packs that
    it read before it put one with all of their verified contents. So of whatever was published, the copy put last is
    there, because whoever deletes a copy has put a later one. Stops, without deleting, when `stopped` is set or not
    `is_wanted`.

    Raises:
        StoreError: the store did not do what was asked. Nothing is lost.
        PackError: what was written does not verify, and nothing was deleted.
        OSError: `folder` cannot be written.
    """
    store = cache.writing
    fetched = cache.fetch_mergeable(stopped)
    # Packs that have nothing of their own too: another compaction may be deleting those that have the same.
    merged = (*fetched.superfluous, *fetched.packs)
    if len(merged) < 2 or not is_wanted():
        return Compacted()
    sources = [Source(staged, path, file.key) for path, (staged, file) in fetched.files.items()]
    pack = write_pack(folder, cache.key, sources, creator, cache.signer)
    if len(pack.manifest.files) < len(sources):
        raise PackError(f"{len(sources) - len(pack.manifest.files)} files vanished from {cache.staging} meanwhile")
    name = cache.key.prefix + pack.name
    store.put(name, pack.local)
    try:
        verify_pack(store, name, pack.stored_bytes, cache.limits, cache.trusted)
    except PackError:
        store.delete(name)
        raise
    deleted = 0
    for old in merged:
        if not is_wanted():
            break
        store.delete(old)
        deleted += 1
    return Compacted(deleted, pack.stored_bytes)


def verify_pack(store: ObjectStore, name: str, size_bytes: int, limits: Limits, trusted: TrustedKeys) -> Head:
    """Read a whole pack from `store` and verify everything in it; nothing is kept.

    Raises:
        PackError: says what is wrong.
        StoreError: it cannot be read.
    """
    head, _ = fetch_head(store, name, size_bytes, HEAD_READ_BYTES, limits, trusted)
    in_daemon_threads(
        lambda run: unpack_run(ObjectReader(store, name, run.start, run.start + run.stored_bytes), run, None),
        runs(head),
    )
    return head
