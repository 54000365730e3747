"""The restore beside the loading of the weights: how long a boot waits for it, and from where it is seeded."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from filled_stores import damage, put_pack

from compile_cache.errors import StoreUnavailable
from compile_cache.key.cache_key import CacheKey, environment_for, key_for
from compile_cache.lifecycle.restore import Restore
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.stores.local import LocalStore


def prepare(tmp_path: Path, **settings: object) -> tuple[Callable[[], Restore], CacheKey]:
    """What begins a restore, and its key."""
    import torch

    directory = CacheDirectory.claim(tmp_path / "cache")
    told = Settings(dir=str(tmp_path / "cache"), model_name="model", model_version="1", **settings)
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    key = key_for(told, environment_for(told, directory.path, environ), "model", ())
    return lambda: Restore(told, directory, "model", (), environ), key


def test_a_new_version_is_seeded_from_the_written_store_and_not_from_a_layer(tmp_path):
    """So a new version rolls a read-only layer back."""
    for folder, outcome in (("store", "seeded"), ("layer", "miss")):
        root = tmp_path / folder
        begin, key = prepare(root, store=str(root / "store"), layers=(str(root / "layer"),))
        put_pack(LocalStore(root / folder), replace(key, model_version="0"))
        assert begin().join()[0].outcome == outcome


def test_a_refused_pack_is_named_though_the_store_of_other_versions_fails(tmp_path):
    begin, key = prepare(tmp_path, store=str(tmp_path / "store"), layers=(str(tmp_path / "layer"),))
    name = put_pack(LocalStore(tmp_path / "layer"), key)
    damage(tmp_path / "layer", name)
    (tmp_path / "store").write_text("no folder")
    report, _ = begin().join()
    assert report.outcome == "failed"
    assert [refused.name for refused in report.refused] == [name]


def test_a_key_that_is_not_known_in_time_fails_the_restore(tmp_path, monkeypatch):
    over = threading.Event()

    def know(*_: object) -> None:
        over.wait(60)
        raise StoreUnavailable("too late")

    monkeypatch.setattr("compile_cache.lifecycle.restore._know", know)
    begin, _ = prepare(tmp_path, store=str(tmp_path / "store"), restore_timeout_s=0.01)
    report, _ = begin().join()
    over.set()
    assert (report.outcome, "did not deliver the packs within 0.01 s" in report.reason) == ("failed", True)
