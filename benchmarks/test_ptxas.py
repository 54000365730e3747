"""The script that counts runs of ptxas, with a script in its place: there is no ptxas without Triton."""

from __future__ import annotations

import subprocess

from ptxas import count_runs, install_counters, log_to


def stand_in(folder):
    program = folder / "the real one"
    program.write_text('#!/bin/sh\necho "$@"\nexit 3\n')
    program.chmod(0o755)
    return program


def test_runs_are_counted_and_asking_for_the_version_is_not(tmp_path):
    variables = install_counters(tmp_path, {"TRITON_PTXAS_PATH": str(stand_in(tmp_path))})
    log = tmp_path / "log"
    for arguments in (["--version"], ["-v", "kernel.ptx", "-o", "kernel.o"], ["-v", "other.ptx", "-o", "other.o"]):
        done = subprocess.run(
            [variables["TRITON_PTXAS_PATH"], *arguments], env=log_to(log), capture_output=True, text=True, check=False
        )
        assert (done.stdout.split(), done.returncode) == (arguments, 3)
    assert count_runs(log) == 2


def test_program_runs_without_a_log(tmp_path):
    variables = install_counters(tmp_path, {"TRITON_PTXAS_PATH": str(stand_in(tmp_path))})
    command = [variables["TRITON_PTXAS_PATH"], "kernel.ptx"]
    assert subprocess.run(command, env={}, capture_output=True, text=True, check=False).stdout == "kernel.ptx\n"
    assert count_runs(tmp_path / "log") == 0
