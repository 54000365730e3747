"""A store that misbehaves on the wire costs a boot its time limit at most, and nothing that is stored."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import toxic_proxy
from machines import Machine, read_files
from marked_processes import PATIENCE_S, wait_for
from toxic_proxy import Request, ToxicProxy, Toxin

from compile_cache.key.cache_key import environment_for, key_for
from compile_cache.key.environment import detect_environment
from compile_cache.lifecycle.boot_report import BootReport, RestoreReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.stores.local import LocalStore
from compile_cache.storage.stores.s3 import S3Store

MODEL = "org/model"
SMALL = {"fxgraph/ab/fabc/one": b"a graph", "ab/wrapper.py": b"x = 1", "empty": b""}
# What a publisher has: enough that half of it is on its way when a connection ends.
MADE = {**SMALL, "ab/kernel.so": os.urandom(300_000)}
# Random, so that it cannot be compressed: larger than the first read of a pack.
LARGE = {"ab/kernel.so": os.urandom(3 << 20), "cd/kernel.so": os.urandom(1 << 10)}
RESTORE_TIMEOUT_S = 0.3
EXIT_BUDGET_S = 0.2
# A limit of the library's own is kept to within this, on a machine that does other things as well.
SLACK_S = 5


def by_name(*toxins: Toxin) -> dict[str, Toxin]:
    return {toxin.__name__: toxin for toxin in toxins}


HANGING = by_name(toxic_proxy.trickle, toxic_proxy.stall, toxic_proxy.stall_in_the_body)
FAILING = {
    **by_name(toxic_proxy.reset, toxic_proxy.close_early, toxic_proxy.lose_answer),
    **by_name(toxic_proxy.overstate, toxic_proxy.understate, toxic_proxy.send_nothing),
    **{str(status): toxic_proxy.page(status) for status in (500, 503, 403, 404)},
}
# What can be told from a good answer at once; `overstate` cannot.
SPOILING = sorted(FAILING.keys() - {"overstate"})


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch) -> None:
    """boto3 waits up to seconds between its attempts, and each of them meets the same."""
    monkeypatch.setattr("compile_cache.storage.stores.s3._ATTEMPTS", 1)


@pytest.fixture
def proxy(s3_server, s3_variables, monkeypatch) -> Iterator[ToxicProxy]:
    """Before the S3 server, for stores that are opened from now on."""
    with toxic_proxy.toxic_proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy
        proxy.heal()
        await_background_threads()


def await_background_threads() -> None:
    """What a boot leaves behind ends with its process; here, it must not reach into the next test."""
    for thread in threading.enumerate():
        if thread.name.startswith("compile-cache-"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread


# Restoring.


@dataclass(frozen=True)
class Packs:
    """What the first boot on a host has published: every object, and which of them are the two packs."""

    root: Path
    objects: Mapping[str, bytes]
    small: str
    large: str


def boot_settings(root: Path, **others: object) -> Settings:
    return Settings(dir=str(root), model_name=MODEL, model_version="1", **others)


def environ() -> dict[str, str]:
    """The number of threads that torch has in this process, whoever set it."""
    import torch

    return {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}


@pytest.fixture(scope="module")
def packs(tmp_path_factory) -> Packs:
    root = tmp_path_factory.mktemp("host")
    environment = environment_for(boot_settings(root), root / "0", environ())
    store = LocalStore(tmp_path_factory.mktemp("store"))
    key = key_for(boot_settings(root), environment, MODEL, ())
    machine = Machine.at(root, store, key, environment)
    names = []
    for files in (SMALL, LARGE):
        machine.write(files)
        (pack,) = machine.publish()
        names.append(key.prefix + pack.name)
    os.close(machine.directory.lock_fd)
    return Packs(root, {entry.name: store.read(entry.name, 0, entry.size_bytes) for entry in store.list("")}, *names)


@dataclass(frozen=True)
class Restored:
    report: RestoreReport
    files: Mapping[str, bytes]
    waited_s: float

    @property
    def refused(self) -> dict[str, bool]:
        """The packs refused, and whether for what is in them."""
        return {refused.name: refused.is_final for refused in self.report.refused}


@dataclass
class Host:
    """A host on which one boot follows another, each with the same store behind the proxy."""

    root: Path
    proxy: ToxicProxy
    store: str

    def boot(self, timeout_s: float = PATIENCE_S) -> Restored:
        """One boot's restore, up to its process's end."""
        directory = CacheDirectory.claim(self.root)
        assert directory.path == self.root / "0"
        settings = boot_settings(self.root, store=self.store, restore_timeout_s=timeout_s)
        restore = Restore(settings, directory, MODEL, (), environ())
        started = time.monotonic()
        report, _ = restore.join()
        waited_s = time.monotonic() - started
        restored = Restored(report, read_files(directory.path), waited_s)
        self.proxy.heal()
        await_background_threads()
        assert read_files(directory.path) == restored.files, "a restore that was given up does nothing afterwards"
        os.close(directory.lock_fd)
        return restored


@pytest.fixture(scope="module")
def filled(packs, s3_client) -> str:
    """A bucket with the packs, which nothing is published to."""
    s3_client.create_bucket(Bucket="toxic")
    for name, content in packs.objects.items():
        s3_client.put_object(Bucket="toxic", Key=f"models/{name}", Body=content)
    return "toxic"


@pytest.fixture
def host(packs, proxy, filled) -> Host:
    return Host(packs.root, proxy, f"s3://{filled}/models")


def listing(request: Request) -> bool:
    return request.method == "GET" and "list-type=2" in request.target


def spoiled_part(part: str, packs: Packs) -> tuple[Callable[[Request], bool], str, Mapping[str, bytes]]:
    """Which requests are spoiled, the pack that suffers, and the files that the other pack has. The first
    read of each gets its head, and the other reads its frames."""
    if part == "head":
        return lambda request: request.path.endswith(packs.small), packs.small, LARGE
    return lambda request: request.path.endswith(packs.large) and request.start > 0, packs.large, SMALL


def assert_full_hit(restored: Restored) -> None:
    assert restored.report.outcome == "hit", restored.report
    assert restored.files == {**SMALL, **LARGE}
    assert restored.refused == {}


@pytest.mark.parametrize(
    ("toxin", "part"),
    [*((toxin, "frames") for toxin in (*SPOILING, *HANGING)), ("close_early", "head"), ("stall", "head")],
)
def test_a_pack_that_cannot_be_read_costs_itself_and_only_this_boot(host, packs, monkeypatch, toxin, part):
    """A read that hangs, when the store's time is up."""
    if toxin == "trickle":
        monkeypatch.setattr("compile_cache.storage.stores.transfer.limit_s", lambda size_bytes: 0.5)
    elif toxin in HANGING:
        monkeypatch.setattr("compile_cache.storage.stores.s3._READ_TIMEOUT_S", 0.5)
    applies, bad, others = spoiled_part(part, packs)
    host.proxy.poison({**HANGING, **FAILING}[toxin], applies)
    restored = host.boot()
    assert host.proxy.spoiled
    assert restored.report.outcome == "hit"
    assert restored.files == others
    assert restored.refused == {bad: False}
    assert [line.split()[:3] for line in restored.report.lines()[1:]] == [["unread", "pack", f"{bad}:"]]
    assert_full_hit(host.boot())


