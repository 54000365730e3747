"""A read-only store: a folder behind a web server or a content delivery network.

Web servers list folders in many ways or not at all, so the folder has its listing in a file:

<folder>/index.json    {"objects": [{"name": "v1/…/<sha256>.pack", "size_bytes": 1, "modified_s": 1.0}, …]}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from compile_cache.errors import ObjectNotFound, StoreError
from compile_cache.storage.stores.base import ObjectStore, ReadOnly, StoredObject
from compile_cache.storage.stores.local import LocalStore

INDEX = "index.json"
MOST_INDEX_BYTES = 16 << 20  # 100,000 objects

_MOST_SIZE_BYTES = 1 << 63
_LATEST_S = 1 << 53


class _Index(msgspec.Struct):
    objects: list[StoredObject]


class Mirror(ReadOnly):
    """The objects that the `index.json` of `files` lists."""

    def __init__(self, files: ObjectStore) -> None:
        self._files = files

    @property
    def location(self) -> str:
        """The URL, without user and password."""
        return self._files.location

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects of the index whose names begin with `prefix`, oldest first."""
        try:
            content = self._files.read(INDEX, 0, MOST_INDEX_BYTES + 1)
            found = [entry for entry in parse_index(content) if entry.name.startswith(prefix)]
        except ObjectNotFound as error:
            raise ObjectNotFound(f"{error}; make it with `compile-cache pull --to FOLDER`") from error
        except ValueError as error:
            raise StoreError(f"cannot list {self.location}{INDEX}: {error}; make it again") from error
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """At most `size_bytes` of the object's bytes, from `start` on."""
        return self._files.read(name, start, size_bytes)


def open_mirror(url: str) -> Mirror:
    """The mirror at `https://user:password@host/path`. Connects to nothing yet.

    Raises:
        StoreError: the URL has no host, or an invalid port.
    """
    from compile_cache.storage.stores.cloud import open_web  # its package is not needed to write an index

    return Mirror(open_web(url))


def write_index(folder: Path) -> int:
    """List a local store's objects in its `index.json`, so that a web server can serve the folder.

    Returns the number of objects. Objects that are stored later need a new index.

    Raises:
        StoreError: the folder is missing, or cannot be read or written.
    """
    if not folder.is_dir():
        raise ObjectNotFound(f"cannot list {folder}: it is not there")
    store = LocalStore(folder)
    entries = [entry for entry in store.list("") if entry.name != INDEX]
    store.put(INDEX, msgspec.json.encode(_Index(entries)))
    return len(entries)


def parse_index(content: bytes) -> list[StoredObject]:
    """The objects of an index, which anybody may have written.

    Raises:
        ValueError: `content` is not an index. The message says why.
    """
    if len(content) > MOST_INDEX_BYTES:
        raise ValueError(f"it has more than {MOST_INDEX_BYTES} bytes")
    try:
        found = msgspec.json.decode(content, type=_Index).objects
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    for entry in found:
        if not entry.name.isprintable() or {"", ".", ".."} & set(entry.name.split("/")):
            raise ValueError(f"one of its objects has the name {entry.name!r:.100}")
        if not 0 <= entry.size_bytes < _MOST_SIZE_BYTES or not abs(entry.modified_s) < _LATEST_S:
            raise ValueError(f"{entry.name[:100]!r} in it has an impossible size or time")
    if len({entry.name for entry in found}) < len(found):
        raise ValueError("it has two objects with the same name")
    return found
