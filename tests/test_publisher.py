"""The publisher: what is new reaches the store at READY, later, and at the latest while the process ends."""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from machines import write_files
from marked_processes import wait_for
from programs import run_program

from compile_cache.errors import StoreUnavailable
from compile_cache.inductor.counters import CompileCounts
from compile_cache.key.cache_key import CacheKey
from compile_cache.lifecycle.boot_report import BootReport, PublishReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.publish import CompileCache
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, Stores
from compile_cache.storage.stores.local import LocalStore

FILES = {"fxgraph/ab/fabc/one": b"a graph", "kernel.so": b"a kernel"}
PATIENCE_S = 60


class FailingStore(LocalStore):
    """Fails its first puts, then works."""

    def __init__(self, root: Path, failures: int) -> None:
        super().__init__(root)
        self.failures = failures

    def put(self, name: str, content: Path | bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("the store does not answer")
        super().put(name, content)


class HangingStore(LocalStore):
    """Hangs in every put until it is released."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached, self.released = threading.Event(), threading.Event()

    def put(self, name: str, content: Path | bytes) -> None:
        self.reached.set()
        self.released.wait()
        super().put(name, content)


@dataclass
class Compiled:
    """A compiler that is done."""

    withheld: Collection[str] = ()
    unread: Collection[str] = ()
    is_compiling: bool = False
    arrived: int = 0

    def unread_files(self) -> Collection[str]:
        return self.unread


@dataclass(frozen=True)
class Started:
    """A publisher at work, and what it reports."""

    publisher: Publisher
    cache: CompileCache
    directory: CacheDirectory
    report: PublishReport
    written: Path  # the report of the whole boot, after each attempt

    def write(self, files: dict[str, bytes]) -> None:
        write_files(self.directory.path, files)


@pytest.fixture
def start(tmp_path, key, environment, monkeypatch) -> Iterator[Callable[..., Started]]:
    """Starts a publisher over the store given, with FILES in its directory; it is stopped after the test."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._POLL_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._SPREAD_S", 0.0)
    started = []

    def make(store: ObjectStore, files=FILES, compiler=None, exit_budget_s=60.0, begin=True) -> Started:
        directory = CacheDirectory.claim(tmp_path / "cache")
        cache = CompileCache(Stores(store, store), key, environment, directory, Rules())
        report, written = BootReport(), tmp_path / "report.json"
        settings = Settings(exit_budget_s=exit_budget_s, report=str(written))
        publisher = Publisher(cache, report, settings, compiler or Compiled())
        started.append(Started(publisher, cache, directory, report.publish, written))
        started[-1].write(files)
        if begin:
            publisher.start()
            publisher.wait(exit_budget_s)
        return started[-1]

    yield make
    for one in started:
        atexit.unregister(one.publisher.flush)
        one.publisher._closing.set()


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


@pytest.fixture
def hanging(tmp_path) -> Iterator[HangingStore]:
    store = HangingStore(tmp_path / "store")
    yield store
    store.released.set()


@pytest.fixture
def counts(monkeypatch) -> CompileCounts:
    """What the publisher is told of torch's counters; more graphs there mean that something was compiled."""
    told = CompileCounts()
    monkeypatch.setattr("compile_cache.lifecycle.publisher.read_counts", lambda: CompileCounts(told.graphs))
    return told


def restored(store: ObjectStore, folder: Path, of: Started) -> dict[str, bytes]:
    """What the next boot finds in the store."""
    directory = CacheDirectory.claim(folder / "next")
    cache = CompileCache(Stores(store, store), of.cache.key, of.cache.environment, directory, Rules())
    cache.install(cache.fetch())
    return {path: (directory.path / path).read_bytes() for path in directory.scan()}


def test_everything_is_published_at_the_start_and_the_report_tells_it(store, tmp_path, start):
    started = start(store)
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == FILES
    (entry,) = started.cache.packs.list()
    assert (started.report.packs, started.report.files, started.report.stored_bytes) == (1, 2, entry.size_bytes)
    assert started.report.failures == []


def test_the_report_is_written_after_each_attempt(tmp_path, start):
    store = FailingStore(tmp_path / "store", failures=1)
    started = start(store)
    assert published(started) == (0, ["the store does not answer"])
    started.publisher.flush()
    assert published(started) == (1, ["the store does not answer"])


def published(started: Started) -> tuple[int, list[str]]:
    record = json.loads(started.written.read_text())["publish"]
    return record["packs"], record["failures"]


def test_a_report_that_cannot_be_written_costs_nothing_else(store, tmp_path, start):
    started = start(store, begin=False)
    started.written.mkdir()
    started.publisher.start()
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == FILES


def test_a_published_pack_takes_no_more_room_on_the_disk(tmp_path, start):
    start(LocalStore(tmp_path / "store"))
    assert list((tmp_path / "cache" / "0.outbox").iterdir()) == []


