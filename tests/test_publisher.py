"""The publisher: what is new reaches the store at READY, later, and at the latest while the process ends."""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import zstandard
from boots import run_boot, settings
from containers import CountingStore, open_cache
from filled_stores import put_pack
from machines import RULES, Machine, Watched, read_files, write_files
from marked_processes import PATIENCE_S, wait_for

from compile_cache.errors import StoreUnavailable
from compile_cache.lifecycle.boot_report import BootReport, PublishReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.ledger import Ledger
from compile_cache.storage.pack.manifest import Limits
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import ObjectStore

FILES = {"fxgraph/ab/fabc/one": b"a graph", "kernel.so": b"a kernel"}


class Hanging:
    """Called, it hangs until it is released."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        self.released.wait()


@dataclass
class Compiled:
    """A compiler of which some files are losers of autotuning."""

    ledger: Ledger | None = None
    unread: Collection[str] = ()
    has_others: bool = False

    def unread_files(self, paths: Collection[str]) -> set[str]:
        return set(self.unread) & set(paths)

    def hand_over_others(self) -> None:
        self.ledger.hand_over(self.ledger.appeared())
        self.has_others = False


@dataclass(frozen=True)
class Started:
    """A publisher at work, and what it reports."""

    publisher: Publisher
    machine: Machine
    report: PublishReport
    written: Path  # the report of the whole boot, after each attempt

    def make(self, files: dict[str, bytes], owner: str = "", wait_s: float = 0.0) -> None:
        self.machine.write(files)
        self.machine.directory.ledger.hand_over(files, owner, wait_s)


@pytest.fixture
def start(tmp_path, key, environment, monkeypatch) -> Iterator[Callable[..., Started]]:
    """Starts a publisher over the store given, with FILES handed over; it is stopped after the test."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._POLL_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._QUIET_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._SPREAD_S", 0.0)
    started = []

    def make(store: ObjectStore, files=FILES, compiler=None, exit_budget_s=60.0, begin=True, rules=RULES) -> Started:
        machine = Machine.at(tmp_path / "cache", store, key, environment, rules)
        written = tmp_path / "report.json"
        report, settings = BootReport(path=str(written)), Settings(exit_budget_s=exit_budget_s)
        if compiler is not None:
            compiler.ledger = machine.directory.ledger
        publisher = Publisher(machine.publication, report, settings)
        started.append(Started(publisher, machine, report.publish, written))
        started[-1].make(files)
        if begin:
            publisher.start(compiler)
            publisher.wait(exit_budget_s)
        return started[-1]

    yield make
    for one in started:
        atexit.unregister(one.publisher.flush)
        one.publisher._closing.set()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    hanging = Hanging()
    yield hanging
    hanging.released.set()


def failing(root: Path, failures: list[str]) -> Watched:
    """A store whose puts fail in these words, and then work."""

    def fail(name: str) -> None:
        if failures:
            raise StoreUnavailable(failures.pop())

    return Watched(root, put=fail)


def restored(folder: Path, of: Started) -> dict[str, bytes]:
    """What the next boot finds in the store."""
    return Machine.at(folder / "next", of.machine.packs.store, of.machine.packs.key).restored()


def test_everything_is_published_at_the_start_and_the_report_tells_it(local, tmp_path, start):
    before = random.getstate()
    started = start(local)
    assert started.publisher.wait(PATIENCE_S)
    assert restored(tmp_path, started) == FILES
    (entry,) = started.machine.packs.list()
    assert (started.report.packs, started.report.files, started.report.stored_bytes) == (1, 2, entry.size_bytes)
    assert list((tmp_path / "cache" / "0.outbox").iterdir()) == [], "a published pack takes no room on the disk"
    assert started.report.failures == []
    assert random.getstate() == before, "the program's own random numbers"


def test_with_nothing_new_there_is_nothing_to_wait_for(local, tmp_path, start):
    assert start(local, files={}).publisher.wait(PATIENCE_S)
    assert not (tmp_path / "store").exists()


# What is handed over.


def test_what_is_written_but_not_handed_over_is_not_published(local, tmp_path, start):
    started = start(local)
    started.machine.write({"unfinished.so": b""})
    started.publisher.flush()
    assert restored(tmp_path, started) == FILES


