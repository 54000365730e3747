"""How many compile workers the second process has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from background_handlers import order
from marked_processes import PATIENCE_S

from compile_cache.background import orders
from compile_cache.background.child import CompilingProcess
from compile_cache.background.orders import Orders, compile_threads, quota_cpus
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@pytest.fixture
def cgroup(tmp_path, monkeypatch) -> Path:
    """An empty folder in place of the container's cgroup."""
    monkeypatch.setattr(orders, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup" / "cpu").mkdir(parents=True)
    return tmp_path / "cgroup"


@pytest.fixture
def started(tmp_path, monkeypatch) -> Iterator[Callable[[], dict[str, str]]]:
    """Starts the second process as a boot does, and returns its variables."""
    monkeypatch.setattr(orders, "_HANDLER", "background_handlers:make_of_place")
    directory = CacheDirectory.claim(tmp_path)
    processes: list[CompilingProcess] = []

    def start() -> dict[str, str]:
        nothing: Any = None
        processes.append(Orders(Settings(), directory, nothing, nothing, nothing)._start())
        environ: dict[str, str] = json.loads(processes[-1].answer(order("describe"), PATIENCE_S))["environ"]
        return environ

    yield start
    for process in processes:
        process.stop()


def have_cpus(monkeypatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


@pytest.mark.parametrize(("cpus", "count"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 3), (16, 8), (128, 32)])
def test_one_worker_for_two_cpus_and_two_on_two_or_three(monkeypatch, cgroup, cpus, count):
    have_cpus(monkeypatch, cpus)
    assert compile_threads() == count


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("400000 100000\n", 4), ("150000 100000\n", 1), ("50000 100000\n", 1), ("max 100000\n", 0), ("", 0), ("1 0\n", 0)],
)
def test_quota_of_a_container(cgroup, text, cpus):
    (cgroup / "cpu.max").write_text(text)
    assert quota_cpus(cgroup) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("400000\n", 4), ("-1\n", 0)])
def test_quota_of_a_container_on_an_older_host(cgroup, quota, cpus):
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cpus(cgroup) == cpus


def test_no_quota_without_files(cgroup):
    assert quota_cpus(cgroup) == 0


def test_a_quota_counts_on_a_host_with_more_cpus(monkeypatch, cgroup):
    have_cpus(monkeypatch, 64)
    (cgroup / "cpu.max").write_text("800000 100000\n")
    assert compile_threads() == 4


def test_a_quota_for_more_cpus_than_the_process_may_use_changes_nothing(monkeypatch, cgroup):
    have_cpus(monkeypatch, 4)
    (cgroup / "cpu.max").write_text("6400000 100000\n")
    assert compile_threads() == 2


def test_second_process_is_told_the_number_of_workers(started, monkeypatch):
    monkeypatch.delenv(THREADS, raising=False)
    assert started()[THREADS] == str(compile_threads())


def test_a_number_that_the_user_gave_holds(started, monkeypatch):
    monkeypatch.setenv(THREADS, "7")
    assert started()[THREADS] == "7"
