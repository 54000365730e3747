"""The cache directory: the one local directory that Inductor and Triton write.

Compiled kernels are found by absolute path, so the path is fixed and part of the environment. One process owns the
directory. A second process on the same host gets the next directory, with another path and key. The files are executed,
so only the owner may write there.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, MutableMapping
from pathlib import Path

from compile_cache.errors import CacheDirectoryError, PackError, SettingsError
from compile_cache.storage.ledger import Ledger
from compile_cache.storage.pack.manifest import check_paths

_MOST_DIRECTORIES = 64
# Lock files, unfinished files, and precompiled headers, which are useless without a compile; and torch's notes on
# sizes, whose names have the value of a variable, TORCH_COMPILE_JOB_ID.
_LEFT_OUT = re.compile(r"(^|/)(locks/|tmp\.[^/]*/|(\.|code_state_)[^/]*$)|\.tmp\.[^/]*$|\.(lock|tmp|gch|pid)$")
# A compiler writes these in place. Meanwhile torch holds a lock in the folder `locks`.
_BUILT_SUFFIXES = (".so", ".o")
# The folder of files that the caller keeps.
_KEPT = "kept/"


class CacheDirectory:
    """A cache directory that this process owns until it ends. `claim` makes one."""

    def __init__(self, root: Path, number: int, lock_fd: int) -> None:
        self.path = root / str(number)
        self.beside = [root / f"{number}.{name}" for name in ("inbox", "outbox", "logs", "compilers")]
        self.inbox, self.outbox, self.logs, self.compilers = self.beside
        self.lock_fd = lock_fd
        self._place = root.resolve() / str(number)
        self._named: set[str] = set()
        self.ledger = Ledger(self.scan, self.kept)

    @classmethod
    def claim(cls, root: Path) -> CacheDirectory:
        """Claim and empty the first free directory `<root>/<n>`. Beside it are its inbox, for packs that are not
        verified yet, its outbox, for packs that are not published yet, its logs, and temporary files of compilers.

        A boot begins with an empty directory. So every file in it was restored and verified, or compiled by this
        process.

        Raises:
            CacheDirectoryError: `root` cannot be made or written, belongs to another user, or all directories are
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
                    for folder in (directory.path, *directory.beside):
                        empty_folder(folder)
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

    def activate(self, environ: MutableMapping[str, str]) -> None:
        """Point Inductor and Triton at this directory. Call it before torch is imported. Triton reads its path once."""
        environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.path)
        environ["TRITON_CACHE_DIR"] = str(self.path / "triton")

    def scan(self, finished_ns: float = math.inf) -> dict[str, int]:
        """All artifacts that were last changed until `finished_ns`, without kept files: the time of that, in ns, by
        path inside the directory. Reads no file, and follows no link: if a link has replaced the directory, there are
        none."""
        files = scan_folder(self.path) if self.path.resolve() == self._place else ()
        return {path: modified_ns for path, modified_ns in files if modified_ns <= finished_ns and not is_kept(path)}

    def finished(self, paths: Iterable[str]) -> set[str]:
        """Those of the files which were there that nobody writes now: no libraries while a compiler is at work. torch
        moves all others into their places."""
        unfinished = _BUILT_SUFFIXES if any(map(_is_locked, (self.path / "locks").glob("*.lock"))) else ()
        return {path for path in paths if not path.endswith(unfinished)}

    def keep(self, name: str) -> Path:
        """The place of a file that the caller keeps.

        Raises:
            SettingsError: no pack can have it, or no pack can have it beside the other kept files.
        """
        path = f"{_KEPT}{name}"
        try:
            if not is_artifact(path):
                raise PackError("it is named like a lock, or like a file that is not finished")
            check_paths(sorted({path, *self._named, *self.kept()}))
        except PackError as error:
            raise SettingsError(f"boot.kept_file({name!r:.300}): no pack can have this file: {error}") from error
        self._named.add(path)
        return self.path / path

    def kept(self) -> dict[str, str]:
        """The files that the caller keeps: the time of the last change, by path inside the directory."""
        return {f"{_KEPT}{path}": str(modified_ns) for path, modified_ns in scan_folder(self.path / _KEPT)}


