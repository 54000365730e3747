"""What `make demo` says: its headline, its progress and its pictures; and how it ends."""

from __future__ import annotations

import io
import itertools
import signal
import subprocess
import sys
import threading

import pytest
from boots import python_path
from cog_server import PROJECT
from demo_servers import stages
from marked_processes import PATIENCE_S, wait_for
from outcome import headline
from progress import Doing, told
from rich.console import Console


def test_the_log_of_a_cold_boot_says_which_region_was_compiled(cold):
    _, booted = cold
    compiled = [f"a second process compiles {name}" for name in booted.steps]
    assert stages(booted.log) == ["starting the server", *compiled, "ready"]


def test_a_demo_that_is_told_to_end_ends_its_server_too(tmp_path, marked):
    code = "import pathlib, sys, run_demo; run_demo.OUTPUT = pathlib.Path(sys.argv[1]); sys.exit(run_demo.main())"
    log = tmp_path / "output" / "text-to-image" / "eager" / "server.log"
    environ = {**marked.environ, "PYTHONPATH": python_path(PROJECT / "demo", PROJECT)}
    command = [sys.executable, "-c", code, str(tmp_path / "output")]
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as demo, marked:
        wait_for(lambda: log.exists() and log.stat().st_size > 0)
        wait_for(lambda: len(marked.pids()) > 1)
        demo.terminate()
        assert demo.wait(PATIENCE_S) == 128 + signal.SIGTERM
        wait_for(lambda: not marked.pids())


def test_progress_is_plain_lines_where_there_is_no_terminal():
    looked_twice, output = threading.Event(), io.StringIO()
    looks = itertools.count(1)

    def look() -> Doing:
        if next(looks) == 2:
            looked_twice.set()
        return Doing("compiling Block", 3)

    with told(Console(file=output), "cold boot", look):
        assert looked_twice.wait(PATIENCE_S)
    first, *others = output.getvalue().splitlines()
    assert first.startswith("cold boot, ")
    assert first.endswith(" s: compiling Block, 3 kernels built")
    assert not others, "the same stage is not said again at once"
    assert "\x1b" not in first


@pytest.mark.parametrize(
    ("eager_s", "compared"),
    [(3.4, "as long as"), (3.2, "as long as"), (2.0, "1.4 s longer than"), (5.0, "1.6 s less than")],
)
def test_the_headline_compares_the_restored_boot_with_the_eager_one(eager_s, compared):
    assert headline("text to image", eager_s, 29.5, 3.4) == (
        f"text to image: a cold boot took 29.5 s, the restored one 3.4 s: {compared} an eager boot ({eager_s} s)"
    )
