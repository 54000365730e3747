"""Merging: a publisher puts the packs of its key into one. They are deleted only after the new one was read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import ObjectNotFound, PackError
from compile_cache.storage.choose import choose
from compile_cache.storage.heads import StoredPack
from compile_cache.storage.pack.format import Source, sha256_of, write_pack
from compile_cache.storage.pack.manifest import PackFile
from compile_cache.storage.packs import PacksOfKey
from compile_cache.storage.verify import verify_pack

MOST_PACKS = 4


@dataclass(frozen=True, slots=True)
class Merged:
    """How many packs were merged and deleted, and the length of the pack that was stored instead, if any."""

    packs: int = 0
    stored_bytes: int = 0


def merge(packs: PacksOfKey, directory: Path, folder: Path, creator: str) -> Merged:
    """If the written store has more than four `packs`, merge those whose files `directory` has. The new pack is made in
    `folder`, and read back before the others are deleted.

    Any number of processes may merge at once, and each may be killed at any moment. Whoever deletes a pack has stored
    its files in a later one, and has then seen that all merged packs were still there. If one of them is gone, somebody
    else has merged or removed it, and the new pack is deleted instead.

    Raises:
        StoreError: the store failed. Nothing is lost.
        PackError: the merged pack is damaged. Nothing was deleted.
        OSError: `folder` cannot be written.
    """
    packs.refresh()
    if len(packs.known) <= MOST_PACKS:
        return Merged()
    merged, files = _mergeable(packs, directory)
    if len(merged) < 2:
        return Merged()
    sources = [Source(directory / path, path, file.key) for path, file in files.items()]
    pack = write_pack(folder, packs.key, sources, creator, packs.rules.signer)
    if {file.path: file.sha256 for file in pack.manifest.files} != {path: f.sha256 for path, f in files.items()}:
        return Merged()  # torch has just rewritten a file
    store, name = packs.store, packs.key.prefix + pack.name
    store.put(name, pack.local)
    pack.local.unlink()
    try:
        verify_pack(store, name, pack.stored_bytes, packs.rules)
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