def test_what_no_case_made_is_published_when_torch_has_compiled_something(local, tmp_path, start):
    started = start(local, compiler=(compiler := Compiled()))
    started.machine.write({"others.so": b"of the user's own torch.compile"})
    assert started.publisher.wait(0)
    compiler.has_others = True
    assert started.publisher.wait(PATIENCE_S)
    assert restored(tmp_path, started).keys() == {*FILES, "others.so"}


def test_what_no_boot_reads_and_what_failed_is_not_published(local, tmp_path, start):
    started = start(local, compiler=(compiler := Compiled(unread={"kernel.so"})), begin=False)
    started.make({"wrong.aot": b"wrong", "wrong.so": b"its kernel"}, "wrong.aot")
    started.machine.directory.ledger.withdraw("wrong.aot")
    started.machine.directory.ledger.plant({"unused.aot": "unused.aot"})
    started.publisher.start(compiler)
    started.publisher.flush()
    assert restored(tmp_path, started).keys() == FILES.keys() - {"kernel.so"}


@pytest.mark.parametrize("way", ["its owner is released", "its time has come", "the process ends"])
def test_a_file_that_waits_is_published_when(local, tmp_path, start, way):
    started = start(local)
    started.make({"one.aot": b"code", "one.so": b"its kernel"}, "one.aot", 60)
    assert started.publisher.wait(0)  # nobody waits for it
    if way == "the process ends":
        started.publisher.flush()
    elif way == "its owner is released":
        started.machine.directory.ledger.release("one.aot")
    else:
        started.make({"one.aot": b"code", "one.so": b"its kernel"}, "one.aot", -1)
    assert started.publisher.wait(PATIENCE_S)
    assert restored(tmp_path, started) == {**FILES, "one.aot": b"code", "one.so": b"its kernel"}


@pytest.mark.parametrize("slow", ["nothing", "_QUIET_S", "_POLL_S"])
def test_what_is_made_later_is_packed_soon_and_published_if_quiet_or_at_exit(local, tmp_path, start, monkeypatch, slow):
    if slow != "nothing":  # `wait` sleeps for a tenth of a poll
        monkeypatch.setattr(f"compile_cache.lifecycle.publisher.{slow}", 10.0 if slow == "_POLL_S" else PATIENCE_S)
    started = start(local)
    started.make({"later.so": b"later"})
    if slow == "_QUIET_S":
        wait_for(lambda: list((tmp_path / "cache" / "0.outbox").glob("*.pack")))
        assert started.report.packs == 1
    if slow == "nothing":
        wait_for(lambda: started.report.packs == 2)
    else:
        started.publisher.flush()
    assert restored(tmp_path, started) == {**FILES, "later.so": b"later"}


