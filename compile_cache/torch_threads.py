"""Threads that call torch must end before Python does.

Until Python 3.13, an exiting interpreter ends each daemon thread where it next takes the GIL. Inside torch's C++ code,
that aborts the process: https://github.com/pytorch/pytorch/issues/38228.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable

log = logging.getLogger("compile_cache")

_LONGEST_WAIT_S = 2.0


def end_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """At the exit, call `stop`, and wait until `thread` has ended, for 2 s at most. Does nothing in a fork, which has
    no such thread."""

    def end() -> None:
        if not thread.is_alive():
            return
        stop()
        thread.join(_LONGEST_WAIT_S)
        if thread.is_alive():
            log.info(
                "exit.thread_left name=%s The process may abort, because this thread may be in torch.", thread.name
            )

    atexit.register(end)
