"""Preloading: imports that two threads begin at once end well, whoever begins."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from compile_cache.lifecycle.import_order import ordered_imports

# Each interleaving in a fork of one process that has imported torch alone.
PRELOAD = """
import os, sys, threading, time, traceback
import compile_cache
import torch

def preload_then_compile(pause_s):
    boot.preload()
    time.sleep(pause_s)
    torch.compile(torch.nn.Linear(4, 4))

def begin_compiler_then_preload(pause_s):
    failures = []
    def begin():
        try:
            torch.compile(torch.nn.Linear(4, 4))
        except BaseException as error:
            failures.append(error)
    thread = threading.Thread(target=begin)
    thread.start()
    time.sleep(pause_s)
    boot.preload()
    thread.join()
    assert not failures, failures

for begin in (preload_then_compile, begin_compiler_then_preload):
    for pause_s in (0, 0.02):
        child = os.fork()
        if child == 0:
            try:
                boot = compile_cache.boot("toy/model@" + "0" * 40)
                begin(pause_s)
                boot.compile(torch.nn.Linear(4, 4))
                assert boot.report.warnings == [], boot.report.warnings
                assert {"torch._inductor.compile_fx", "torch._dynamo.aot_compile"} <= sys.modules.keys()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, (begin.__name__, pause_s)
"""

# Two modules that import each other, and each of which shows when it has been begun.
ONE = "import ring.meeting; ring.meeting.reach('one'); from ring import two; ONE = 1\n"
TWO = "import ring.meeting; ring.meeting.reach('two'); from ring import one; TWO = 2\n"
MEETING = """
import threading
begun = {'one': threading.Event(), 'two': threading.Event()}
def reach(name):
    begun[name].set()
    begun['two' if name == 'one' else 'one'].wait(0.5)
"""


def test_an_import_of_the_compiler_waits_for_the_preload_and_the_preload_for_it(tmp_path):
    environ = {**os.environ, "COMPILE_CACHE_STORE": "off", "COMPILE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PRELOAD],
        cwd=Path(__file__).parent.parent,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def ring(tmp_path, monkeypatch) -> None:
    """A package of two modules in a cycle."""
    folder = tmp_path / "ring"
    folder.mkdir()
    for name, text in {"__init__": "", "one": ONE, "two": TWO, "meeting": MEETING}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "ring"]:
        del sys.modules[name]


def test_two_threads_that_import_a_cycle_from_both_ends_find_whole_modules(ring):

    failures = []

    def import_first(first: str, other: str) -> None:
        try:
            module = __import__(f"ring.{first}", fromlist=["*"])
            assert getattr(module, first.upper())
            assert getattr(getattr(module, other), other.upper()), f"{other} is half-made"
        except (ImportError, AttributeError) as error:
            failures.append(error)

    with ordered_imports():
        threads = [threading.Thread(target=import_first, args=pair) for pair in (("one", "two"), ("two", "one"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_an_import_begun_before_the_order_does_not_block_for_ever(ring):
    """The one thread holds a module's lock and wants the package's, the other one has the package's and wants the
    module's."""
    import ring.meeting

    begun = threading.Thread(target=__import__, args=("ring.one",))
    begun.start()
    ring.meeting.begun["one"].wait()
    with ordered_imports():
        import ring.two

        begun.join()
    assert ring.two.TWO == 2
    assert sys.modules["ring.one"].ONE == 1


def test_afterwards_python_imports_as_before():
    from importlib import _bootstrap

    before = _bootstrap._find_and_load, _bootstrap._lock_unlock_module
    with ordered_imports(), ordered_imports():
        assert _bootstrap._find_and_load is not before[0]
    assert (_bootstrap._find_and_load, _bootstrap._lock_unlock_module) == before
