"""How much is sent when little has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zstandard
from containers import CountingStore, open_cache

from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.stores.local import LocalStore

FILES = 400
CHANGED = ("12/kernel12.best_config", "77/kernel77.best_config")
MORE_BYTES = 20_000


def publish_all(store: CountingStore, folder: Path, changes: dict[str, bytes]) -> Publisher:
    """A boot that restores, writes `changes`, and publishes through its publisher to the end."""
    cache, directory = open_cache(store, folder)
    cache.install(cache.fetch())
    for path, content in changes.items():
        (directory.path / path).parent.mkdir(parents=True, exist_ok=True)
        (directory.path / path).write_bytes(content)
    publisher = Publisher(cache, BootReport(), Settings(exit_budget_s=60.0))
    publisher.start()
    assert publisher.wait(60)
    publisher.flush()
    return publisher


@pytest.mark.parametrize("size_bytes", [200, 300_000])
def test_when_two_of_four_hundred_files_change_only_they_are_sent(tmp_path, size_bytes):
    """Manifest, lease and marker of use included."""
    local = LocalStore(tmp_path / "store")
    files = {f"{number}/kernel{number}.best_config": os.urandom(2_000) for number in range(FILES)}
    publish_all(CountingStore(local), tmp_path / "first", files)
    counting = CountingStore(local)
    changes = {path: os.urandom(size_bytes) for path in CHANGED}
    publish_all(counting, tmp_path / "second", changes)
    sent_bytes = sum(counting.counts.uploaded_bytes.values())
    compressed_bytes = sum(len(zstandard.compress(content)) for content in changes.values())
    assert compressed_bytes < sent_bytes <= compressed_bytes + MORE_BYTES

    cache, directory = open_cache(local, tmp_path / "third")
    cache.install(cache.fetch())
    restored = {path: (directory.path / path).read_bytes() for path in directory.scan()}
    assert restored == {**files, **changes}
