"""The adapter to torch's private names: importing it says what this torch lacks."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time

import pytest
import torch

from compile_cache.inductor import aot


@pytest.fixture
def not_imported(monkeypatch):
    """As if nothing of the package had been imported yet."""
    for name in [name for name in sys.modules if name.startswith(("compile_cache.inductor.", "compile_cache.calls."))]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0+cu140", "3.0.0.dev1"])
@pytest.mark.usefixtures("not_imported")
def test_torch_that_was_not_tested_is_refused_by_the_import(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=r"is not a tested release \(2\.11 to 2\.15\)"):
        importlib.import_module("compile_cache.inductor.stored_functions")


def test_a_fork_waits_until_no_thread_loads_a_function():
    """Else torch stays changed in the child, which can load nothing more."""
    loading = threading.Event()

    def load() -> None:
        with aot._alone:
            loading.set()
            time.sleep(0.2)

    thread = threading.Thread(target=load)
    thread.start()
    assert loading.wait(10)
    if (child := os.fork()) == 0:
        os._exit(not aot._alone.acquire(timeout=5))
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
