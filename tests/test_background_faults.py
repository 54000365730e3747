"""Regions that fail in the second process cost nothing but themselves, and the next boot does not try them again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from background_boots import BACKGROUND, Told, play
from boots import TESTS, settings
from marked_processes import wait_for
from programs import run_program
from serving_faults import paths_of

TOLERANCE = 1e-3
# Where each region's failure is, in words of its reason.
REASONS = {
    "Dropping": "differs from eager",
    "Cheating": "differs from eager",
    "Crashing": "SIGABRT",
    "Hanging": "gave no answer in 3 s",
    "Devouring": "MemoryError",
}
RANDOM = "Dropping"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faulty")


@pytest.fixture(scope="module")
def faulty(folder) -> Told:
    """One boot with all of them."""
    return play(folder, "faulty", BACKGROUND_HANGS=str(folder / "hangs"))


@pytest.fixture(scope="module")
def told(faulty) -> dict[str, dict]:
    return faulty["second"] | faulty["late"]


def test_faulty_regions_are_served_eager_with_right_answers_and_the_report_says_why(told):
    for name, reason in REASONS.items():
        assert told[name]["step"] == told[name]["settled"] == "eager"
        assert name == RANDOM or told[name]["difference"] == 0
        assert reason in told[name]["reason"]


def test_other_regions_of_the_boot_are_compiled_and_none_by_the_server(faulty, told):
    """Wide comes before the faulty ones, Other after the crash, which gets one more try."""
    for name in ("Wide", "Other"):
        assert told[name]["step"] == told[name]["settled"] == "precompiled"
        assert told[name]["difference"] < TOLERANCE
    assert faulty["report"]["counts"]["graphs"] == 0
    assert sum("call=Crashing" in line and "attempt=" in line for line in faulty.log.splitlines()) == 2


def test_the_next_boot_tries_a_faulty_region_again_once(faulty, folder, tmp_path):
    told = play(tmp_path, "faulty_again", "Crashing", "Wide", after=folder)
    assert told["ready"]["restore"]["outcome"] == "hit"
    assert told.done == ["Crashing 4x16"]
    assert "SIGABRT" in told["regions"]["Crashing"]["reason"]
    assert told["regions"]["Wide"]["step"] == "precompiled"


@pytest.mark.parametrize("work", ["take", "preload"])
def test_a_program_that_ends_while_a_thread_calls_torch_is_not_aborted(faulty, folder, tmp_path, work):
    """Python 3.11 to 3.13 end such a thread inside torch's C++ code, which aborts the process (pytorch#38228)."""
    play(tmp_path, "ends_while", work, after=folder if work == "preload" else None)


def test_a_server_that_is_killed_while_compiling_leaves_no_process_and_a_sound_store(tmp_path, marked):
    """The next boot goes on where this one was: what was published is a hit, and the rest compiles."""
    hangs = tmp_path / "hangs"
    environ = {**settings(tmp_path, **BACKGROUND), **marked.environ, "BACKGROUND_HANGS": str(hangs)}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, TESTS / "background_boot.py", "killed"], env=environ, stderr=log)
    wait_for(lambda: hangs.exists() and has_precompiled(tmp_path))
    assert len(marked.pids()) > 1
    server.kill()
    server.wait()
    wait_for(lambda: not marked.pids())
    (tmp_path / "next").mkdir()
    told = play(tmp_path / "next", "faulty_again", "Wide", "Hanging", after=tmp_path)
    assert told["ready"]["restore"]["outcome"] == "hit"
    assert told["ready"]["restore"]["refused"] == []
    steps = {region["name"]: region["step"] for region in told["ready"]["regions"]}
    assert steps == {"Wide": "precompiled", "Hanging": "eager"}
    assert told.done == ["Hanging 4x16"]
    assert {region["step"] for region in told["regions"].values()} == {"precompiled"}


def has_precompiled(folder: Path) -> bool:
    """Whether the store has a function that was compiled ahead of time."""
    return any(path.endswith(".aot") for pack in folder.glob("store/**/*.pack") for path in paths_of(pack))


# Threads that call torch: the exit waits for them, but not for long.

ENDING = """
import logging, threading, time
from compile_cache import torch_threads
logging.basicConfig(level=logging.INFO)
torch_threads._LONGEST_WAIT_S = {wait_s}
stopped = threading.Event()
def work():
    stopped.wait()
    time.sleep({more_s})
    print("ended", flush=True)
thread = threading.Thread(target=work, name="worker", daemon=True)
torch_threads.end_at_exit(thread, stopped.set)
thread.start()
"""


def end(wait_s: float, more_s: float) -> subprocess.CompletedProcess[str]:
    return run_program(ENDING.format(wait_s=wait_s, more_s=more_s))


def test_the_exit_stops_a_thread_and_waits_until_it_has_ended():
    done = end(wait_s=50, more_s=0.1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_the_exit_does_not_wait_longer_and_names_the_thread():
    done = end(wait_s=0.1, more_s=50)
    assert (done.returncode, done.stdout) == (0, "")
    assert "exit.thread_left name=worker" in done.stderr
