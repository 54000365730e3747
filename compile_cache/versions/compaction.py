"""Compaction: many packs of a key become one. Packs are deleted only after the merged one was read back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import PackError, StoreUnavailable
from compile_cache.pack.format import Source, write_pack
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.fetch import Fetched
from compile_cache.versions.verify import verify_pack


@dataclass(frozen=True, slots=True)
class Compacted:
    """How many packs one compaction deleted, and the length of the one that it stored, if it had to."""

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

    Several compactions may run at once, and each may be killed at any moment. A compaction deletes only packs that it
    read before it put one with all of their verified contents. So the copy of a file that was put last is always there:
    whoever deletes a copy has put a later one. Stops, without deleting, when `stopped` is set or not `is_wanted`.

    Withdrawn packs are neither merged nor deleted. If a pack is withdrawn meanwhile, the merged one is taken back.

    Raises:
        StoreError: the store failed. Nothing is lost.
        PackError: the merged pack does not verify; nothing was deleted.
        OSError: `folder` cannot be written.
    """
    store = cache.writing
    fetched = _fetch_mergeable(cache, stopped)
    # Superfluous packs too: another compaction may be deleting the packs that have the same.
    merged = (*fetched.superfluous, *fetched.packs)
    if len(merged) < 2 or not is_wanted():
        return Compacted()
    sources = [Source(Path(staged.local), path, staged.file.key) for path, staged in fetched.files.items()]
    pack = write_pack(folder, cache.key, sources, creator, cache.rules.signer)
    if len(pack.manifest.files) < len(sources):
        raise PackError(f"{len(sources) - len(pack.manifest.files)} files vanished from {cache.staging} meanwhile")
    name = cache.key.prefix + pack.name
    store.put(name, pack.local)
    try:
        verify_pack(store, name, pack.stored_bytes, cache.rules)
    except PackError:
        store.delete(name)
        raise
    if _is_one_withdrawn(cache, merged):
        store.delete(name)
        return Compacted()
    deleted = 0
    for old in merged:
        if not is_wanted():
            break
        store.delete(old)
        deleted += 1
    return Compacted(deleted, pack.stored_bytes)


def _is_one_withdrawn(cache: CompileCache, packs: Collection[str]) -> bool:
    """Whether the store now says of one of `packs` that it is out of use. Raises StoreError if it cannot be listed."""
    cache.list()
    return not cache.packs.withdrawn.keys().isdisjoint(packs)


def _fetch_mergeable(cache: CompileCache, stopped: threading.Event | None) -> Fetched:
    """Fetch the packs that may be merged: those signed by the cache's own signer, or, without a signer, the unsigned
    ones. A pack with files that replace another pack's is left alone: without that pack, the files mean nothing.

    Raises:
        StoreError, OSError: as `CompileCache.fetch`; or some pack cannot be read just now.
    """
    cache.refresh(stopped)
    own = cache.rules.signer.public_key if cache.rules.signer else None
    left_alone = {
        name
        for name, pack in cache.packs.known.items()
        if pack.head.signed_by != own or any(file.replaces for file in pack.head.manifest.files)
    }
    fetched = cache.fetch(stopped, left_alone)
    if not cache.is_fully_known:
        raise StoreUnavailable(f"some packs of {cache.key.prefix} cannot be read: they are merged another time")
    return fetched
