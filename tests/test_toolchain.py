"""What torch asks the compiler before it loads C++ code: a warm boot knows it, and starts no process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from boots import TESTS, settings
from marked_processes import Marked, wait_for

from compile_cache.inductor.toolchain import _Answers
from compile_cache.storage.directory import CacheDirectory

# Not the one of conftest.py, which compiles nothing twice.
COMPILER = shutil.which("g++", path="/usr/local/bin:/usr/bin:/bin")

# Runs a script, and writes each process that it starts to the log.
AUDITED = """
import runpy, sys
started = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
def hook(event, args):
    if event in started:
        print("STARTED", event, *args[:2], file=sys.stderr)
sys.addaudithook(hook)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started_by_boot(environ: dict[str, str]) -> list[str]:
    """The processes that a boot of the toy model starts."""
    command = [sys.executable, "-c", AUDITED, str(TESTS / "boot_once.py")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # A library of torch's CUDA builds looks for the CUDA driver by it when it is imported.
    return [line for line in done.stderr.splitlines() if line.startswith("STARTED") and "ldconfig" not in line]


def test_warm_boot_on_a_cpu_starts_no_process(tmp_path):
    environ = settings(tmp_path)
    environ.pop("TORCHINDUCTOR_VEC_ISA_OK", None)
    assert any("g++" in line for line in started_by_boot(environ)), "a cold boot asks the compiler"
    assert started_by_boot(environ) == []
    report = json.loads((tmp_path / "report.json").read_text())
    assert {region["step"] for region in report["regions"]} == {"precompiled"}
    # Nor does one that looks graphs up, whose store is the same.
    assert started_by_boot({**environ, "COMPILE_CACHE_PRECOMPILE": "false"}) == []


@pytest.mark.parametrize("cold_start", ["block", "background"])
def test_a_compiler_that_is_killed_with_its_server_leaves_nothing(tmp_path, cold_start):
    """Killed while the assembler reads the compiler's temporary file."""
    reached, slow, temporary = tmp_path / "reached", tmp_path / "slow", tmp_path / "tmp"
    for folder in (slow, temporary):
        folder.mkdir()
    commands = {slow / "as": f"echo > {reached}; exec sleep 300", tmp_path / "g++": f'exec {COMPILER} -B{slow}/ "$@"'}
    for path, command in commands.items():
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    marked = Marked()
    marked.environ |= {**settings(tmp_path, cold_start=cold_start), "TMPDIR": str(temporary)}
    marked.environ["CXX"] = str(tmp_path / "g++")
    scene = ["boot_once.py"] if cold_start == "block" else ["background_boot.py", "first"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, *scene], env=marked.environ, cwd=TESTS, stdout=log, stderr=log)
        wait_for(reached.exists)
        beside = tmp_path / "cache" / "0.compilers"
        assert {path.suffix for path in beside.iterdir()} >= {".s", ".o"}
        server.terminate()
        wait_for(lambda: server.poll() is not None)
        wait_for(lambda: marked.kill() or not marked.pids())  # g++ removes its files if the assembler is killed first
    CacheDirectory.claim(tmp_path / "cache")
    left = [*beside.iterdir(), *(path for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))]
    assert left == []


@pytest.fixture
def answers(tmp_path):
    answers = _Answers()
    answers.folder = tmp_path / "toolchain"
    return answers


def test_answer_is_asked_for_once(answers):
    given = iter(["12.2", "13.1"])
    assert [answers.ask(["version"], lambda: next(given)) for _ in range(2)] == ["12.2", "12.2"]
    assert answers.ask(["another"], lambda: next(given)) == "13.1"


def test_failure_is_asked_for_again(answers):
    given = iter([False, True])
    assert [answers.ask(["loads"], lambda: next(given)) for _ in range(3)] == [False, True, True]


def test_damaged_answer_is_asked_for_again(answers):
    answers.ask(["version"], lambda: "12.2")
    (path,) = answers.folder.iterdir()
    path.write_bytes(b"{")
    assert answers.ask(["version"], lambda: "12.2") == "12.2"


def test_answer_that_cannot_be_written_is_given(answers, not_root):
    assert answers.ask(["version"], lambda: "12.2") == "12.2"
