"""Leases: one has it, the others wait, and what goes wrong costs only time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.store.base import ObjectStore
from compile_cache.store.local import LocalStore
from compile_cache.store.opening import open_url
from compile_cache.versions import lease as lease_module
from compile_cache.versions.lease import Lease

NAME = "v1/environment/model/version/compile.lease"
SHORT_S = 0.2
LONG_S = 60.0

ACQUIRE_AND_DIE = f"""
import os, signal, sys
from compile_cache.versions.lease import Lease
from compile_cache.store.opening import open_url
assert Lease(open_url(sys.argv[1], sys.argv[2] or None), {NAME!r}, float(sys.argv[3])).acquire()
os.kill(os.getpid(), signal.SIGKILL)
"""
ACQUIRE_AT_EXIT = f"""
import atexit, sys, threading
from compile_cache.versions.lease import Lease
from compile_cache.store.opening import open_url
lease = Lease(open_url(sys.argv[1], sys.argv[2] or None), {NAME!r})
closing = threading.Event()
def hold():
    closing.wait()
    assert lease.acquire() and lease.is_held
    print("held")
    if sys.argv[3] == "release":
        lease.release()
thread = threading.Thread(target=hold, daemon=True)
thread.start()
def flush():
    closing.set()
    thread.join(60)
atexit.register(flush)
"""


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path) -> tuple[str, str]:
    """A store's URL and its endpoint."""
    if request.param == "local":
        return str(tmp_path / "store"), ""
    bucket = request.getfixturevalue("s3_bucket")
    return f"s3://{bucket.name}/prefix", bucket.endpoint_url


@pytest.fixture
def store(place) -> ObjectStore:
    url, endpoint_url = place
    return open_url(url, endpoint_url or None)


@pytest.fixture
def make_lease() -> Iterator[Callable[..., Lease]]:
    """Leases that are released when the test is over."""
    made = []

    def make(store: ObjectStore, expiry_s: float = LONG_S) -> Lease:
        made.append(Lease(store, NAME, expiry_s))
        return made[-1]

    yield make
    for lease in made:
        lease.release()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def names(store: ObjectStore) -> list[str]:
    return [entry.name for entry in store.list("v1/")]


# One has it


def test_what_nobody_has_is_acquired(store, make_lease):
    lease = make_lease(store)
    assert not lease.is_held
    assert lease.acquire()
    assert lease.is_held
    assert names(store) == [NAME]


def test_one_of_eight_has_it(store, make_lease):
    leases = [make_lease(store) for _ in range(8)]
    barrier = threading.Barrier(8)

    def acquire(lease: Lease) -> bool:
        barrier.wait()
        return lease.acquire()

    with ThreadPoolExecutor(8) as threads:
        acquired = list(threads.map(acquire, leases))
    assert acquired.count(True) == 1
    assert [lease.is_held for lease in leases] == acquired


def test_who_has_it_acquires_it_again_without_asking(store, make_lease):
    lease = make_lease(store)
    lease.acquire()
    before = store.read(NAME)
    assert lease.acquire()
    assert store.read(NAME) == before


def test_what_is_released_is_the_next_ones_at_once(store, make_lease):
    first, second = make_lease(store), make_lease(store)
    assert (first.acquire(), second.acquire()) == (True, False)
    first.release()
    assert not first.is_held
    assert names(store) == []
    assert second.acquire()
    assert not first.acquire()


def test_what_is_not_held_is_released_without_a_word(store, make_lease):
    holder, other = make_lease(store), make_lease(store)
    holder.acquire()
    other.release()
    other.acquire()
    other.release()
    assert names(store) == [NAME]
    assert holder.is_held


def test_leases_of_other_names_do_not_count(store, make_lease):
    make_lease(store).acquire()
    other = Lease(store, NAME + ".2", LONG_S)
    assert other.acquire()
    other.release()


# Until when


def test_a_holder_that_was_killed_costs_the_expiry_and_no_more(place, store, make_lease):
    command = [sys.executable, "-c", ACQUIRE_AND_DIE, *place, str(SHORT_S)]
    died = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    lease = make_lease(store)
    assert not lease.acquire()  # seen for the first time
    time.sleep(1.5 * SHORT_S)
    assert lease.acquire()


