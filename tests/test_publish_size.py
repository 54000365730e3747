"""How much is sent when little has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zstandard
from containers import CountingStore, open_cache
from machines import read_files, write_files

from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings

FILES = 400
NEW = ("12/new.best_config", "77/new.best_config")
MORE_BYTES = 20_000


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
    files = {f"{number}/kernel{number}.best_config": os.urandom(2_000) for number in range(FILES)}
    publish_all(CountingStore(local), tmp_path / "first", files)
    counting = CountingStore(local)
    new = {path: os.urandom(size_bytes) for path in NEW}
    publish_all(counting, tmp_path / "second", new)
    sent_bytes = counting.uploaded_bytes
    compressed_bytes = sum(len(zstandard.compress(content)) for content in new.values())
    assert compressed_bytes < sent_bytes <= compressed_bytes + MORE_BYTES

    cache = open_cache(local, tmp_path / "third")
    cache.restore()
    assert read_files(cache.directory.path) == {**files, **new}
