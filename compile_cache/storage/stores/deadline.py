"""The time limit for calls to a remote store.

A socket's timeout starts again with each byte, so a store that sends one byte a second never reaches it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from compile_cache.errors import StoreUnavailable

_T = TypeVar("_T")

# With a restore's largest read (4 MiB), this is less than a restore's own limit. So a slow pack costs only itself.
_BASE_S = 30.0
# 2 Mbit/s. Over a slower link, compiling takes less time than restoring.
_LOWEST_BYTES_PER_S = 256 << 10
# An unknown size counts as this many bytes: a restore's largest read, or the index of 30,000 objects.
_UNKNOWN_BYTES = 4 << 20

# An abandoned call keeps a thread and a connection until the store ends it. A process has no more of them than this.
_running = threading.BoundedSemaphore(32)


def limit_s(size_bytes: int | None) -> float:
    """The seconds for a call that transfers at most `size_bytes`, with all its attempts."""
    return _BASE_S + (_UNKNOWN_BYTES if size_bytes is None else size_bytes) / _LOWEST_BYTES_PER_S


def within_limit(what: str, size_bytes: int | None, work: Callable[[], _T]) -> _T:
    """The result of `work`, which runs on a daemon thread. When the time is up, that thread is abandoned, because no
    client lets another thread close its connection.

    Raises:
        StoreUnavailable: the call took longer than `limit_s(size_bytes)`, or too many abandoned calls still run.
    """
    overdue = StoreUnavailable(
        f"cannot {what}: not done within {limit_s(size_bytes):.0f} s; the store or the network is too slow"
    )
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised below, on the calling thread
            done.set_exception(error)
        finally:
            _running.release()

    if not _running.acquire(timeout=limit_s(size_bytes)):
        raise overdue
    thread = threading.Thread(target=run, name="compile-cache-store", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # an exiting interpreter starts no threads; the exit has its own budget
        _running.release()
        return work()
    thread.join(limit_s(size_bytes))
    if thread.is_alive():
        raise overdue
    return done.result()
