"""A read-only store: a folder behind a web server or a content delivery network.

Web servers list folders in many ways or not at all, so the folder has its listing in a file:

<folder>/index.json    {"objects": [{"name": "v1/…/<sha256>.pack", "size_bytes": 1, "modified_s": 1.0}, …]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from compile_cache.errors import ObjectNotFound, StoreError
from compile_cache.store.base import ObjectStore, ReadOnly, StoredObject
from compile_cache.store.local import LocalStore

INDEX = "index.json"
MOST_INDEX_BYTES = 16 << 20  # 100,000 objects

_MOST_SIZE_BYTES = 1 << 63
_LATEST_S = 1 << 53


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
    store.put(INDEX, json.dumps({"objects": [asdict(entry) for entry in entries]}).encode())
    return len(entries)


def parse_index(content: bytes) -> list[StoredObject]:
    """The objects of an index, which anybody may have written.

    Raises:
        ValueError: `content` is not an index. The message says why.
    """
    if len(content) > MOST_INDEX_BYTES:
        raise ValueError(f"it has more than {MOST_INDEX_BYTES} bytes")
    try:
        objects = json.loads(content)["objects"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is not a JSON object with `objects`") from None
    if not isinstance(objects, list):
        raise ValueError("its `objects` are not a list")
    found = [_parse_entry(entry) for entry in objects]
    if len({entry.name for entry in found}) < len(found):
        raise ValueError("it has two objects with the same name")
    return found


def _parse_entry(entry: object) -> StoredObject:
    if not isinstance(entry, Mapping):
        raise ValueError(f"one of its objects is {entry!r:.100}")
    name, size_bytes, modified_s = entry.get("name"), entry.get("size_bytes"), entry.get("modified_s")
    if not isinstance(name, str) or not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
        raise ValueError(f"one of its objects has the name {name!r:.100}")
    if type(size_bytes) is not int or not 0 <= size_bytes < _MOST_SIZE_BYTES:
        raise ValueError(f"{name} in it has the size {size_bytes!r:.100}")
    if (type(modified_s) is not float and type(modified_s) is not int) or not abs(modified_s) < _LATEST_S:
        raise ValueError(f"{name} in it has the time {modified_s!r:.100}")
    return StoredObject(name, size_bytes, float(modified_s))
