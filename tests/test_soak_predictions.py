"""The soak of predictions would see what it looks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from containers import check_store, compile_missing, graph, open_cache, packs_in
from servers import MARK, marked, wait_gone
from soak_predictions import difference

from compile_cache.storage.stores.local import LocalStore


@pytest.fixture
def store(tmp_path):
    """A folder with one published pack."""
    store = LocalStore(tmp_path / "store")
    cache = open_cache(store, tmp_path / "directory")
    compile_missing(cache.directory.path, graph("one", 4096), 0)
    cache.publish()
    return store


def test_a_sound_store_has_no_violations_and_promises_its_files_which_may_not_be_damaged_nor_go(store):
    promised = set()
    for _ in range(2):
        assert check_store(Path(store.location), promised) == []
        assert len(promised) == 5
    (pack,) = packs_in(store)
    content = store.read(pack.name)
    store.put(pack.name, content[:-1] + bytes([content[-1] ^ 1]))
    (violation,) = check_store(Path(store.location), set())
    assert "does not verify" in violation
    store.delete(pack.name)
    assert len(check_store(Path(store.location), promised)) == 5


def test_pictures_of_other_pixels_or_sizes_differ():
    black = numpy.zeros((4, 6, 3), numpy.int16)
    other = black.copy()
    other[1, 2, 0] = 7
    assert difference(black, black) == 0
    assert difference(black, other) == 7
    assert difference(black, black[:3]) == 255


def test_a_process_that_outlives_its_server_is_found_by_its_mark(monkeypatch):
    monkeypatch.setenv(MARK, "of this test")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert marked("of this test") == [child.pid]
        assert wait_gone("of this test", 0.1) == [child.pid]
        assert wait_gone("of this test", 0.1, but=[child.pid]) == []
    finally:
        child.communicate()
    assert wait_gone("of this test", 10) == []
