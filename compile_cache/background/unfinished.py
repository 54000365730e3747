"""The last line of a server that ends before all is compiled."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Callable

log = logging.getLogger("compile_cache")

# Where Cog 0.23 keeps its worker's own stderr. At the exit, the pipes that it has put in its place are gone.
_COGS_STDERR = 101


def say_unfinished_at_exit(waiting: Callable[[], int]) -> None:
    """Say at the exit how many kinds of calls are still `waiting` for their code, if there are any."""
    process = os.getpid()

    def say_unfinished() -> None:
        if os.getpid() == process and (count := waiting()):
            _say_last(
                f"background.unfinished calls={count} The process ends first; the next boot goes on. "
                "COMPILE_CACHE_COLD_START=block compiles before READY."
            )

    atexit.register(say_unfinished)


def _say_last(line: str) -> None:
    """Log a line at the exit; under Cog, write it to the server's own stderr."""
    if "coglet" not in sys.modules:
        log.warning(line)
        return
    with contextlib.suppress(OSError):  # another Cog has another file under this number, or none
        if os.path.samestat(os.fstat(_COGS_STDERR), os.stat(f"/proc/{os.getppid()}/fd/2")):
            os.write(_COGS_STDERR, f"{line}\n".encode())
