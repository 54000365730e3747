"""Writes files that appear whole or not at all, and what is no file as a stream."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# A killed process leaves its temporary file behind, under a hidden name.
TEMPORARY = ".tmp-"
_OPEN = "/proc/self/fd"


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `target` when the block ends. If the block raises, `target` stays unchanged.

    Raises:
        OSError: the folder cannot be made or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=target.parent, delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o644)
            yield file
            file.close()
            os.replace(file.name, target)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file.name)


def write_through(path: Path, content: bytes) -> None:
    """Write what a user has named. A file is replaced, and a link still leads to it. A device or a pipe gets the
    content and a line end. So does the file that stdout or stderr writes: to replace it would lose what they write.

    Raises:
        OSError: it cannot be written, or a pipe has no reader, or one that does not read.
    """
    streams = [n for n in (1, 2) if path.exists() and os.path.exists(f"{_OPEN}/{n}") and path.samefile(f"{_OPEN}/{n}")]
    if not streams and (path.is_file() or not path.exists()):
        with replacing(Path(os.path.realpath(path))) as file:
            file.write(content)
        return
    opened = os.dup(streams[0]) if streams else os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with os.fdopen(opened, "wb") as stream:
        with suppress(OSError):  # it is no pipe
            fcntl.fcntl(opened, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for all: the reader may be slow
        stream.write(content + b"\n")
