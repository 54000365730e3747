"""Reading in parallel: the bytes that were asked for, each once, and threads that end with their first failure."""

from __future__ import annotations

import threading
from random import Random
from unittest import mock

import pytest
import zstandard
from hostile_packs import OneObject, digest
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.storage.pack.format import READ_BYTES, unpack
from compile_cache.storage.pack.manifest import PackFile
from compile_cache.storage.stores.transfer import THREADS, in_daemon_threads, open_part

CONTENT = bytes(range(100))


class Generous(OneObject):
    """Gives the object to its end, whatever it is asked for."""

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        super().read(name, start, size_bytes)
        return self.content[start:]


# open_part.


@given(st.data(), st.sampled_from([OneObject, Generous]))
def test_a_part_is_read_to_its_end_and_nothing_twice(data, kind):
    start, end = sorted(data.draw(st.tuples(st.integers(0, 100), st.integers(0, 100))))
    store = kind(CONTENT)
    request_bytes = data.draw(st.integers(1, 60))
    part = open_part(store, "name", start, end, request_bytes)
    pieces = []
    while piece := part.read(data.draw(st.integers(1, 60))):
        pieces.append(piece)
    assert b"".join(pieces) == CONTENT[start:end]
    asked = [position for first, size in store.requests for position in range(first, first + size)]
    assert asked == list(range(start, end))


def test_a_run_is_read_in_requests_of_at_most_4_mib():
    content = Random(0).randbytes(READ_BYTES)
    store = OneObject(zstandard.compress(content))
    file = PackFile("path", "key", READ_BYTES, digest(content))
    unpack(open_part(store, "name", 0, len(store.content)), [file], None)
    assert store.requests == [(0, READ_BYTES), (READ_BYTES, len(store.content) - READ_BYTES)]


def test_an_object_that_ends_before_it_should_is_the_stores_failure():
    """And not the pack's, which would be remembered as refused."""
    with pytest.raises(StoreUnavailable, match="sent 10 of 110 bytes from 90 on"):
        open_part(OneObject(CONTENT), "name", 90, 200).read(READ_BYTES)


# in_daemon_threads.


@pytest.mark.parametrize("count", [0, 1, THREADS - 1, THREADS, THREADS + 1, 1000])
def test_all_work_is_done_once(count):
    done = []
    in_daemon_threads(done.append, iter(range(count)))
    assert sorted(done) == list(range(count))


def test_work_is_done_at_once_by_threads_that_an_exit_does_not_wait_for():
    together = threading.Barrier(THREADS, timeout=60)
    workers = set()

    def work(_: int) -> None:
        together.wait()
        workers.add(threading.current_thread())

    in_daemon_threads(work, range(THREADS))
    assert len(workers) == THREADS
    assert all(worker.daemon for worker in workers - {threading.main_thread()})


def test_where_no_thread_can_be_started_the_work_is_done_all_the_same():
    """At exit the interpreter starts none any more."""
    done = []
    refusal = RuntimeError("can't start new thread at interpreter shutdown")
    with mock.patch("threading.Thread.start", side_effect=refusal):
        in_daemon_threads(done.append, range(20))
    assert done == list(range(20))


@pytest.mark.parametrize("error", [StoreError("not there"), ValueError("a bug"), SystemExit(3)], ids=repr)
def test_the_first_failure_is_raised_on_the_thread_that_asked(error):
    def work(item: int) -> None:
        if item == 5:
            raise error

    with pytest.raises(type(error)) as raised:
        in_daemon_threads(work, range(100))
    assert raised.value is error


def test_after_a_failure_nothing_more_is_begun_and_the_first_one_is_raised():
    together, first, failing = threading.Barrier(THREADS, timeout=60), threading.Lock(), threading.Event()
    failed: list[threading.Thread] = []
    begun = []

    def work(item: int) -> None:
        begun.append(item)
        if len(begun) <= THREADS:
            together.wait()
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and first.acquire(blocking=False):
            failed.append(threading.current_thread())
            failing.set()
            raise StoreError("the first one")
        failing.wait(60)
        failed[0].join(60)
        raise StoreError("a later one")

    with pytest.raises(StoreError, match="the first one"):
        in_daemon_threads(work, range(1000))
    assert len(begun) == THREADS


def test_what_was_begun_has_ended_when_a_failure_is_raised():
    together = threading.Barrier(2, timeout=60)
    ended = []

    def work(item: int) -> None:
        together.wait()
        if item == 0:
            raise StoreError("the first one")
        ended.append(item)

    with pytest.raises(StoreError, match="the first one"):
        in_daemon_threads(work, range(2))
    assert ended == [1]