@pytest.mark.parametrize(("toxin", "part"), zip(HANGING, ["head", "frames", "listing"], strict=True))
def test_a_store_that_hangs_costs_the_boot_its_time_limit_and_no_more(host, packs, toxin, part):
    host.proxy.poison(HANGING[toxin], listing if part == "listing" else spoiled_part(part, packs)[0])
    restored = host.boot(RESTORE_TIMEOUT_S)
    assert restored.waited_s < RESTORE_TIMEOUT_S + SLACK_S
    assert restored.report.outcome == "failed"
    assert f"did not deliver the packs within {RESTORE_TIMEOUT_S:g} s" in restored.report.reason
    assert restored.files == {}
    assert_full_hit(host.boot())


@pytest.mark.parametrize("toxin", [*SPOILING, "a page"])
def test_a_listing_that_cannot_be_read_fails_the_restore_and_is_no_empty_store(host, toxin):
    welcome = toxic_proxy.page(200, b"<html><body>Welcome</body></html>")  # as where one has to sign in first
    host.proxy.poison({**FAILING, "a page": welcome}[toxin], listing)
    restored = host.boot()
    assert host.proxy.spoiled
    assert restored.report.outcome == "failed", restored.report
    assert "cannot list s3://" in restored.report.reason
    assert restored.files == {}
    assert_full_hit(host.boot())


