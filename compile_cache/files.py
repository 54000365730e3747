"""Writes files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# A killed process leaves its temporary file behind, under a hidden name.
TEMPORARY = ".tmp-"


@contextmanager
def replacing(target: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `target` when the block ends. If the block raises, `target` stays unchanged.

    Raises:
        OSError: the folder cannot be made or written.
    """
    with temporary_beside(target) as file:
        yield file
        file.close()
        os.replace(file.name, target)


@contextmanager
def temporary_beside(target: Path) -> Iterator[IO[bytes]]:
    """A new file in the folder of `target`, readable by everyone. It is removed at the end, unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=TEMPORARY, dir=target.parent, delete=False) as file:
        try:
            os.fchmod(file.fileno(), 0o644)
            yield file
        finally:
            with suppress(FileNotFoundError):
                os.unlink(file.name)