def test_with_nothing_new_there_is_nothing_to_wait_for(tmp_path, start):
    started = start(LocalStore(tmp_path / "store"), files={})
    assert started.publisher.wait(PATIENCE_S)
    assert not (tmp_path / "store").exists()


class Arriving(Compiled):
    """While the publisher stages, an artifact arrives that must not be published yet."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self._looks = 0

    @property
    def withheld(self) -> Collection[str]:
        self._looks += 1
        if self._looks == 1:
            self._arrive()
            return ()
        return ("late.aot",)


def test_what_arrives_while_the_publisher_stages_is_not_published_unless_it_may_be(store, tmp_path, start):
    compiler = Arriving(lambda: started.write({"late.aot": b"not compared"}))
    started = start(store, compiler=compiler, begin=False)
    started.publisher.start()
    started.publisher.wait(PATIENCE_S)
    started.publisher.flush()
    assert restored(store, tmp_path, started).keys() == FILES.keys()


def test_withheld_files_are_counted_and_never_published(store, tmp_path, start):
    started = start(store, compiler=Compiled({"kernel.so"}))
    started.publisher.flush()
    assert started.report.withheld_files == 1
    assert restored(store, tmp_path, started).keys() == FILES.keys() - {"kernel.so"}


@pytest.mark.usefixtures("counts")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_file_that_is_no_longer_withheld_is_published(store, tmp_path, start, is_stopped):
    compiler = Compiled({"kernel.so"})
    started = start(store, compiler=compiler)
    compiler.withheld = ()
    if is_stopped:
        started.publisher.flush()
    else:
        wait_for(lambda: started.report.packs == 2)
    assert restored(store, tmp_path, started) == FILES


@pytest.mark.usefixtures("counts")
def test_a_record_of_the_second_process_is_published_although_this_process_has_compiled_nothing(store, tmp_path, start):
    started = start(store, compiler=(compiler := Compiled()))
    assert started.publisher.wait(PATIENCE_S)
    started.write({"graphs.cached": b"{}"})
    compiler.arrived += 1
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == {**FILES, "graphs.cached": b"{}"}


# What is compiled later.


def test_what_is_compiled_later_is_published_when_compiling_is_quiet(store, tmp_path, start, counts, monkeypatch):
    monkeypatch.setattr("compile_cache.lifecycle.publisher._QUIET_S", 0.01)
    started = start(store)
    started.write({"later.so": b"later"})
    counts.graphs += 1
    wait_for(lambda: started.report.packs == 2)
    assert restored(store, tmp_path, started) == {**FILES, "later.so": b"later"}


@pytest.mark.parametrize("slow", ["_QUIET_S", "_POLL_S"])
def test_what_is_compiled_last_is_staged_soon_and_published_at_the_exit(
    store, tmp_path, start, counts, monkeypatch, slow
):
    monkeypatch.setattr(f"compile_cache.lifecycle.publisher.{slow}", PATIENCE_S)
    started = start(store)
    started.write({"later.so": b"later"})
    counts.graphs += 1
    if slow == "_QUIET_S":
        wait_for(lambda: list((tmp_path / "cache" / "0.outbox").glob("*.pack")))
        assert started.report.packs == 1
    started.publisher.flush()
    assert restored(store, tmp_path, started) == {**FILES, "later.so": b"later"}


# Faults.


def test_a_store_that_fails_is_reported_and_nobody_waits_for_it(tmp_path, start):
    store = FailingStore(tmp_path / "store", failures=1)
    started = start(store)
    before = time.monotonic()
    assert not started.publisher.wait(PATIENCE_S)
    assert time.monotonic() - before < PATIENCE_S / 2
    assert started.report.failures == ["the store does not answer"]
    assert started.report.packs == 0


def test_a_store_that_failed_is_tried_again(tmp_path, start, monkeypatch):
    monkeypatch.setattr("compile_cache.lifecycle.publisher._RETRY_S", 0.01)
    store = FailingStore(tmp_path / "store", failures=3)
    started = start(store)
    wait_for(lambda: started.report.packs == 1)
    assert len(started.report.failures) == 1, "the same failure is one line, however often it happens"
    assert restored(store, tmp_path, started) == FILES


def test_what_a_store_refused_is_published_at_the_exit(tmp_path, start):
    store = FailingStore(tmp_path / "store", failures=1)
    started = start(store)
    started.publisher.flush()
    assert restored(store, tmp_path, started) == FILES


def test_a_store_that_fails_at_the_exit_too_is_reported_once(tmp_path, start):
    store = FailingStore(tmp_path / "store", failures=2)
    started = start(store)
    started.publisher.flush()
    assert store.failures == 0, "it was tried at the exit as well"
    assert len(started.report.failures) == 1


def test_a_staging_that_failed_is_tried_again_at_the_exit(store, tmp_path, start):
    """As on a disk that was full for a while; here, a file is in the way of the outbox."""
    started = start(store, begin=False)
    outbox = tmp_path / "cache" / "0.outbox"
    outbox.rmdir()
    outbox.write_text("in the way")
    started.publisher.start()
    started.publisher.wait(PATIENCE_S)
    assert len(started.report.failures) == 1
    outbox.unlink()
    started.publisher.flush()
    assert restored(store, tmp_path, started) == FILES


def test_waiting_for_a_store_that_hangs_ends_in_false(start, hanging):
    started = start(hanging, exit_budget_s=0.2)
    assert hanging.reached.wait(PATIENCE_S)
    assert not started.publisher.wait(0)


def test_flushing_a_store_that_hangs_ends_within_the_budget_and_says_what_is_lost(start, hanging, caplog):
    started = start(hanging, exit_budget_s=0.2)
    assert hanging.reached.wait(PATIENCE_S)
    before = time.monotonic()
    started.publisher.flush()
    assert time.monotonic() - before < 10
    assert started.report.packs == 0
    started.publisher.flush()
    (line,) = [record.message for record in caplog.records if "publish.failed" in record.message]
    assert "COMPILE_CACHE_EXIT_BUDGET_S=0.2" in line
    assert line.endswith("lost a pack of 2 files")
    assert json.loads(started.written.read_text())["publish"]["failures"] == started.report.failures != []


def test_a_staging_that_does_not_end_in_time_is_said_to_be_lost(store, start, monkeypatch, hanging):
    started = start(store, exit_budget_s=0.2, begin=False)
    monkeypatch.setattr(started.cache, "stage", lambda *_: hanging.put("", b"") or ())
    started.publisher.start()
    assert hanging.reached.wait(PATIENCE_S)
    started.publisher.flush()
    assert "not packed yet" in started.report.failures[0]


@pytest.mark.parametrize("more", [{"KERNEL.so": b""}, {"a\nb/kernel.so": b""}, {"kernel.so/x": b""}], ids=str)
def test_all_is_stored_only_if_nothing_was_left_out(store, start, tmp_path, more):
    files = {"kernel.SO": b"a kernel"} if "kernel.so/x" in more else FILES
    started = start(store, files={**files, **more})
    assert not started.publisher.wait(PATIENCE_S)
    (failure,) = started.report.failures
    assert failure.startswith("no boot could restore 1 files, such as ")
    assert len(restored(store, tmp_path, started)) == len(files)


def test_flushing_twice_publishes_once(tmp_path, start):
    started = start(LocalStore(tmp_path / "store"), begin=False)
    started.publisher.start()
    started.publisher.flush()
    started.publisher.flush()
    assert started.report.packs == 1


# The end of a process.

PUBLISH_AND_END = """
import sys, threading
from pathlib import Path
from compile_cache.storage.publish import CompileCache
from compile_cache.storage.directory import CacheDirectory
from compile_cache.key.environment import detect_environment
from compile_cache.key.cache_key import CacheKey
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.settings import Settings
from compile_cache.storage.stores.base import Stores
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.rules import Rules