@pytest.mark.parametrize("part", ["head", "frames", "listing"])
def test_an_answer_that_has_what_was_asked_for_is_read_although_it_promises_more(host, packs, part):
    host.proxy.poison(toxic_proxy.overstate, listing if part == "listing" else spoiled_part(part, packs)[0])
    assert_full_hit(host.boot())


# Publishing.


@dataclass(frozen=True)
class Published:
    """A publisher at work behind the proxy, and the store as it is without it."""

    publisher: Publisher
    healthy: Machine

    def stored_files(self) -> dict[str, bytes]:
        """What the next boot on another host gets; fails if anything is listed that is not whole."""
        fetched = self.healthy.fetch()
        assert fetched.refused == ()
        return {path: (self.healthy.directory.inbox / path).read_bytes() for path in fetched.files}


@pytest.fixture
def start(tmp_path, key, s3_bucket, proxy, monkeypatch) -> Iterator[Callable[[], Published]]:
    """Starts a publisher that has MADE to publish."""
    monkeypatch.setattr("compile_cache.lifecycle.publisher._POLL_S", 0.01)
    monkeypatch.setattr("compile_cache.lifecycle.publisher._SPREAD_S", 0.0)
    environment = detect_environment("", "", {})
    started: list[Publisher] = []

    def machine(endpoint_url: str, name: str) -> Machine:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint_url)
        return Machine.at(tmp_path / name, S3Store(f"s3://{s3_bucket.name}/models"), key, environment)

    def make() -> Published:
        spoiled = machine(proxy.url, "spoiled")
        spoiled.write(MADE)
        spoiled.directory.ledger.hand_over(MADE)
        publisher = Publisher(spoiled.publication, BootReport(), Settings(exit_budget_s=EXIT_BUDGET_S))
        started.append(publisher)
        publisher.start()
        return Published(publisher, machine(s3_bucket.endpoint_url, "healthy"))

    yield make
    for publisher in started:
        atexit.unregister(publisher.flush)
        publisher._closing.set()


def put_of_a_pack(request: Request) -> bool:
    return request.method == "PUT" and request.path.endswith(".pack")


AT_THE_EXIT: dict[str, tuple[Toxin, Callable[[Request], bool]]] = {
    **{f"{name} at every request": (toxin, lambda request: True) for name, toxin in HANGING.items()},
    "503 at every request": (FAILING["503"], lambda request: True),
    **{f"{name} at the pack": (toxin, put_of_a_pack) for name, toxin in {**HANGING, **FAILING}.items()},
}


@pytest.mark.parametrize("toxin", AT_THE_EXIT)
def test_an_exit_takes_no_longer_than_its_budget_and_leaves_nothing_half_written(start, proxy, toxin):
    proxy.poison(*AT_THE_EXIT[toxin])
    published = start()
    wait_for(lambda: proxy.spoiled)
    before = time.monotonic()
    published.publisher.flush()
    assert time.monotonic() - before < EXIT_BUDGET_S + SLACK_S
    assert published.stored_files() in ({}, MADE)
    # As if the process had not ended: what is still on its way now arrives.
    proxy.heal()
    await_background_threads()
    assert published.stored_files() in ({}, MADE)


@pytest.mark.parametrize("toxin", FAILING)
def test_a_store_that_recovers_gets_everything_once(start, proxy, monkeypatch, toxin):
    monkeypatch.setattr("compile_cache.lifecycle.publisher._RETRY_S", 0.01)
    proxy.poison(FAILING[toxin], put_of_a_pack)
    published = start()
    wait_for(lambda: proxy.spoiled)
    proxy.heal()
    wait_for(lambda: published.stored_files() == MADE)
    published.publisher.flush()
    assert len(published.healthy.packs.list()) == 1
