"""A store in a local folder: the default, for `cog run` and `cog predict` on one machine.

Web servers list folders in many ways or not at all, so a folder behind one has its listing in a file:

<folder>/index.json    {"objects": [{"name": "v3/…/<sha256>.pack", "size_bytes": 1, "modified_s": 1.0}, …]}
"""

from __future__ import annotations

import io
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import msgspec

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable, log
from compile_cache.files import TEMPORARY, replacing
from compile_cache.settings import split_url
from compile_cache.storage.stores.base import ReadableStore, StoredObject, oldest_first, translated

# A temporary file that was not written for so long has no writer left, on this host or another.
_LEFTOVER_AGE_S = 24 * 60 * 60

INDEX = "index.json"
MOST_INDEX_BYTES = 16 << 20  # 100,000 objects


class Index(msgspec.Struct):
    """The listing of a folder behind a web server. Anybody may have written it."""

    objects: list[StoredObject]


class LocalStore:
    """Its objects are the regular files below `root`, and links to them. An object's name is its path."""

    def __init__(self, root: Path) -> None:
        """The first put makes `root`."""
        self.location = str(root)
        self._root = root

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, oldest first. A missing folder has none. A subfolder that this
        user may not read is left out, with a warning."""
        folder = self._root / prefix.rpartition("/")[0]
        with _translated(f"list {folder}"):
            return oldest_first(self._walk(folder), prefix)

    def _walk(self, folder: Path) -> Iterator[StoredObject]:
        def note(error: OSError) -> None:
            if isinstance(error, PermissionError) and error.filename != str(folder):
                log.warning(
                    "store.unreadable folder=%s Its objects are not listed. Give this user access to the folder.",
                    error.filename,
                )
            elif not isinstance(error, FileNotFoundError):
                raise error

        for parent, _, names in os.walk(folder, onerror=note):
            for name in names:
                path = Path(parent, name)
                if name.startswith(TEMPORARY):
                    continue
                with suppress(OSError):  # deleted since the folder was read, or a broken link
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        place = path.relative_to(self._root).as_posix()
                        yield StoredObject(place, status.st_size, status.st_mtime)

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """At most `size_bytes` of the file's bytes, from `start` on."""
        path = self._root / name
        with _translated(f"read {path}"):
            if not stat.S_ISREG(path.stat().st_mode):  # to open a FIFO would block
                raise StoreError(f"cannot read {path}: it is not a regular file; remove it from the store")
            with path.open("rb") as file:
                file.seek(start)
                return file.read(size_bytes)

    def put(self, name: str, content: Path | bytes) -> None:
        """Write a temporary file beside the object and rename it. A reader sees the whole object or none."""
        target = self._root / name
        with _translated(f"write {target}"):
            opened = io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
            with opened as source, replacing(target) as file:
                shutil.copyfileobj(source, file, 1 << 20)
            _remove_leftovers(target)

    def delete(self, name: str) -> None:
        """Remove the file. A missing file is no error."""
        with _translated(f"delete {self._root / name}"):
            (self._root / name).unlink(missing_ok=True)


def open_local(url: str) -> LocalStore:
    """The store in a folder, given by its path or its `file://` URL."""
    return LocalStore(Path(split_url(url)[1]).absolute())


def index_folder(store: ReadableStore) -> None:
    """List the objects of a store that is a folder in its `index.json`, so that a web server can serve the folder.
    Readers there do not see objects that are stored later, until the index is written again.

    Raises:
        StoreError: the folder cannot be read or written.
    """
    if isinstance(store, LocalStore) and Path(store.location).is_dir():
        entries = [entry for entry in store.list("") if entry.name != INDEX]
        store.put(INDEX, msgspec.json.encode(Index(entries)))


def _remove_leftovers(target: Path) -> None:
    """Remove old temporary files of killed writers beside `target`, a file that was just written.

    Both times come from the file server, because another host's clock may be wrong by hours.
    """
    with suppress(OSError):  # the object is stored; another user may own the leftovers, or remove them too
        newest_s = target.stat().st_mtime - _LEFTOVER_AGE_S
        for path in target.parent.glob(f"{TEMPORARY}*"):
            if path.lstat().st_mtime < newest_s:
                path.unlink()
                log.info("store.leftover_removed path=%s", path)


def _translated(what: str) -> AbstractContextManager[None]:
    return translated(what, (OSError,), _meaning)


def _meaning(error: OSError) -> tuple[type[StoreError], str]:
    """The store's error for an error of the file system, and its text, with advice for the user."""
    match error:
        case FileNotFoundError():
            return ObjectNotFound, "it is not there"
        case PermissionError():
            return StoreAccessDenied, f"{error.strerror}; give this user access, or set COMPILE_CACHE_STORE"
        case TimeoutError():
            return StoreUnavailable, str(error)
    return StoreError, f"{error}; set COMPILE_CACHE_STORE to a folder that can be used"
