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
    """How many packs a compaction deleted, and the length of the pack that it stored, if any."""

    packs: int = 0
    stored_bytes: int = 0


def compact(
    cache: CompileCache,
    folder: Path,
    creator: str,
    is_wanted: Callable[[], bool] = lambda: True,
    stopped: threading.Event | None = None,
) -> Compacted:
    """Merge all packs of `cache` into one, which is made in `folder`. `cache` reads and writes a single store.

    Several compactions may run at once, and each may be killed at any moment. A compaction uploads a pack with all
    verified contents of the packs that it has read, and then deletes those. So the latest copy of a file always exists:
    whoever deletes a copy has uploaded a later one. If `stopped` is set or not `is_wanted`, it stops and deletes
    nothing.

    Withdrawn packs are neither merged nor deleted. If a pack is withdrawn meanwhile, the merged pack is deleted.

    Raises:
        StoreError: the store failed. Nothing is lost.
        PackError: the merged pack is damaged. Nothing was deleted.
        OSError: `folder` cannot be written.
    """
    store = cache.writing
    fetched = _fetch_mergeable(cache, stopped)
    # Superfluous packs too, because another compaction may be deleting the packs with the same files.
    merged = (*fetched.superfluous, *fetched.packs)
    if len(merged) < 2 or not is_wanted():
        return Compacted()
    sources = [Source(Path(staged.local), path, staged.file.key) for path, staged in fetched.files.items()]
    pack = write_pack(folder, cache.key, sources, creator, cache.rules.signer)
    if len(pack.manifest.files) < len(sources):
        raise PackError(
            f"{len(sources) - len(pack.manifest.files)} files vanished from {cache.staging} during compaction"
        )
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
    """Whether one of `packs` is withdrawn by now. Raises StoreError if the store cannot be listed."""
    cache.list()
    return not cache.packs.withdrawn.keys().isdisjoint(packs)


def _fetch_mergeable(cache: CompileCache, stopped: threading.Event | None) -> Fetched:
    """Fetch the packs that may be merged: those signed by the cache's own signer, or the unsigned packs if there is no
    signer. A pack with files that replace another pack's files is left alone, because it needs that pack.

    Raises:
        StoreError, OSError: as `CompileCache.fetch`; or a pack cannot be read now.
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
        raise StoreUnavailable(f"some packs of {cache.key.prefix} cannot be read now; a later boot merges them")
    return fetched
