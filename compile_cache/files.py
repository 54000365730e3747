"""Writes files: whole or not at all, or through a link or a device; and blanks what no other machine may read."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# A killed process leaves its temporary file behind, under a hidden name.
TEMPORARY = ".tmp-"
# What torch pickles beside a graph, for people: the head of a program that repeats its compile, with each variable
# whose name has TORCH, DYNAMO, INDUCTOR or TRITON in it (`generate_env_vars_string`); and lines with Inductor's options
# (`debug_lines`), some of which come from variables. pickle writes a line's length before it, in one byte or in four.
_PROGRAM_HEAD = re.compile(rb"\nimport os\nos\.environ.*?\nisolate_fails_code_str", re.DOTALL)
_OPTION = re.compile(rb"\[(?:(?<=\x8c(.)\[)|(?<=X(....)\[))[a-z2-7]{50,}\] \w", re.DOTALL)
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


def blank_values(content: bytes) -> bytes:
    """Pickled graphs with spaces in place of torch's texts for people, which no lookup and no code reads: they have the
    values of variables, and one may be a secret. No length changes."""
    content = _PROGRAM_HEAD.sub(lambda found: b" " * len(found[0]), content)
    blanked = bytearray(content)
    for found in _OPTION.finditer(content):
        length = int.from_bytes(found[1] or found[2], "little")
        blanked[found.start() : found.start() + length] = b" " * length
    return bytes(blanked)


def blank_file(path: Path) -> None:
    """Blank a file's values. A missing file is no error.

    Raises:
        OSError: the file cannot be read, or its folder cannot be written.
    """
    with suppress(FileNotFoundError):
        content = path.read_bytes()
        if (blanked := blank_values(content)) != content:
            with replacing(path) as file:
                file.write(blanked)


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
    import fcntl

    opened = os.dup(streams[0]) if streams else os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    with os.fdopen(opened, "wb") as stream:
        with suppress(OSError):  # it is no pipe
            fcntl.fcntl(opened, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for all: the reader may be slow
        stream.write(content + b"\n")
