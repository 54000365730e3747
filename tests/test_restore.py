"""The restore beside the loading of the weights: how long a boot waits for it, and for other boots."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_cache.key.cache_key import environment_for, key_for
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.store.local import LocalStore
from compile_cache.versions.directory import CacheDirectory
from compile_cache.versions.lease import Lease

PATIENCE_S = 60.0
LONG_S = 3600.0


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of the loopback that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def prepare(tmp_path: Path, **settings: object) -> tuple[Restore, str]:
    """A restore that is not started, and the prefix of its key."""
    import torch

    directory = CacheDirectory.claim(tmp_path / "cache")
    told = Settings(dir=str(tmp_path / "cache"), model_name="model", model_version="1", **settings)
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    key = key_for(told, environment_for(told, directory.path, environ), "model", "1")
    return Restore(told, directory, "model", (), environ), key.prefix


def join(restore: Restore) -> str | None:
    """The outcome, if there is one before the patience ends."""
    outcomes: list[str] = []
    joining = threading.Thread(target=lambda: outcomes.append(restore.join().report.outcome), daemon=True)
    joining.start()
    joining.join(PATIENCE_S)
    return outcomes[0] if outcomes else None


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_store_that_does_not_answer_costs_its_own_time_and_none_for_other_boots(tmp_path, silent_port, aws_variables):
    store = {"store": "s3://bucket/models", "s3_endpoint_url": f"http://127.0.0.1:{silent_port}"}
    restore, _ = prepare(tmp_path, **store, restore_timeout_s=0.2, peer_wait_s=LONG_S)
    restore.start()
    assert join(restore) == "failed"


def test_the_time_given_to_another_boot_is_not_the_stores(tmp_path):
    restore_timeout_s = 2.0
    restore, prefix = prepare(
        tmp_path, store=str(tmp_path / "store"), restore_timeout_s=restore_timeout_s, peer_wait_s=LONG_S
    )
    other = Lease(LocalStore(tmp_path / "store"), prefix + "compile.lease")
    assert other.acquire()
    restore.start()
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(restore.join)
        wait_until(lambda: restore.turn.waited_s > restore_timeout_s)
        other.release()
        report = joining.result().report
    assert report.outcome == "miss"
    assert report.waited_for_peer_s > restore_timeout_s
    restore.turn.release()


def test_a_boot_that_finds_nothing_has_the_turn_until_it_is_abandoned(tmp_path):
    store = LocalStore(tmp_path / "store")
    restore, prefix = prepare(tmp_path, store=str(tmp_path / "store"), peer_wait_s=LONG_S)
    restore.start()
    assert join(restore) == "miss"
    assert [entry.name for entry in store.list(prefix)] == [prefix + "compile.lease"]
    restore.abandon()
    wait_until(lambda: not store.list(prefix))