def scan_folder(root: Path) -> Iterator[tuple[str, int]]:
    """All artifacts below `root`: the relative path, and the time of the last change in ns. Reads no file."""

    def pass_by(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | PermissionError):  # a folder renamed meanwhile, or a closed one
            raise error

    for parent, folders, names in os.walk(root, onerror=pass_by):
        folders[:] = [name for name in folders if is_artifact(f"{name}/")]
        for path in [f"{parent}/{name}" for name in names if is_artifact(name)]:
            with contextlib.suppress(FileNotFoundError):  # a temporary file, renamed meanwhile
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode):
                    yield path.removeprefix(f"{root}/"), status.st_mtime_ns


def _own(root: Path) -> None:
    """Make or take over `root`, where no other user may write. If it holds only our files, no other user may enter it
    (mode 0700). In a sticky folder such as /tmp, nobody can replace another user's files. A link must be ours too,
    because its owner could point it elsewhere.

    Raises:
        CacheDirectoryError: another user owns `root`, or can write there.
        OSError: `root` cannot be made.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    us = os.geteuid()
    if strangers := {root.stat().st_uid, root.lstat().st_uid or us} - {us}:  # the link itself may be root's
        raise CacheDirectoryError(
            f"the cache directory {root} belongs to user {min(strangers)}, but user {us} runs this boot. The owner "
            f"could change code after it was verified. {_REMEDY}"
        )
    if root.stat().st_mode & stat.S_ISVTX:
        return
    if root.stat().st_mode & 0o077 and all(_OURS.fullmatch(name) for name in os.listdir(root)):
        root.chmod(0o700)
    if root.stat().st_mode & 0o022:  # it holds other files, or its file system has no modes
        raise CacheDirectoryError(
            f"other users can write to the cache directory {root}, and could change code after it was verified. "
            f"{_REMEDY}"
        )


_OURS = re.compile(r"\d+(\.\w+)?|[a-j]+")  # letters: folders of the compiling process
_REMEDY = "Set COMPILE_CACHE_DIR to a folder that does not exist yet, where this user may make one."


def _lock(path: Path) -> int | None:
    """A descriptor that holds the lock until it is closed; None if another process holds the lock."""
    lock_fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock_fd)
        return None
    return lock_fd


def is_claimed(path: Path) -> bool:
    """Whether a process owns the cache directory at `path`, or did and its program still does."""
    lock = path.with_name(f"{path.name}.lock")
    return lock.exists() and _is_locked(lock)


def _is_locked(path: Path) -> bool:
    if (lock_fd := _lock(path)) is not None:
        os.close(lock_fd)
    return lock_fd is None


def empty_folder(folder: Path) -> None:
    """Make a private folder, or remove what is in it.

    Raises:
        OSError: the folder cannot be made or emptied.
    """
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)


def is_kept(path: str) -> bool:
    """Whether the file is one that the caller keeps: the newest one counts, not the first."""
    return path.startswith(_KEPT)


def is_artifact(path: str) -> bool:
    """Whether a file is an artifact. Locks, unfinished files (hidden or with `.tmp` in the name), torch's notes on
    sizes and names that no pack may have are not. For a folder, whose path ends with a slash: whether it has any."""
    name = path.rpartition("/")[2]
    return name.isprintable() and "\\" not in name and not _LEFT_OUT.search(path)


def logical_key(path: str) -> str:
    """The logical key of the artifact at `path`: it names the artifact's purpose.

    Two cold compiles of a model write FX-graph and AOTAutograd entries with different bytes and file names into the
    same
    folder: the folder is their logical key. The logical key of any other file is its path.
    """
    parts = path.split("/")
    if parts[0] == "fxgraph" and len(parts) == 4:  # fxgraph/<2 letters>/<key>/<content>
        return f"fxgraph/{parts[2]}"
    if parts[0] == "aotautograd" and len(parts) == 3:  # aotautograd/<key>/<content>
        return f"aotautograd/{parts[1]}"
    return path