folder, store_url, budget_s = sys.argv[1:]
store = open_url(store_url)
directory = CacheDirectory.claim(Path(folder))
for number in range(50):
    (directory.path / f"{number}.so").write_bytes(bytes([number]) * 10_000)
key, environment = CacheKey("environment", "model", "version"), detect_environment("", "", {})
cache = CompileCache(Stores(store, store), key, environment, directory, Rules())
publisher = Publisher(cache, BootReport(), Settings(exit_budget_s=float(budget_s)))
"""
START = "publisher.start()\n"
HANG = """
reached = threading.Event()
def hang(name, content):
    reached.set()
    threading.Event().wait()
store.put = hang
publisher.start()
reached.wait()
"""


def run_to_the_end(program: str, folder: Path, store: str, budget_s: float = 60) -> tuple[int, str]:
    done = run_program(PUBLISH_AND_END + program, folder / "cache", store, budget_s)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(("program", "code"), [(START, 0), (f"{START}sys.exit(3)", 3)])
def test_a_process_that_ends_has_published_everything_and_keeps_its_code(tmp_path, environment, store, program, code):
    url, _, _ = store.location.partition(" at ")
    assert run_to_the_end(program, tmp_path, url) == (code, "")
    directory = CacheDirectory.claim(tmp_path / "next")
    key = CacheKey("environment", "model", "version")
    cache = CompileCache(Stores(store, store), key, environment, directory, Rules())
    assert cache.install(cache.fetch()) == 50


def test_a_store_that_hangs_does_not_keep_a_process_from_ending(tmp_path):
    code, said = run_to_the_end(HANG, tmp_path, str(tmp_path / "store"), budget_s=0.1)
    assert (code, said.count("publish.failed"), "lost a pack of 50 files" in said) == (0, 1, True)
