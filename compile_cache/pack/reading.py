"""Reading from a store in parallel, on threads that cost an exit nothing."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.store.base import ObjectStore

_T = TypeVar("_T")

THREADS = 8
# With eight threads a few tens of MB are in memory at once.
READ_BYTES = 4 << 20


_ATTEMPTS = 3


class Abandoned(StoreError):
    """The caller's time was up; nothing is wrong with what was being read."""


class ObjectReader:
    """An object's bytes from `start` to `end`, one after the other, in requests of at most 4 MiB.

    `beginning` are the object's first bytes, where they have been read already.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        start: int,
        end: int,
        beginning: bytes = b"",
        abandoned: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._name = name
        self._position = start
        self._end = end
        self._abandoned = abandoned
        self._buffer = memoryview(beginning)[start:end]
        self.requested_bytes = 0

    def read(self, size_bytes: int, /) -> bytes:
        """The next `size_bytes`; fewer at the end.

        Raises:
            StoreError: they cannot be had. `Abandoned`: they are no longer wanted.
        """
        parts = []
        while size_bytes:
            if not self._buffer and not self._fill():
                break
            part, self._buffer = self._buffer[:size_bytes], self._buffer[size_bytes:]
            self._position += len(part)
            size_bytes -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _fill(self) -> bool:
        wanted = min(READ_BYTES, self._end - self._position)
        if wanted <= 0:
            return False
        data = read_exactly(self._store, self._name, self._position, wanted, self._abandoned)
        self.requested_bytes += len(data)
        self._buffer = memoryview(data)
        return True


def read_exactly(
    store: ObjectStore, name: str, start: int, size_bytes: int, abandoned: threading.Event | None = None
) -> bytes:
    """Bytes of an object that was listed as long enough to have them. A read that breaks off is tried again: a client
    of S3 does so only until the answer has begun.

    Raises:
        StoreUnavailable: the store does not answer, or has fewer bytes. That is no fault of the pack's.
        StoreError: they cannot be read. `Abandoned`: they are no longer wanted.
    """
    data = b""
    for attempt in range(_ATTEMPTS):
        if abandoned is not None and abandoned.is_set():
            raise Abandoned(f"{name} was not read: the time was up")
        try:
            data = store.read(name, start, size_bytes)
        except StoreUnavailable:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        if len(data) >= size_bytes:
            return data[:size_bytes]
    raise StoreUnavailable(f"cannot get {name}: of {size_bytes} bytes from {start} on, {len(data)} were sent")


def in_daemon_threads(work: Callable[[_T], None], items: Iterable[_T]) -> None:
    """Do `work` for all, a few at a time. After an exception nothing more is begun, and the first is raised when all
    that was begun has ended.

    Not in a ThreadPoolExecutor, whose threads the interpreter joins before it runs exit hooks: a read that hangs would
    cost the hook its time.
    """
    waiting = deque(items)
    failures: list[BaseException] = []

    def drain() -> None:
        while not failures:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                work(item)
            except BaseException as error:  # raised below, on the thread that asked
                failures.append(error)

    # The asking thread does its share, and all of it where no thread can be started any more: at exit.
    threads = [
        threading.Thread(target=drain, name="compile-cache-read", daemon=True)
        for _ in range(min(THREADS, len(waiting)) - 1)
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
