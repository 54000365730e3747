"""The soak of predictions would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import processes
import pytest
from containers import compile_missing, graph, open_cache, packs_in
from digit_server import difference
from soak_predictions import Epoch, check_store

from compile_cache.storage.stores.local import LocalStore


@pytest.fixture
def store(tmp_path):
    """A folder with one published pack."""
    store = LocalStore(tmp_path / "store")
    cache = open_cache(store, tmp_path / "directory")
    compile_missing(cache.directory.path, graph("one", 4096), 0)
    cache.publish()
    return store


def checked(store: LocalStore, epoch: Epoch) -> list[str]:
    check_store(Path(store.location), epoch)
    return epoch.violations


def test_a_sound_store_has_no_violations_and_promises_its_files(store):
    epoch = Epoch()
    assert checked(store, epoch) == checked(store, epoch) == []
    assert len(epoch.promised) == 5


def test_a_pack_that_is_gone_is_a_violation_for_each_of_its_files(store):
    epoch = Epoch()
    assert checked(store, epoch) == []
    (pack,) = packs_in(store)
    store.delete(pack.name)
    assert len(checked(store, epoch)) == 5


def test_a_damaged_pack_is_a_violation(store):
    (pack,) = packs_in(store)
    content = bytearray(store.read(pack.name))
    content[-1] ^= 1
    store.put(pack.name, bytes(content))
    (violation,) = checked(store, Epoch())
    assert "does not verify" in violation


def test_pictures_of_other_pixels_or_sizes_differ():
    black = numpy.zeros((4, 6, 3), numpy.int16)
    other = black.copy()
    other[1, 2, 0] = 7
    assert difference(black, black) == 0
    assert difference(black, other) == 7
    assert difference(black, black[:3]) == 255


def test_a_process_that_outlives_its_server_is_found_by_its_mark(monkeypatch):
    monkeypatch.setenv(processes.MARK, "of this test")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert processes.marked("of this test") == [child.pid]
        assert processes.wait_gone("of this test", 0.1) == [child.pid]
        assert processes.wait_gone("of this test", 0.1, but=[child.pid]) == []
    finally:
        child.communicate()
    assert processes.wait_gone("of this test", 10) == []
