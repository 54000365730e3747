"""A store in a local folder: the default, for `cog run` and `cog predict` on one machine."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from compile_cache.errors import ObjectNotFound, StoreAccessDenied, StoreError, StoreUnavailable
from compile_cache.store.base import StoredObject

_TEMPORARY = ".tmp-"
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


class LocalStore:
    """Objects are files below `root`, made on the first put; an object's name is its path."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self._root)

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose name begins with `prefix`, oldest first. A folder that is not there has none."""
        folder = self._root / prefix.rpartition("/")[0]
        with _translated(f"list {folder}"):
            found = [
                StoredObject(name, stat.st_size, stat.st_mtime)
                for name, stat in self._walk(folder)
                if name.startswith(prefix)
            ]
        return sorted(found, key=lambda entry: (entry.modified_s, entry.name))

    def _walk(self, folder: Path) -> Iterator[tuple[str, os.stat_result]]:
        for parent, _, names in os.walk(folder, onerror=_raise_unless_missing):
            for name in names:
                path = Path(parent, name)
                if not name.startswith(_TEMPORARY):
                    with suppress(FileNotFoundError):  # deleted since the folder was read
                        yield path.relative_to(self._root).as_posix(), path.stat()

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The file's bytes from `start` on, at most `size_bytes` of them."""
        with _translated(f"read {self._root / name}"), (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(size_bytes if size_bytes is not None else -1)

    def put(self, name: str, content: Path | bytes) -> None:
        """Write beside the place and rename: a reader sees the whole object or none."""
        target = self._root / name
        with _translated(f"write {target}"), _written_beside(target, content) as temporary:
            os.replace(temporary, target)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Write beside the place and link: whoever links first has stored it (link(2) is atomic, on NFS too). On a file
        system without links, a look and then a rename."""
        target = self._root / name
        with _translated(f"write {target}"), _written_beside(target, content) as temporary:
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if target.exists():
                    return False
                os.replace(temporary, target)
            return True

    def delete(self, name: str) -> None:
        """Remove the file; one that is not there is no error."""
        with _translated(f"delete {self._root / name}"):
            (self._root / name).unlink(missing_ok=True)


@contextmanager
def _written_beside(target: Path, content: Path | bytes) -> Iterator[str]:
    """A temporary file with `content` in the folder of `target`, gone afterwards unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                with content.open("rb") as source:
                    shutil.copyfileobj(source, file, 1 << 20)
        os.chmod(temporary, 0o644)
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where the file system's errors become the store's."""
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectNotFound(f"cannot {what}: it is not there") from error
    except PermissionError as error:
        raise StoreAccessDenied(
            f"cannot {what}: {error.strerror}; give this user access, or set COMPILE_CACHE_STORE"
        ) from error
    except TimeoutError as error:
        raise StoreUnavailable(f"cannot {what}: {error}") from error
    except OSError as error:
        raise StoreError(f"cannot {what}: {error}; set COMPILE_CACHE_STORE to a folder that can be used") from error
