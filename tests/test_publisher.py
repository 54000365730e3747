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
from machines import Machine
from marked_processes import wait_for
from programs import run_program

from compile_cache.errors import StoreUnavailable
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import detect_environment
from compile_cache.lifecycle.boot_report import BootReport, PublishReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory, Outgoing
from compile_cache.storage.fetch import PacksOfKey
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore, StoredObject, open_url
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


class ListingStore(LocalStore):
    """Calls `before` before each listing."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def list(self, prefix: str) -> list[StoredObject]:
        self.before()
        return super().list(prefix)


@dataclass
class Compiled:
    """A compiler of which some files are losers of autotuning."""

    outgoing: Outgoing | None = None
    unread: Collection[str] = ()
    has_others: bool = False

    def unread_files(self, paths: Collection[str]) -> set[str]:
        return set(self.unread) & set(paths)

    def hand_over_others(self) -> None:
        self.has_others = False
        self.outgoing.hand_over(self.outgoing.appeared())


@dataclass(frozen=True)
class Started:
    """A publisher at work, and what it reports."""

    publisher: Publisher
    machine: Machine
    report: PublishReport
    written: Path  # the report of the whole boot, after each attempt

    def make(self, files: dict[str, bytes], owner: str = "", wait_s: float = 0.0) -> None:
        self.machine.write(files)
        self.machine.directory.outgoing.hand_over(files, owner, wait_s)


@pytest.fixture
def start(tmp_path, key, environment, monkeypatch) -> Iterator[Callable[..., Started]]:
    """Starts a publisher over the store given, with FILES handed over; it is stopped after the test."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._POLL_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._QUIET_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._SPREAD_S", 0.0)
    started = []

    def make(store: ObjectStore, files=FILES, compiler=None, exit_budget_s=60.0, begin=True) -> Started:
        directory = CacheDirectory.claim(tmp_path / "cache")
        machine = Machine(Publication(store, PacksOfKey(store, key, Rules()), environment, directory))
        report, written = BootReport(), tmp_path / "report.json"
        settings = Settings(exit_budget_s=exit_budget_s, report=str(written))
        if compiler is not None:
            compiler.outgoing = directory.outgoing
        publisher = Publisher(machine.publication, report, settings, compiler)
        started.append(Started(publisher, machine, report.publish, written))
        started[-1].make(files)
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


def restored(store: ObjectStore, folder: Path, of: Started) -> dict[str, bytes]:
    """What the next boot finds in the store."""
    packs = PacksOfKey(store, of.machine.packs.key, Rules())
    return Machine(Publication(store, packs, None, CacheDirectory.claim(folder / "next"))).restored()


def test_everything_is_published_at_the_start_and_the_report_tells_it(store, tmp_path, start):
    started = start(store)
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == FILES
    (entry,) = started.machine.packs.list()
    assert (started.report.packs, started.report.files, started.report.stored_bytes) == (1, 2, entry.size_bytes)
    assert list((tmp_path / "cache" / "0.outbox").iterdir()) == [], "a published pack takes no room on the disk"
    assert started.report.failures == []


def test_a_report_that_cannot_be_written_costs_nothing_else(store, tmp_path, start):
    started = start(store, begin=False)
    started.written.mkdir()
    started.publisher.start()
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == FILES


def test_with_nothing_new_there_is_nothing_to_wait_for(tmp_path, start):
    started = start(LocalStore(tmp_path / "store"), files={})
    assert started.publisher.wait(PATIENCE_S)
    assert not (tmp_path / "store").exists()


# What is handed over.


def test_what_is_written_but_not_handed_over_is_not_published(store, tmp_path, start):
    started = start(store)
    started.machine.write({"unfinished.so": b""})
    started.publisher.flush()
    assert restored(store, tmp_path, started) == FILES


def test_what_no_case_made_is_published_when_torch_has_compiled_something(store, tmp_path, start):
    started = start(store, compiler=(compiler := Compiled()))
    started.machine.write({"others.so": b"of the user's own torch.compile"})
    assert started.publisher.wait(0)
    compiler.has_others = True
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started).keys() == {*FILES, "others.so"}


def test_what_no_boot_reads_and_what_failed_is_counted_and_not_published(store, tmp_path, start):
    started = start(store, compiler=Compiled(unread={"kernel.so"}), begin=False)
    started.make({"wrong.aot": b"wrong", "wrong.so": b"its kernel"}, "wrong.aot")
    started.machine.directory.outgoing.withdraw("wrong.aot")
    started.machine.directory.outgoing.plant({"unused.aot": "unused.aot"})
    started.publisher.start()
    started.publisher.flush()
    assert (started.report.withheld_files, started.report.unread_files) == (2, 2)
    assert restored(store, tmp_path, started).keys() == FILES.keys() - {"kernel.so"}


@pytest.mark.parametrize("way", ["its owner is released", "its time has come", "the process ends"])
def test_a_file_that_waits_is_published_when(store, tmp_path, start, way):
    started = start(store)
    started.make({"one.aot": b"code", "one.so": b"its kernel"}, "one.aot", 60)
    assert started.publisher.wait(0)  # nobody waits for it
    if way == "the process ends":
        started.publisher.flush()
    elif way == "its owner is released":
        started.machine.directory.outgoing.release("one.aot")
    else:
        started.make({"one.aot": b"code", "one.so": b"its kernel"}, "one.aot", -1)
    assert started.publisher.wait(PATIENCE_S)
    assert restored(store, tmp_path, started) == {**FILES, "one.aot": b"code", "one.so": b"its kernel"}


