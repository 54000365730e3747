"""The cache directory: the one local directory that Inductor and Triton write.

Compiled kernels are looked up by absolute path, so the path is fixed and part of the environment. One process owns it;
a second process on the same host gets the next one, whose path and key are its own. What is in it gets executed, so
nobody but its owner may write there.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from compile_cache.aot.files import PRECOMPILED
from compile_cache.errors import CacheDirectoryError

_MOST_DIRECTORIES = 64
_TEMPORARY = "compile-cache-temporary-"
# Lock files, files still being written, and precompiled headers, which are useless without a compile.
_LEFT_OUT_FOLDERS = frozenset({"locks"})
_LEFT_OUT_SUFFIXES = (".lock", ".tmp", ".gch", ".pid")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and time of a file: if both are the same, its content is taken to be unchanged."""

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
        yet, and its outbox, for packs that are not published yet.

        A boot begins with an empty directory, so that every file in it later was restored and verified, or compiled by
        this process.

        Raises:
            CacheDirectoryError: `root` cannot be made or written, belongs to somebody else, or all directories are
                taken.
        """
        try:
            _own(root)
            for number in range(_MOST_DIRECTORIES):
                lock_fd = _lock(root / f"{number}.lock")
                if lock_fd is None:
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
        raise CacheDirectoryError(
            f"{_MOST_DIRECTORIES} processes already own cache directories in {root}. Set COMPILE_CACHE_DIR to another "
            "folder."
        )

    @classmethod
    def temporary(cls) -> CacheDirectory:
        """A directory of this process alone, for a boot whose own directory cannot be used. No other process has its
        path, so nothing in it is ever published. It is removed when the process ends, or by the next call of a process
        of the same user, if this one was killed.

        Raises:
            CacheDirectoryError: it cannot be made.
        """
        _remove_abandoned(Path(tempfile.gettempdir()))
        try:
            root = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
        except OSError as error:
            raise CacheDirectoryError(f"a temporary cache directory cannot be made: {error}") from error
        directory = cls.claim(root)
        atexit.register(_remove_own, root, os.getpid())
        return directory

    def annex(self) -> CacheDirectory:
        """An empty directory inside this one's inbox, with an inbox and outbox of its own and the same refused packs.

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
        """Remove the annex."""
        shutil.rmtree(self.inbox / "annex", ignore_errors=True)

    def empty_inbox(self) -> None:
        """Remove fetched files.

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
        """Point Inductor and Triton here. Call it before torch is imported. Triton reads its path once."""
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.path)
        environ["TRITON_CACHE_DIR"] = str(self.path / "triton")

    def scan(self) -> dict[str, FileStamp]:
        """Every artifact by its path inside the directory. Visits every file and reads none."""
        return scan_folder(self.path)


def scan_folder(root: Path) -> dict[str, FileStamp]:
    """Every artifact below `root` by its path from there. Visits every file and reads none."""
    return dict(_walk(root, ""))


def _walk(root: Path, folder: str) -> Iterator[tuple[str, FileStamp]]:
    try:
        entries = list(os.scandir(root / folder))
    except FileNotFoundError:  # a temporary folder, renamed meanwhile, or a folder that somebody removed
        return
    for entry in entries:
        path = f"{folder}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in _LEFT_OUT_FOLDERS and not entry.name.startswith("tmp."):
                yield from _walk(root, path + "/")
        elif entry.is_file(follow_symlinks=False) and is_artifact(entry.name):
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # a temporary file, renamed meanwhile
                continue
            yield path, FileStamp(status.st_size, status.st_mtime_ns)


def _own(root: Path) -> None:
    """Make `root`, or take it over, as a folder where nobody else may write, and make it one that nobody else may enter
    (mode 0700) if it holds nothing else. In a sticky folder, such as /tmp, nobody may replace another user's files. A
    link must be ours as well: its owner could point it somewhere else.

    Raises:
        CacheDirectoryError: somebody else owns it, or can write it.
        OSError: it cannot be made.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    us = os.geteuid()
    if strangers := {root.stat().st_uid, root.lstat().st_uid or us} - {us}:  # the link itself may be root's
        raise CacheDirectoryError(
            f"the cache directory {root} belongs to user {min(strangers)}, not to user {us}, who runs this boot: its "
            f"owner could change code after it was verified. {_REMEDY}"
        )
    if root.stat().st_mode & stat.S_ISVTX:
        return
    if root.stat().st_mode & 0o077 and all(_OURS.fullmatch(name) for name in os.listdir(root)):
        root.chmod(0o700)
    if root.stat().st_mode & 0o022:  # it holds somebody's files, or its file system has no modes
        raise CacheDirectoryError(
            f"the cache directory {root} can be written by other users, who could change code after it was verified. "
            f"{_REMEDY}"
        )


_OURS = re.compile(r"\d+(\.lock|\.inbox|\.outbox)?|[a-j]+|refused")  # letters: the compiling process's folders
_REMEDY = "Set COMPILE_CACHE_DIR to a folder that does not exist yet, where this user may make one."


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock file's lock until it is closed; None if another process holds it."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def _remove_own(root: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child runs the exit hooks of its parent, who still uses the directory
        shutil.rmtree(root, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove temporary directories whose process was killed: ours, and no longer locked."""
    for root in parent.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            status = root.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            # Without a lock file, its process is only just making it.
            if not is_ours or not (root / "0.lock").exists() or (lock_fd := _lock(root / "0.lock")) is None:
                continue
            shutil.rmtree(root, ignore_errors=True)
            os.close(lock_fd)


def is_artifact(name: str) -> bool:
    """False for locks, for files still being written (Inductor's and Triton's are hidden or named with `.tmp`), and for
    names that no pack may have."""
    if not name.isprintable() or "\\" in name:
        return False
    return not name.startswith(".") and not name.endswith(_LEFT_OUT_SUFFIXES) and ".tmp." not in name


def has_artifacts(paths: Iterable[str]) -> bool:
    """Whether some of a cache directory's paths are functions compiled ahead of time."""
    return any(path.startswith(f"{PRECOMPILED}/") for path in paths)


def logical_key(path: str) -> str:
    """The logical key of the artifact at `path`: what it is for.

    Two cold compiles of one model write FX-graph and AOTAutograd entries with different bytes under different file
    names, but in the same folder: the folder is their logical key. The logical key of any other file is its path.
    """
    parts = path.split("/")
    if parts[0] == "fxgraph" and len(parts) == 4:  # fxgraph/<2 letters>/<key>/<content>
        return f"fxgraph/{parts[2]}"
    if parts[0] == "aotautograd" and len(parts) == 3:  # aotautograd/<key>/<content>
        return f"aotautograd/{parts[1]}"
    return path
