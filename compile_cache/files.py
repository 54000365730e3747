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
