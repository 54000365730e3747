"""The second process pauses after each measurement on the GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.runtime.benchmarking as benchmarking

from compile_cache.background import pacing
from compile_cache.background.pacing import pace_tuning, paced


class Clock:
    """A clock that only `sleep` and the tests move. `pauses` has the slept seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


@pytest.fixture
def tuning() -> Iterator[None]:
    """Inductor's measurements are paced in this process."""
    before = vars(benchmarking.benchmarker).copy()
    pace_tuning()
    yield
    vars(benchmarking.benchmarker).clear()
    vars(benchmarking.benchmarker).update(before)
    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):
        benchmarking.set_gpu_benchmark_lock_context(None)


def test_pause_is_twice_as_long_as_the_measurement(clock):
    with paced():
        clock.now += 0.25
    assert clock.pauses == [0.5]


def test_measurement_inside_another_has_no_pause_of_its_own(clock):
    with paced():
        clock.now += 1.0
        with paced():
            clock.now += 0.5
    assert clock.pauses == [3.0]


def test_failed_measurement_does_not_stop_the_next_one_s_pause(clock):
    with pytest.raises(RuntimeError), paced():
        raise RuntimeError("out of shared memory")
    with paced():
        clock.now += 1.0
    assert clock.pauses == [2.0]


@pytest.mark.skipif(not hasattr(benchmarking, "gpu_benchmark_lock"), reason="torch 2.13 and newer")
def test_torch_s_own_hook_paces_each_measurement(clock, tuning):
    @benchmarking.gpu_benchmark_lock
    def measure(milliseconds: float) -> float:
        clock.now += milliseconds / 1e3
        return milliseconds

    assert measure(250.0) == 250.0
    assert clock.pauses == [0.5]


def test_older_torch_s_measurements_are_paced(clock, monkeypatch):
    def measure(*, rep: int) -> int:
        clock.now += rep
        return rep

    older = SimpleNamespace(benchmarker=SimpleNamespace(benchmark_gpu=measure))
    monkeypatch.setattr(torch._inductor.runtime, "benchmarking", older)
    pace_tuning()
    assert [older.benchmarker.benchmark_gpu(rep=seconds) for seconds in (1, 2)] == [1, 2]
    assert clock.pauses == [2.0, 4.0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_each_measurement_on_a_gpu_is_paced(monkeypatch, tuning):
    pauses: list[float] = []
    monkeypatch.setattr(pacing, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    numbers = torch.zeros(1 << 20, device="cuda")
    for _ in range(2):
        benchmarking.benchmarker.benchmark_gpu(lambda: numbers.add_(1))
    assert len(pauses) == 2
    assert min(pauses) > 0
