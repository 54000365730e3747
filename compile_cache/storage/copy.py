"""Copies packs between stores, for example into a folder that goes into an image or behind a web server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from compile_cache.errors import PackError, RefusedPack, StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.storage.catalog import ROOT, read_catalog, read_record
from compile_cache.storage.pack.format import READ_BYTES
from compile_cache.storage.rules import Rules, read_stored_head, verify_pack
from compile_cache.storage.stores.base import ObjectStore, ReadableStore, StoredObject
from compile_cache.storage.stores.local import LocalStore
from compile_cache.storage.stores.transfer import open_part


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy, by the packs' names: those that were copied, those that the target had already, and those
    that were refused or could not be read."""

    packs: dict[str, StoredObject] = field(default_factory=dict)
    present: dict[str, StoredObject] = field(default_factory=dict)
    refused: dict[str, RefusedPack] = field(default_factory=dict)


def copy_versions(
    source: ReadableStore, target: ObjectStore, is_wanted: Callable[[CacheKey], bool], rules: Rules
) -> Copied:
    """Copy the packs of each wanted version, and their environments' records, if `target` does not have them.

    Each pack is read into a temporary folder and verified there; then `target` gets it in one put. So an interrupted
    copy leaves only whole and sound packs, and the next copy goes on from there. A pack that is merged meanwhile is
    refused; the next copy has what it was merged into.

    Raises:
        StoreError: a store cannot be listed, or `target` cannot be written.
        OSError: the temporary folder cannot be written.
    """
    copied = Copied()
    there = {(entry.name, entry.size_bytes) for entry in target.list(ROOT)}
    catalog = read_catalog(source)
    versions = [version for version in catalog.versions if version.packs and is_wanted(version.key)]
    # The oldest first, so that `target` lists them in the same order.
    for pack in [pack for version in versions for pack in version.packs]:
        if (pack.name, pack.size_bytes) in there:
            copied.present[pack.name] = pack
            continue
        with tempfile.TemporaryDirectory(prefix="compile-cache-") as folder:
            try:
                local = _read_verified(source, pack, Path(folder), rules)
            except (PackError, StoreError) as error:
                copied.refused[pack.name] = RefusedPack.after(pack.name, error)
                continue
            target.put(pack.name, local)
        copied.packs[pack.name] = pack
    for digest in sorted({version.key.environment for version in versions} & catalog.records.keys()):
        record = catalog.records[digest]
        if (record.name, record.size_bytes) not in there:
            found = read_record(source, catalog, digest)
            if found is not None:  # else it is forged, or cannot be read
                target.put(record.name, found.to_json().encode())
    return copied


def _read_verified(source: ReadableStore, pack: StoredObject, folder: Path, rules: Rules) -> Path:
    """Read a pack into `folder`, a part after the other, and verify it there. Returns its path.

    Raises:
        PackError: the pack is damaged or forbidden.
        StoreError: the pack cannot be read.
    """
    read_stored_head(source, pack, rules)  # if the head is refused, the rest need not be read
    local = folder / pack.name
    local.parent.mkdir(parents=True)
    with local.open("wb") as file:
        shutil.copyfileobj(open_part(source, pack.name, 0, pack.size_bytes), file, READ_BYTES)
    verify_pack(LocalStore(folder), pack, rules)
    return local