def test_at_the_exit_what_is_left_is_put_and_nothing_is_marked(local, tmp_path, start, monkeypatch):
    """The exit's time is for what would be lost."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._QUIET_S", PATIENCE_S)
    started = start(local)
    started.make({"later.so": b"later"})
    wait_for(lambda: list((tmp_path / "cache" / "0.outbox").glob("*.pack")))
    mark = mock.Mock()
    monkeypatch.setattr(type(started.machine.publication), "mark_used", mark)
    started.publisher.flush()
    assert started.report.packs == 2
    assert not mark.called


# Faults.


def test_a_store_that_fails_is_reported_at_once_nobody_waits_for_it_and_it_is_tried_at_the_exit(tmp_path, start):
    started = start(failing(tmp_path / "store", ["the store does not answer"]))
    before = time.monotonic()
    assert not started.publisher.wait(PATIENCE_S)
    assert time.monotonic() - before < PATIENCE_S / 2
    for packs in (0, 1):
        written = json.loads(started.written.read_text())["publish"]
        assert (started.report.packs, started.report.failures) == (packs, ["the store does not answer"])
        assert (written["packs"], written["failures"]) == (packs, ["the store does not answer"])
        started.publisher.flush()
    assert restored(tmp_path, started) == FILES


def test_a_store_that_failed_is_tried_again(tmp_path, start, monkeypatch):
    monkeypatch.setattr("compile_cache.lifecycle.publisher._RETRY_S", 0.01)
    started = start(failing(tmp_path / "store", ["the store does not answer"] * 3))
    wait_for(lambda: started.report.packs == 1)
    assert len(started.report.failures) == 1, "the same failure is one line, however often it happens"
    assert restored(tmp_path, started) == FILES


def test_a_report_that_cannot_be_written_is_no_failure_of_publishing(local, tmp_path, start, caplog):
    (tmp_path / "report.json").mkdir()
    started = start(local)
    assert started.publisher.wait(PATIENCE_S)
    started.publisher.flush()
    told = [record.message.partition(" ")[0] for record in caplog.records if "failed" in record.message]
    assert (told, started.report.failures) == (["report.failed"], [])
    assert restored(tmp_path, started) == FILES


def test_a_store_that_fails_at_the_exit_too_is_reported_once(tmp_path, start):
    failures = ["the store does not answer"] * 2
    started = start(failing(tmp_path / "store", failures))
    started.publisher.flush()
    assert failures == [], "it was tried at the exit as well"
    assert len(started.report.failures) == 1


def test_a_staging_that_failed_is_tried_again_at_the_exit(local, tmp_path, start):
    """As on a disk that was full for a while; here, a file is in the way of the outbox."""
    started = start(local, begin=False)
    outbox = tmp_path / "cache" / "0.outbox"
    outbox.rmdir()
    outbox.write_text("in the way")
    started.publisher.start()
    started.publisher.wait(PATIENCE_S)
    assert len(started.report.failures) == 1
    outbox.unlink()
    started.publisher.flush()
    assert restored(tmp_path, started) == FILES


def test_flushing_a_store_that_hangs_ends_within_the_budget_and_says_what_is_lost(start, tmp_path, hanging, caplog):
    started = start(Watched(tmp_path / "store", put=hanging), exit_budget_s=0.2)
    assert hanging.reached.wait(PATIENCE_S)
    assert not started.publisher.wait(0)
    before = time.monotonic()
    started.publisher.flush()
    assert time.monotonic() - before < PATIENCE_S / 2
    assert started.report.packs == 0
    started.publisher.flush()
    (line,) = [record.message for record in caplog.records if "publish.failed" in record.message]
    assert "COMPILE_CACHE_EXIT_BUDGET_S=0.2" in line
    assert line.endswith("lost a pack of 2 files")
    assert json.loads(started.written.read_text())["publish"]["failures"] == started.report.failures != []


def test_a_staging_that_does_not_end_in_time_is_said_to_be_lost(local, start, monkeypatch, hanging):
    started = start(local, exit_budget_s=0.2, begin=False)
    monkeypatch.setattr(started.machine.publication, "stage", lambda *_: hanging() or ())
    started.publisher.start()
    assert hanging.reached.wait(PATIENCE_S)
    started.publisher.flush()
    assert "not packed yet" in started.report.failures[0]


def test_a_file_that_no_pack_can_have_is_named_once_and_keeps_no_other_from_the_store(local, start, tmp_path, caplog):
    started = start(local, files={**FILES, "a\nb/kernel.so": b""})
    assert started.publisher.wait(PATIENCE_S)
    assert (started.report.packs, restored(tmp_path, started)) == (1, FILES)
    assert [record.message for record in caplog.records if "publish.left_out" in record.message][1:] == []


@pytest.fixture
def full(local, key, monkeypatch) -> ObjectStore:
    """A store with five packs of a key, with rules that allow no more, and a publisher that does not wait."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._RETRY_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._MERGE_AFTER_S", 0.0)
    for name in "abcde":
        put_pack(local, key, {name: b"kernel"})
    return local


FIVE = Rules(Limits(packs=5))


def test_a_full_key_gets_no_more_which_is_said_once_until_there_is_room(full, start, caplog):
    started = start(full, rules=FIVE)
    assert not started.publisher.wait(PATIENCE_S)
    time.sleep(0.3)
    (failure,) = started.report.failures
    assert "has 5 packs already" in failure
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [f"publish.failed error={failure}"]
    assert started.report.packs == 0
    full.delete(started.machine.packs.list()[0].name)
    wait_for(lambda: started.report.packs == 1)


def test_a_full_key_is_merged_and_then_gets_more(full, start, tmp_path):
    started = start(full, rules=FIVE, begin=False)
    started.machine.restore()
    started.publisher.start()
    wait_for(lambda: started.report.packs == 1)
    assert started.report.merged_packs == 5
    assert restored(tmp_path, started) == {**FILES, **dict.fromkeys("abcde", b"kernel")}


def test_what_is_withdrawn_after_it_was_packed_is_not_uploaded(start, tmp_path):
    started = start(Watched(tmp_path / "store", list=lambda _: withdraw()), files={}, begin=False)
    started.make(FILES, owner="Block")
    started.make({"other.so": b"of another class"}, owner="Other")
    ledger, outbox = started.machine.directory.ledger, started.machine.directory.outbox
    packed = []

    def withdraw() -> None:
        if any(outbox.rglob("*.pack")) and not packed:
            packed.append(True)
            ledger.withdraw("Block")

    started.publisher.start()
    assert started.publisher.wait(PATIENCE_S)
    assert packed
    assert started.report.files == 1


