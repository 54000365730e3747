"""How many compile workers the second process has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from background_handlers import order
from marked_processes import PATIENCE_S

from compile_cache.background import child_main
from compile_cache.background.child import CompilingProcess
from compile_cache.background.child_main import compile_threads, quota_cpus

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the container's cgroup."""
    monkeypatch.setattr(child_main, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("cpus", "quota", "count", "hurrying"),
    [
        *((cpus, "max 100000\n", count, cpus) for cpus, count in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3))),
        *((16, "", 8, 16), (128, "", 32, 32)),
        *((64, "800000 100000\n", 4, 8), (4, "6400000 100000\n", 2, 4)),
    ],
)
def test_one_worker_for_two_cpus_and_two_on_two_or_three(monkeypatch, cgroup, cpus, quota, count, hurrying):
    """One for each, while somebody waits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    (cgroup / "cpu.max").write_text(quota)
    assert (compile_threads(), compile_threads(hurries=True)) == (count, hurrying)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 0), ("", 0), ("1 0\n", 0)],
)
def test_quota_of_a_container(cgroup, text, cpus):
    (cgroup / "cpu.max").write_text(text)
    assert quota_cpus(cgroup) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("400000\n", 4), ("-1\n", 0)])
def test_quota_of_a_container_on_an_older_host_and_none_without_files(cgroup, quota, cpus):
    assert quota_cpus(cgroup) == 0
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cpus(cgroup) == cpus


@pytest.mark.parametrize(("given", "hurries"), [("", False), ("", True), ("7", False)])
def test_second_process_has_that_number_of_workers_unless_the_user_gave_one(tmp_path, given, hurries):
    """It is nice, unless somebody waits for it."""
    told = {**os.environ, "KEEPS_PRIORITY": "yes", THREADS: given}
    environ = {name: value for name, value in told.items() if value}
    process = CompilingProcess("background_handlers:make", b"", tmp_path / "log", environ, hurries)
    try:
        described = json.loads(process.answer(order("describe"), PATIENCE_S))
    finally:
        process.stop()
    assert described["environ"][THREADS] == (given or str(compile_threads(hurries)))
    assert described["niceness"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + (0 if hurries else 10))
