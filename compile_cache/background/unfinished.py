"""The last log line of a server that ends before everything is compiled."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable

log = logging.getLogger("compile_cache")

# Cog 0.23 keeps its worker's own stderr under this number. At the exit, the pipes that replaced stderr are gone.
_COGS_STDERR = 101


def say_unfinished_at_exit(waiting: Callable[[], int]) -> None:
    """At the exit, log how many kinds of calls still wait for their code, if any do."""
    process = os.getpid()

    def say_unfinished() -> None:
        if os.getpid() == process and (count := waiting()):
            _say_last(
                f"background.unfinished calls={count} The server ends before these calls are compiled; the next boot "
                "goes on. Set COMPILE_CACHE_COLD_START=block to compile before READY."
            )

    atexit.register(say_unfinished)


def _say_last(line: str) -> None:
    """Log a line at the exit. Under Cog, write it to the server's own stderr instead."""
    if "coglet" not in sys.modules:
        log.warning(line)
        return
    with contextlib.suppress(OSError):  # another version of Cog has another file under this number, or none
        if os.path.samestat(os.fstat(_COGS_STDERR), os.stat(f"/proc/{os.getppid()}/fd/2")):
            os.write(_COGS_STDERR, f"{line}\n".encode())
