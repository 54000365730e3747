"""How long a call to a remote store may take.

A socket's timeout begins anew with each byte: a store that sends one byte a second never reaches it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from compile_cache.errors import StoreUnavailable

_T = TypeVar("_T")

# With the largest read of a restore (4 MiB), less than a restore's own limit: a pack that drips costs only itself.
_BASE_S = 30.0
# 2 Mbit/s: over a slower link, compiling takes less time than restoring.
_LOWEST_BYTES_PER_S = 256 << 10
# What an unknown size counts as: the largest read of a restore, or the index of 30,000 objects.
_UNKNOWN_BYTES = 4 << 20


class _Overdue(BaseException):
    """Ends a thread whose call nobody waits for any more."""


def limit_s(size_bytes: int | None) -> float:
    """The time for a call that transfers at most `size_bytes`, attempts included."""
    return _BASE_S + (_UNKNOWN_BYTES if size_bytes is None else size_bytes) / _LOWEST_BYTES_PER_S


def within_limit(what: str, size_bytes: int | None, work: Callable[[], _T]) -> _T:
    """What `work` returns. It runs on a daemon thread, so that its caller can stop waiting.

    Raises:
        StoreUnavailable: the call was not done within `limit_s(size_bytes)`.
    """
    done: Future[_T] = Future()

    def run() -> None:
        with suppress(_Overdue):
            try:
                done.set_result(work())
            except BaseException as error:  # raised below, on the thread that asked
                done.set_exception(error)

    thread = threading.Thread(target=run, name="compile-cache-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter exits and starts no more threads; an exit has a budget of its own
        return work()
    thread.join(limit_s(size_bytes))
    if thread.is_alive():
        _end(thread)
        raise StoreUnavailable(
            f"cannot {what}: not done within {limit_s(size_bytes):.0f} s; the store or the network is too slow"
        )
    return done.result()


def _end(thread: threading.Thread) -> None:
    """Raise `_Overdue` in a thread. It closes its connection: no client lets another thread do that.

    The exception is raised once the thread's current wait for the network ends, within the socket's timeout.
    """
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Overdue))
