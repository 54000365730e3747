"""The cache directory: the one local directory that Inductor and Triton write.

Compiled kernels are looked up by absolute path, so the path is fixed and part of the environment. One process owns it;
a second process on the same host gets the next one, whose path, and therefore whose key, is its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.errors import CacheDirectoryError

_MOST_DIRECTORIES = 64
# Lock files, files still being written, and precompiled headers, useless without a compile.
_LEFT_OUT_FOLDERS = frozenset({"locks"})
_LEFT_OUT_SUFFIXES = (".lock", ".tmp", ".gch", ".pid")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells without reading that a file is unchanged."""

    size_bytes: int
    modified_ns: int


class CacheDirectory:
    """A cache directory that this process owns until it ends. `claim` makes one."""

    def __init__(self, root: Path, number: int, lock_fd: int) -> None:
        self.path = root / str(number)
        self.inbox = root / f"{number}.inbox"
        self._outbox = root / f"{number}.outbox"
        self.refused = root / "refused"
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, root: Path) -> CacheDirectory:
        """Own the first free directory `<root>/<n>`, emptied. Beside it are its inbox, for packs that are not verified
        yet, and its outbox, for those that are not published yet.

        A boot begins with an empty directory, so that what is in it later was restored and verified, or compiled by
        this process.

        Raises:
            CacheDirectoryError: `root` cannot be made or written, or all directories are taken.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in range(_MOST_DIRECTORIES):
                lock_fd = os.open(root / f"{number}.lock", os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(lock_fd)
                    continue
                directory = cls(root, number, lock_fd)
                try:
                    for folder in (directory.path, directory.inbox, directory._outbox):
                        _make_empty(folder)
                except OSError:
                    os.close(lock_fd)
                    raise
                return directory
        except OSError as error:
            raise CacheDirectoryError(
                f"the cache directory {root} cannot be used: {error}. Set COMPILE_CACHE_DIR to a writable folder."
            ) from error
        raise CacheDirectoryError(f"{_MOST_DIRECTORIES} processes already own cache directories in {root}.")

    @classmethod
    def temporary(cls) -> CacheDirectory:
        """A directory of this process alone, for a boot whose own directory cannot be used. Nothing is found by a path
        that no other process has, so it is never published."""
        return cls.claim(Path(tempfile.mkdtemp(prefix="compile-cache-")))

    def annex(self) -> CacheDirectory:
        """A staging area of its own inside this one's inbox, emptied, which remembers the same refusals.

        Raises:
            OSError: it cannot be made.
        """
        root = self.inbox / "annex"
        _make_empty(root)
        annex = CacheDirectory(root, 0, self._lock_fd)
        annex.refused = self.refused
        for folder in (annex.path, annex.inbox, annex._outbox):
            folder.mkdir()
        return annex

    def empty_annex(self) -> None:
        """Remove what the annex has."""
        shutil.rmtree(self.inbox / "annex", ignore_errors=True)

    def empty_inbox(self) -> None:
        """Throw away what was fetched.

        Raises:
            OSError: it cannot be emptied.
        """
        _make_empty(self.inbox)

    def empty_outbox(self) -> Path:
        """The folder for finished packs, emptied.

        Raises:
            OSError: it cannot be emptied.
        """
        _make_empty(self._outbox)
        return self._outbox

    def activate(self, environ: MutableMapping[str, str]) -> None:
        """Point Inductor and Triton here. Before torch is imported; Triton fixes its own path at the first kernel."""
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.path)
        environ["TRITON_CACHE_DIR"] = str(self.path / "triton")

    def scan(self) -> dict[str, FileStamp]:
        """Every artifact by its path inside the directory. Reads no file, but visits each."""
        return dict(self._walk(""))

    def _walk(self, folder: str) -> Iterator[tuple[str, FileStamp]]:
        try:
            entries = list(os.scandir(self.path / folder))
        except FileNotFoundError:  # a temporary folder, renamed meanwhile, or one that somebody removed
            return
        for entry in entries:
            path = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _LEFT_OUT_FOLDERS and not entry.name.startswith("tmp."):
                    yield from self._walk(path + "/")
            elif entry.is_file(follow_symlinks=False) and is_artifact(entry.name):
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # a temporary file, renamed meanwhile
                    continue
                yield path, FileStamp(stat.st_size, stat.st_mtime_ns)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()


def is_artifact(name: str) -> bool:
    """False for locks, files still being written (Inductor's and Triton's are hidden or named with `.tmp`), and names
    that no pack may have."""
    if not name.isprintable() or "\\" in name:
        return False
    return not name.startswith(".") and not name.endswith(_LEFT_OUT_SUFFIXES) and ".tmp." not in name


def logical_key(path: str) -> str:
    """What the artifact at `path` is for.

    Two cold compiles of one model write FX-graph and AOTAutograd entries with different bytes under different file
    names, in a folder that is named by what they are for: that folder is their logical key. Any other file's is its
    path.
    """
    parts = path.split("/")
    if parts[0] == "fxgraph" and len(parts) == 4:  # fxgraph/<2 letters>/<key>/<content>
        return f"fxgraph/{parts[2]}"
    if parts[0] == "aotautograd" and len(parts) == 3:  # aotautograd/<key>/<content>
        return f"aotautograd/{parts[1]}"
    return path
