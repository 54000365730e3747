"""Running boots in processes of their own, and reading what they did."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
# Where a boot compiles only to have something to publish: half of the toy model, in half of the time.
ONE_CLASS = {"TOY_ONE_CLASS": "1"}
# torch reads these while it is imported, and the last one at each compile.
_READ_BY_IMPORTS = ("TORCH", "OMP_", "CXX")
_READ_LATER = "TORCHDYNAMO_DISABLE"


@dataclass(frozen=True)
class Booted:
    """One finished boot of tests/boot_once.py."""

    report: dict[str, Any]
    output: list[float]
    compiled_now: int
    log: str

    @property
    def steps(self) -> dict[str, str]:
        return {region["name"]: region["step"] for region in self.report["regions"]}


def settings(folder: Path, **variables: str) -> dict[str, str]:
    """An environment for a boot that keeps everything in `folder`; `variables` without their COMPILE_CACHE_ prefix."""
    given = {"store": str(folder / "store"), "dir": str(folder / "cache"), "report": str(folder / "report.json")}
    prefixed = {f"COMPILE_CACHE_{name.upper()}": value for name, value in {**given, **variables}.items()}
    return {**os.environ, **prefixed}


def after(before: Path, folder: Path, **variables: str) -> dict[str, str]:
    """The same for a boot that finds what another one has stored: with a copy of its store, and in its cache directory,
    whose path is part of an environment."""
    shutil.copytree(before / "store", folder / "store")
    return settings(folder, dir=str(before / "cache"), **variables)


def python_path(*folders: Path | str) -> str:
    """PYTHONPATH with these folders, and with the folders that conftest.py has put there."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def boot_once(environ: Mapping[str, str], *arguments: str, forked: bool = True) -> Booted:
    """Boot the toy model once; fails with the log if the process fails. See `run_boot`."""
    done = run_boot(environ, *arguments, forked=forked)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    report = json.loads(Path(environ["COMPILE_CACHE_REPORT"]).read_text())
    assert report["counts"] == result["report"]["counts"]
    return Booted(report, result["output"], result["compiled_now"], done.stderr)


def run_boot(
    environ: Mapping[str, str],
    *arguments: str,
    forked: bool = True,
    program: str = "boot_once",
    folder: Path | str = ".",
) -> subprocess.CompletedProcess[str]:
    """The finished process of one boot, whatever its outcome: one that imports torch itself, or one that is forked
    after that, in a sixth of the time. Only the second can have a working
    `folder` of its own."""
    if forked:
        return _fork_boot(dict(environ), arguments, program, str(folder))
    return subprocess.run(
        [sys.executable, TESTS / f"{program}.py", *arguments],
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=300,
    )


def _fork_boot(
    environ: dict[str, str], arguments: tuple[str, ...], program: str, folder: str
) -> subprocess.CompletedProcess[str]:
    forking, _ = forking_process()
    assert forking.stdin is not None
    assert forking.stdout is not None
    assert not (changed := read_by_imports(environ)), f"a forked boot does not see {changed}"
    with tempfile.TemporaryDirectory() as outputs:
        output, log = Path(outputs, "stdout"), Path(outputs, "stderr")
        paths = {"folder": folder, "path": sys.path, "stdout": str(output), "stderr": str(log)}
        request = {"environ": environ, "arguments": arguments, "program": program, **paths}
        print(json.dumps(request), file=forking.stdin, flush=True)
        status = int(forking.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, output.read_text(), log.read_text())


def read_by_imports(environ: Mapping[str, str]) -> set[str]:
    """The variables that torch reads while it is imported, and that are others than this process's."""
    changed = {name for name, _ in environ.items() ^ os.environ.items()}
    return {name for name in changed - {_READ_LATER} if name.startswith(_READ_BY_IMPORTS)}


@functools.cache
def forking_process() -> tuple[subprocess.Popen[str], socket.socket]:
    """This process's own, and the channel to its fork that starts second processes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command, pipe = [sys.executable, TESTS / "forked_boots.py", str(theirs.fileno())], subprocess.PIPE
    with theirs:
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[theirs.fileno()])
    atexit.register(process.communicate)
    atexit.register(ours.close)  # the last one registered is called first
    return process, ours


def assert_fully_warm(booted: Booted) -> None:
    """Nothing was traced or looked up, let alone compiled, and it shows: every region precompiled, functions loaded,
    none made, and the same numbers as eager within tolerance."""
    report = booted.report
    counts: dict[str, int] = report["counts"]
    assert set(booted.steps.values()) == {"precompiled"}, report
    assert report["fully_precompiled"]
    assert [counts[name] for name in ("misses", "benchmarks", "kernels_compiled")] == [0, 0, 0]
    for region in report["regions"]:
        assert region["relative_error"] <= region["tolerance"]
    assert report["fully_cached"]
    assert booted.compiled_now == 0
    assert counts["precompiled_loaded"] >= len(booted.report["regions"])
    assert counts["precompiled_made"] == 0
    assert [counts[name] for name in ("graphs", "hits")] == [0, 0]


def stored(store: Path) -> dict[str, bytes]:
    """Every object of a local store, by name."""
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}