def test_a_living_holder_keeps_it_beyond_the_expiry(store, make_lease):
    holder, other = make_lease(store, 1.0), make_lease(store)
    holder.acquire()
    contents = set()
    while len(contents) < 5:  # written five times, a third of the expiry apart
        assert not other.acquire()
        contents.add(store.read(NAME))
        time.sleep(0.02)
    assert holder.is_held


def test_a_dead_holder_is_told_from_one_that_came_back_with_the_same_lease(local, make_lease):
    """Its content is never the same twice: seen before and after, it would look unchanged all the time."""
    lease = make_lease(local)
    contents = set()
    for _ in range(3):
        lease.acquire()
        contents.add(local.read(NAME))
        lease.release()
    assert len(contents) == 3


HOSTILE = [
    b'{"holder": "x", "expiry_s": 1e9}',
    b'{"holder": "x", "expiry_s": 1e999}',
    b'{"holder": "x", "expiry_s": Infinity}',
    b'{"holder": "x", "expiry_s": NaN}',
    b'{"holder": "x", "expiry_s": -1}',
    b'{"holder": "x", "expiry_s": "1e9"}',
    b'{"holder": "x", "expiry_s": 1' + b"0" * 400 + b"}",
]
UNREADABLE = [
    b"",
    b"\xff\xfe",
    b"{",
    b"[]",
    b"null",
    b"7",
    b'{"holder": "x"}',
    b'{"expiry_s": null, "holder": []}',
    b'{"expiry_s": "soon"}',
    b'{"expiry_s": {}}',
    b"[" * 4000,
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_no_lease_lasts_longer_unrenewed_than_the_longest_expiry(local, make_lease, monkeypatch, content):
    monkeypatch.setattr(lease_module, "_LONGEST_EXPIRY_S", 0.05)
    local.put(NAME, content)
    lease = make_lease(local, 0.05)
    assert not lease.acquire()
    time.sleep(0.1)
    assert lease.acquire()


def test_the_longest_expiry_is_minutes():
    assert lease_module.EXPIRY_S < lease_module._LONGEST_EXPIRY_S <= 300


@pytest.mark.parametrize("content", UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_lease_that_nobody_can_read_expires_as_ones_own_would(local, make_lease, content):
    local.put(NAME, content)
    patient, impatient = make_lease(local), make_lease(local, 0.05)
    assert not patient.acquire()
    assert not impatient.acquire()
    time.sleep(0.1)
    assert not patient.acquire()
    assert impatient.acquire()


def test_no_more_of_a_lease_is_read_than_a_lease_has(local, make_lease):
    local.put(NAME, b"[" * (16 << 20))
    lease = make_lease(local)
    tracemalloc.start()
    try:
        assert not lease.acquire()
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20


# Losing it


@pytest.mark.parametrize("loss", ["taken", "deleted"])
def test_losing_it_is_noticed(store, make_lease, loss):
    lease = make_lease(store, SHORT_S)
    lease.acquire()
    if loss == "taken":
        overwrite(store, lease)
    else:
        delete(store, lease)
    wait_until(lambda: not lease.is_held)


def test_what_was_lost_is_not_released_from_under_its_new_holder(store, make_lease):
    lease = make_lease(store, SHORT_S)
    lease.acquire()
    overwrite(store, lease)
    wait_until(lambda: not lease.is_held)
    lease.release()
    assert store.read(NAME) == b'{"holder": "another", "expiry_s": 60}'


def test_what_was_lost_can_be_acquired_again(store, make_lease):
    lease = make_lease(store, SHORT_S)
    lease.acquire()
    delete(store, lease)
    wait_until(lambda: not lease.is_held)
    assert lease.acquire()
    assert lease.is_held


def overwrite(store: ObjectStore, lease: Lease) -> None:
    """Until it is noticed: a renewal under way wins once."""
    store.put(NAME, b'{"holder": "another", "expiry_s": 60}')
    while lease.is_held:
        if lease._is_ours():
            store.put(NAME, b'{"holder": "another", "expiry_s": 60}')
        time.sleep(0.01)


def delete(store: ObjectStore, lease: Lease) -> None:
    while lease.is_held:
        store.delete(NAME)
        time.sleep(0.01)


def test_two_holders_where_the_store_heeds_no_condition_are_soon_one(local, make_lease):
    """As rclone's and s3rver's servers: whoever puts last is told that it was the first."""

    class Unconditional(LocalStore):
        is_reached, may_go_on = threading.Event(), threading.Event()

        def put_if_absent(self, name: str, content: bytes) -> bool:
            self.is_reached.set()
            self.may_go_on.wait(60)
            self.put(name, content)
            return True

    store = Unconditional(Path(local.location))
    first, last = make_lease(local, 1.5), make_lease(store, 1.5)
    with ThreadPoolExecutor(1) as thread:
        acquiring = thread.submit(last.acquire)
        store.is_reached.wait(60)
        assert first.acquire()
        store.may_go_on.set()
        assert acquiring.result()
    wait_until(lambda: [first.is_held, last.is_held] == [False, True])


def test_what_was_stored_is_held_although_the_answer_was_lost(local, make_lease):
    """A PUT that is tried again then fails on the object that it stored itself."""

    class Forgetful(LocalStore):
        def put_if_absent(self, name: str, content: bytes) -> bool:
            super().put_if_absent(name, content)
            return False

    assert make_lease(Forgetful(Path(local.location))).acquire()


# When the store fails


class Halting(LocalStore):
    """A store whose renewals wait until they may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_reached, self.may_go_on = threading.Event(), threading.Event()

    def put(self, name: str, content: Path | bytes) -> None:
        self.is_reached.set()
        self.may_go_on.wait(60)
        super().put(name, content)


def test_a_renewal_under_way_does_not_bring_back_what_is_released(tmp_path):
    store = Halting(tmp_path)
    lease = Lease(store, NAME, 1.0)
    lease.acquire()
    store.is_reached.wait(60)
    releasing = threading.Thread(target=lease.release)
    releasing.start()
    releasing.join(0.1)
    store.may_go_on.set()
    releasing.join(60)
    assert names(store) == []


def test_a_release_does_not_wait_for_a_renewal_that_hangs(tmp_path):
    """The next one then waits for the expiry."""
    store = Halting(tmp_path)
    lease = Lease(store, NAME, SHORT_S)
    lease.acquire()
    store.is_reached.wait(60)
    lease.release()
    assert not lease.is_held
    assert names(store) == [NAME]
    store.may_go_on.set()


def test_a_store_that_fails_is_a_store_error_of_acquiring(tmp_path):
    (tmp_path / "file").write_text("in the way")
    lease = Lease(LocalStore(tmp_path / "file"), NAME)
    with pytest.raises(StoreError):
        lease.acquire()
    assert not lease.is_held


def test_a_renewal_that_fails_is_made_up_for_by_the_next(tmp_path, make_lease):
    class Failing(LocalStore):
        puts = 0

        def put(self, name: str, content: Path | bytes) -> None:
            self.puts += 1
            if self.puts == 1:
                raise StoreUnavailable("not now")
            super().put(name, content)

    store = Failing(tmp_path)
    lease = make_lease(store, SHORT_S)
    lease.acquire()
    before = store.read(NAME)
    wait_until(lambda: store.read(NAME) != before)
    assert lease.is_held


def test_a_release_that_fails_raises_nothing(tmp_path):
    class Undeletable(LocalStore):
        def delete(self, name: str) -> None:
            raise StoreUnavailable("not now")

    lease = Lease(Undeletable(tmp_path), NAME)
    lease.acquire()
    lease.release()
    assert not lease.is_held


# While the interpreter exits


@pytest.mark.parametrize(("ending", "left"), [("release", []), ("keep", [NAME])])
def test_it_is_acquired_while_the_interpreter_exits(place, store, ending, left):
    """Python 3.12 and later start no thread then, and it is not renewed."""
    done = subprocess.run(
        [sys.executable, "-c", ACQUIRE_AT_EXIT, *place, ending], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "held\n", "")
    assert names(store) == left
