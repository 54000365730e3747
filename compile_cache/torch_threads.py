"""Threads that call torch must end before Python does.

Until Python 3.13, an exiting interpreter ends each daemon thread where it next takes the GIL. Inside torch's C++ code,
that aborts the process: https://github.com/pytorch/pytorch/issues/38228.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable

from compile_cache.errors import log

_LONGEST_WAIT_S = 2.0
_threads: list[tuple[threading.Thread, Callable[[], None]]] = []


def end_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """At the exit, call `stop`, and wait until `thread` has ended. All such threads together get 2 s."""
    _threads.append((thread, stop))


def _end_all() -> None:
    alive = [(thread, stop) for thread, stop in _threads if thread.is_alive()]  # none in a fork
    for _, stop in alive:
        stop()
    deadline = time.monotonic() + _LONGEST_WAIT_S
    for thread, _ in alive:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            log.info("exit.thread_left name=%s The process does not wait for it.", thread.name)
            _hold_ended_threads()


def _hold_ended_threads() -> None:
    """Let a thread that Python ends inside C++ code wait for the end of the process, as from Python 3.14 on. C++ would
    abort the process otherwise, and its exit code would be lost."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another library of C++: torch may not be here
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


# Exit hooks run last in, first out. A boot imports this module before READY, and the publisher registers its hook at
# READY. So the publisher has the first seconds of the exit.
atexit.register(_end_all)
