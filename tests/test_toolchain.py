"""What torch asks about the processor before it loads C++ code: a warm boot knows it, and compiles no test of it.

And what of torch's compiler each of its threads imports.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import types

import pytest
import torch
from boots import TESTS, settings
from marked_processes import wait_for
from programs import run_program
from torch import nn
from torch._inductor import cpu_vec_isa

from compile_cache.inductor import toolchain
from compile_cache.inductor.make import Graphs, make
from compile_cache.storage.directory import CacheDirectory

# Not the one of conftest.py, which compiles nothing twice.
COMPILER = shutil.which("g++", path="/usr/local/bin:/usr/bin:/bin")

# Runs a script, and writes to the log each process that it starts, and each module of torch's compiler that the thread
# imports which preloads.
AUDITED = """
import runpy, sys, threading
started = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.exec", "os.system"}
compiler = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx")
def hook(event, args):
    if event in started:
        print("STARTED", event, *args[:2], file=sys.stderr)
    if event == "import" and args[0].startswith(compiler):
        if threading.current_thread().name == "compile-cache-preload":
            print("STARTED an import of", args[0], file=sys.stderr)
sys.addaudithook(hook)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def started_by_boot(environ: dict[str, str | None], *arguments: str) -> list[str]:
    """What a boot of the toy model starts that it should not, but for questions to the compiler, which take
    milliseconds: processes, and imports in the thread that only loads."""
    done = run_program(AUDITED, TESTS / "boot_once.py", *arguments, **environ)
    assert done.returncode == 0, done.stderr
    started = [line for line in done.stderr.splitlines() if line.startswith("STARTED")]
    # The process that restores; and a library of torch's CUDA builds looks for the CUDA driver when it is imported.
    expected = ("lifecycle.restore", "ldconfig", "'--version']", "'-v']")
    return [line for line in started if not any(word in line for word in expected)]


def test_warm_boot_on_a_cpu_compiles_nothing_and_the_thread_that_loads_imports_nothing_of_torchs_compiler(tmp_path):
    environ = settings(tmp_path) | {"TORCHINDUCTOR_VEC_ISA_OK": None}
    (second,) = started_by_boot(environ)
    assert "compile_cache.background.child" in second, "a cold boot compiles"
    assert started_by_boot(environ) == []
    report = json.loads((tmp_path / "report.json").read_text())
    assert {region["step"] for region in report["regions"]} == {"precompiled"}
    names = [span["name"] for span in report["spans"] if span["lane"] == "preload"]
    assert names == ["import torch's loader", "load"]


def test_a_boot_that_waits_for_code_and_has_none_starts_the_second_process_before_there_is_an_order(tmp_path):
    (second,) = started_by_boot(settings(tmp_path), "--restore-alone")
    assert "compile_cache.background.child" in second


def test_a_compiler_that_is_killed_with_its_second_process_leaves_nothing(tmp_path, marked):
    """Killed while the assembler reads the compiler's temporary file."""
    reached, slow, temporary = tmp_path / "reached", tmp_path / "slow", tmp_path / "tmp"
    for folder in (slow, temporary):
        folder.mkdir()
    commands = {slow / "as": f"echo > {reached}; exec sleep 300", tmp_path / "g++": f'exec {COMPILER} -B{slow}/ "$@"'}
    for path, command in commands.items():
        path.write_text(f"#!/bin/sh\n{command}\n")
        path.chmod(0o755)
    marked.environ |= {**settings(tmp_path, cold_start="background"), "TMPDIR": str(temporary)}
    marked.environ["CXX"] = str(tmp_path / "g++")
    scene = [sys.executable, "background_boot.py", "first"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(scene, env=marked.environ, cwd=TESTS, stdout=log, stderr=log)
        wait_for(reached.exists)
        beside = tmp_path / "cache" / "0.compilers"
        assert {path.suffix for path in beside.iterdir()} >= {".s", ".o"}
        server.terminate()
        wait_for(lambda: server.poll() is not None)
        wait_for(lambda: marked.kill() or not marked.pids())  # g++ removes its files if the assembler is killed first
    CacheDirectory.claim(tmp_path / "cache")
    left = [*beside.iterdir(), *(path for path in temporary.iterdir() if not path.name.startswith("torchinductor_"))]
    assert left == []


class Kernels(nn.Module):
    """A graph of three C++ kernels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(torch.mm(torch.sin(torch.mm(torch.tanh(x), x)), x))


def test_after_an_error_no_compiler_works_on(tmp_path, directory):
    """Else an exit waits for it before it calls any hook."""
    script, made = tmp_path / "g++", tmp_path / "made"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *-shared*) ;; *) exec {COMPILER} "$@";; esac\n'
        f"mkdir {tmp_path}/failed && exit 1\necho begun >> {made}; sleep 1; echo ended >> {made}; exit 1\n"
    )
    script.chmod(0o755)
    call = Kernels(), (torch.ones(8, 8),), {}
    cpu_vec_isa.valid_vec_isa_list()  # else this compiler's failures are the answer for all later tests
    options = torch._inductor.config.patch({"cpp.cxx": (str(script),), "compile_threads": 2})
    with options, pytest.raises(Exception, match="C\\+\\+ compile error"):
        make(None, Graphs("Kernels", "default", False), lambda: call)
    lines = made.read_text().split()
    assert lines.count("begun") == lines.count("ended") > 0


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks whether code loads, of a torch that gives these answers in turn."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    isa = types.SimpleNamespace(build_arch_flags=lambda: "-mavx2")

    def ask(*answers: bool, code: str = "code") -> bool:
        given = iter(answers)
        monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", lambda isa, code: next(given))
        toolchain._remember_instructions()
        return cpu_vec_isa.VecISA.check_build(isa, code)

    return ask


def test_only_a_passed_test_is_remembered(ask):
    assert not ask(False)
    assert ask(True)
    assert ask(), "torch is not asked again"
    assert not ask(False, code="other")


def test_damaged_answer_is_asked_for_again(ask, tmp_path):
    ask(True)
    next((tmp_path / "toolchain").iterdir()).write_bytes(b"{")
    assert ask(True)


def test_answer_that_cannot_be_written_is_given(ask, tmp_path):
    (tmp_path / "toolchain").touch()  # where its folder would be
    assert ask(True)
