"""Requests to a store: each within a time limit, repeated if they break off, several at a time.

All run on daemon threads, which do not delay exit.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from compile_cache.errors import StoreUnavailable
from compile_cache.storage.pack.format import READ_BYTES
from compile_cache.storage.stores.base import ReadableStore

_T = TypeVar("_T")

THREADS = 8

_ATTEMPTS = 3
# A read that failed more slowly is not repeated, because a restore's time is limited.
_LONGEST_REPEATED_S = 10.0

# With a restore's largest read (4 MiB), this is less than a restore's own limit. So a slow pack costs only itself.
_BASE_S = 30.0
# 2 Mbit/s. Over a slower link, compiling takes less time than restoring.
_LOWEST_BYTES_PER_S = 256 << 10

# An abandoned call keeps a thread and a connection until the store ends it. A process has no more of them than this.
_running = threading.BoundedSemaphore(32)


def limit_s(size_bytes: int) -> float:
    """The seconds for a call that transfers at most `size_bytes`, with all its attempts."""
    return _BASE_S + size_bytes / _LOWEST_BYTES_PER_S


def within_limit(what: str, size_bytes: int, work: Callable[[], _T]) -> _T:
    """The result of `work`, which runs on a daemon thread. When the time is up, that thread is abandoned, because no
    client lets another thread close its connection. A socket's own timeout starts again with each byte, so a store that
    sends one byte a second never reaches it.

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


def open_part(
    store: ReadableStore, name: str, start: int, end: int, request_bytes: int = READ_BYTES
) -> io.BufferedReader:
    """The bytes of an object from `start` to `end`, as a file. The object is at least that long by its listing."""
    return io.BufferedReader(_Part(store, name, start, end), request_bytes)


class _Part(io.RawIOBase):
    """A part of an object, whose every read is a request. A read that breaks off is repeated; boto3 repeats only until
    the answer begins."""

    def __init__(self, store: ReadableStore, name: str, start: int, end: int) -> None:
        self._store, self._name, self._start, self._end = store, name, start, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, or what is left of the part into it.

        Raises:
            StoreUnavailable: the store does not answer, or sends fewer bytes. The pack itself may be sound.
            StoreError: the object cannot be read.
        """
        view = memoryview(buffer)
        size_bytes = min(len(view), self._end - self._start)
        data = b""
        started = time.monotonic()
        for attempt in range(_ATTEMPTS if size_bytes else 0):
            try:
                data = self._store.read(self._name, self._start, size_bytes)
            except StoreUnavailable:
                if attempt == _ATTEMPTS - 1 or time.monotonic() - started > _LONGEST_REPEATED_S:
                    raise
                continue
            if len(data) >= size_bytes:
                break
        if len(data) < size_bytes:
            sent = f"the store sent {len(data)} of {size_bytes} bytes from {self._start} on"
            raise StoreUnavailable(f"cannot get {self._name}: {sent}")
        view[:size_bytes] = data[:size_bytes]
        self._start += size_bytes
        return size_bytes


def in_daemon_threads(work: Callable[[_T], None], items: Iterable[_T]) -> None:
    """Do `work` for all items, a few at a time. After an exception no further work begins. The first exception is
    raised once the running work has ended.

    A ThreadPoolExecutor cannot do this: the interpreter joins its threads before it runs exit hooks, so a hanging read
    would use up the hook's time.
    """
    items = list(items)
    waiting = iter(items)
    failures: list[BaseException] = []

    def drain() -> None:
        for item in waiting:  # which each thread takes from
            if failures:
                break
            try:
                work(item)
            except BaseException as error:  # raised below, on the calling thread
                failures.append(error)

    # The calling thread does its share. At exit, when no thread can be started, it does all the work.
    threads = [
        threading.Thread(target=drain, name="compile-cache-read", daemon=True)
        for _ in range(min(THREADS, len(items)) - 1)
    ]
    with contextlib.suppress(RuntimeError):
        for thread in threads:
            thread.start()
    drain()
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if failures:
        raise failures[0]
