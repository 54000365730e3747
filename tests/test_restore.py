"""The restore beside the loading of the weights: how long a boot waits for it, and from where it is seeded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from filled_stores import put_pack

from compile_cache.key.cache_key import CacheKey, environment_for, key_for
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.stores.local import LocalStore

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
    key = key_for(told, environment_for(told, directory.path, environ), "model", ())
    return Restore(told, directory, "model", (), environ), key.prefix


def join(restore: Restore) -> str | None:
    """The outcome, if there is one before the patience ends."""
    outcomes: list[str] = []
    joining = threading.Thread(target=lambda: outcomes.append(restore.join().report.outcome), daemon=True)
    joining.start()
    joining.join(PATIENCE_S)
    return outcomes[0] if outcomes else None


def test_a_new_version_is_seeded_from_the_written_store_and_not_from_a_layer(tmp_path):
    """So a new version rolls a read-only layer back."""
    for folder, outcome in (("store", "seeded"), ("layer", "miss")):
        restore, prefix = prepare(
            tmp_path / folder, store=str(tmp_path / folder / "store"), layers=(str(tmp_path / folder / "layer"),)
        )
        environment, model, _ = prefix.removeprefix("v2/").rstrip("/").split("/")
        put_pack(LocalStore(tmp_path / folder / folder), CacheKey(environment, model, "0"))
        restore.start()
        assert join(restore) == outcome


def test_a_store_that_does_not_answer_costs_its_own_time(tmp_path, silent_port, aws_variables, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent_port}")
    restore, _ = prepare(tmp_path, store="s3://bucket/models", restore_timeout_s=0.2)
    restore.start()
    assert join(restore) == "failed"