# How much is sent when little has changed.


def publish_all(store: CountingStore, folder: Path, changes: dict[str, bytes]) -> None:
    """A boot that restores, writes `changes`, and publishes through its publisher to the end."""
    cache = open_cache(store, folder)
    cache.restore()
    write_files(cache.directory.path, changes)
    cache.hand_over()
    publisher = Publisher(cache.publication, BootReport(), Settings(exit_budget_s=60.0))
    publisher.start()
    assert publisher.wait(60)
    publisher.flush()


@pytest.mark.parametrize("size_bytes", [200, 300_000])
def test_beside_four_hundred_files_only_two_new_ones_are_sent(tmp_path, monkeypatch, local, size_bytes):
    """Manifest and marker of use included."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._SPREAD_S", 0.0)
    files = {f"{number}/kernel{number}.best_config": os.urandom(2_000) for number in range(400)}
    publish_all(CountingStore(local), tmp_path / "first", files)
    counting = CountingStore(local)
    new = {path: os.urandom(size_bytes) for path in ("12/new.best_config", "77/new.best_config")}
    publish_all(counting, tmp_path / "second", new)
    compressed_bytes = sum(len(zstandard.compress(content)) for content in new.values())
    assert compressed_bytes < counting.uploaded_bytes <= compressed_bytes + 20_000

    cache = open_cache(local, tmp_path / "third")
    cache.restore()
    assert read_files(cache.directory.path) == {**files, **new}


# A g++ that writes a library in place, and waits in the middle until it may go on.
SLOW = """#!{python}
import pathlib, subprocess, sys, time
asked, go = sys.argv[1:], pathlib.Path(__file__).with_name("go")
target = pathlib.Path(asked[asked.index("-o") + 1]) if "-o" in asked else None
if target is None or target.suffix != ".so":
    sys.exit(subprocess.call(["{compiler}", *asked]))
whole = target.with_name(".whole")
code = subprocess.call(["{compiler}", *(str(whole) if each == str(target) else each for each in asked)])
if code == 0:
    content = whole.read_bytes()
    with target.open("wb") as file:
        file.write(content[:10_712])
        file.flush()
        while not go.exists():
            time.sleep(0.05)
        file.write(content[10_712:])
sys.exit(code)
"""
# While the user's own torch.compile writes a library, a prediction takes code of the second process.
OWN = """
import os, sys, threading, time
from pathlib import Path
import compile_cache
with compile_cache.boot("org/model") as boot:
    import torch
    from blocks import SIZE, Product
    net = Product().eval()
    boot.compile(net, whole=True)
    def call():
        with torch.inference_mode(), boot.prediction():
            net(torch.ones(4, SIZE))
    boot.warm_up(call)
assert boot.wait_compiled(100)
os.environ["PATH"] = sys.argv[1] + os.pathsep + os.environ["PATH"]
own = threading.Thread(target=torch.compile(lambda x: torch.nn.functional.gelu(x).sum(0)), args=[torch.ones(64, 64)])
own.start()
seen = set()
while not seen:
    time.sleep(0.05)
    seen = {path for path in Path(boot.report.cache_dir).rglob("*.so") if path.stat().st_size == 10_712}
call()
call()
boot.wait_published(3)  # what can be published meanwhile
Path(sys.argv[1], "go").touch()
own.join()
assert boot.wait_published(60)
"""


def test_a_library_that_is_half_written_is_published_once_it_is_whole(tmp_path):
    slow = tmp_path / "bin" / "g++"
    write_files(slow.parent, {slow.name: SLOW.format(python=sys.executable, compiler=shutil.which("g++")).encode()})
    slow.chmod(0o755)
    environ = settings(tmp_path, cold_start="background")
    done = run_boot(environ, OWN, str(slow.parent), program="run_source")
    assert done.returncode == 0, done.stderr
    made = [content for name, content in read_files(tmp_path / "cache" / "0").items() if name.endswith(".so")]
    packs = [pack.read_bytes() for pack in (tmp_path / "store").rglob("*.pack")]
    stored = b"".join(zstandard.ZstdDecompressor().stream_reader(p, read_across_frames=True).read() for p in packs)
    assert made
    assert all(content in stored for content in made)