@pytest.mark.parametrize("slow", ["nothing", "_QUIET_S", "_POLL_S"])
def test_what_is_made_later_is_packed_soon_and_published_when_it_is_quiet_or_at_the_exit(
    store, tmp_path, start, monkeypatch, slow
):
    if slow != "nothing":
        monkeypatch.setattr(f"compile_cache.lifecycle.publisher.{slow}", PATIENCE_S)
    started = start(store)
    started.make({"later.so": b"later"})
    if slow == "_QUIET_S":
        wait_for(lambda: list((tmp_path / "cache" / "0.outbox").glob("*.pack")))
        assert started.report.packs == 1
    if slow == "nothing":
        wait_for(lambda: started.report.packs == 2)
    else:
        started.publisher.flush()
    assert restored(store, tmp_path, started) == {**FILES, "later.so": b"later"}


# Faults.


def test_a_store_that_fails_is_reported_at_once_nobody_waits_for_it_and_it_is_tried_at_the_exit(tmp_path, start):
    started = start(FailingStore(tmp_path / "store", failures=1))
    before = time.monotonic()
    assert not started.publisher.wait(PATIENCE_S)
    assert time.monotonic() - before < PATIENCE_S / 2
    for packs in (0, 1):
        written = json.loads(started.written.read_text())["publish"]
        assert (started.report.packs, started.report.failures) == (packs, ["the store does not answer"])
        assert (written["packs"], written["failures"]) == (packs, ["the store does not answer"])
        started.publisher.flush()
    assert restored(LocalStore(tmp_path / "store"), tmp_path, started) == FILES


def test_a_store_that_failed_is_tried_again(tmp_path, start, monkeypatch):
    monkeypatch.setattr("compile_cache.lifecycle.publisher._RETRY_S", 0.01)
    store = FailingStore(tmp_path / "store", failures=3)
    started = start(store)
    wait_for(lambda: started.report.packs == 1)
    assert len(started.report.failures) == 1, "the same failure is one line, however often it happens"
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


def test_flushing_a_store_that_hangs_ends_within_the_budget_and_says_what_is_lost(start, hanging, caplog):
    started = start(hanging, exit_budget_s=0.2)
    assert hanging.reached.wait(PATIENCE_S)
    assert not started.publisher.wait(0)
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
    monkeypatch.setattr(started.machine.publication, "stage", lambda *_: hanging.put("", b"") or ())
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


# The end of a process.

PUBLISH_AND_END = """
import sys, threading
from pathlib import Path
from test_publisher import open_publisher
publisher, store = open_publisher(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
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


def open_publisher(folder: Path, store_url: str, budget_s: float) -> tuple[Publisher, ObjectStore]:
    """A publisher of 50 files, and its store."""
    key, environment = CacheKey("environment", "model", "version"), detect_environment("", "", {})
    store, directory = open_url(store_url), CacheDirectory.claim(folder)
    machine = Machine(Publication(store, PacksOfKey(store, key, Rules()), environment, directory))
    machine.write({f"{number}.so": bytes([number]) * 10_000 for number in range(50)})
    directory.outgoing.hand_over(directory.outgoing.appeared())
    return Publisher(machine.publication, BootReport(), Settings(exit_budget_s=budget_s)), store


def run_to_the_end(program: str, folder: Path, store: str, budget_s: float = 60) -> tuple[int, str]:
    done = run_program(PUBLISH_AND_END + program, folder / "cache", store, budget_s, folder=Path(__file__).parent)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(("program", "code"), [(START, 0), (f"{START}sys.exit(3)", 3)])
def test_a_process_that_ends_has_published_everything_and_keeps_its_code(tmp_path, environment, store, program, code):
    url, _, _ = store.location.partition(" at ")
    assert run_to_the_end(program, tmp_path, url) == (code, "")
    packs = PacksOfKey(store, CacheKey("environment", "model", "version"), Rules())
    assert (
        len(Machine(Publication(store, packs, environment, CacheDirectory.claim(tmp_path / "next"))).restored()) == 50
    )


def test_a_store_that_hangs_does_not_keep_a_process_from_ending(tmp_path):
    code, said = run_to_the_end(HANG, tmp_path, str(tmp_path / "store"), budget_s=0.1)
    assert (code, said.count("publish.failed"), "lost a pack of 50 files" in said) == (0, 1, True)


def test_what_is_withdrawn_after_it_was_packed_is_not_uploaded(start, tmp_path):
    store = ListingStore(tmp_path / "store")
    started = start(store, files={}, begin=False)
    started.make(FILES, owner="Block")
    started.make({"other.so": b"of another class"}, owner="Other")
    outgoing, outbox = started.machine.directory.outgoing, started.machine.directory.outbox
    packed = []

    def withdraw() -> None:
        if any(outbox.rglob("*.pack")) and not packed:
            packed.append(True)
            outgoing.withdraw("Block")

    store.before = withdraw
    started.publisher.start()
    assert started.publisher.wait(PATIENCE_S)
    assert packed
    assert started.report.files == 1
