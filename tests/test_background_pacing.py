"""The second process pauses after each measurement on the GPU."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.runtime.benchmarking as benchmarking

from compile_cache.background import child_work
from compile_cache.background.child_work import Maker, Pace
from compile_cache.settings import Settings

HOOK = "set_gpu_benchmark_lock_context"  # since torch 2.13


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
    monkeypatch.setattr(child_work, "time", clock)
    return clock


@pytest.fixture(params=[False, True], ids=["torch", "older torch"])
def begin(request, monkeypatch, tmp_path) -> Iterator[Callable[..., Any]]:
    """Begins the second process's work in this process, and also as a torch that lacks the hook would have it."""
    set_hook = getattr(benchmarking, HOOK, lambda _: None)
    if request.param:
        monkeypatch.delattr(benchmarking, HOOK, raising=False)
    # torch's other way to measure asks CUDA for the device's cache first.
    monkeypatch.setattr(benchmarking, "benchmarker", benchmarking.TritonBenchmarker())
    yield lambda hurries=False: Maker(pickle.dumps((Settings(), str(tmp_path), hurries, None)))
    set_hook(None)


def test_pause_is_twice_as_long_as_the_measurement_and_all_of_an_order_take_a_minute_at_most(clock):
    """A measurement inside another has no pause of its own."""
    pace = Pace()
    for seconds in (0.25, 1.0, 25.0, 25.0):
        with pace.measurement():
            clock.now += seconds
            with pace.measurement():
                clock.now += 0.5
    assert clock.pauses == [1.5, 3.0, 51.0, 4.5]
    pace.begin_order()
    with pytest.raises(RuntimeError), pace.measurement():
        raise RuntimeError("out of shared memory")
    with pace.measurement():  # a failed one does not stop the next one's pause
        clock.now += 1.0
    assert clock.pauses[4:] == [2.0]


@pytest.mark.parametrize(("hurries", "pauses"), [(False, [2.0, 2.0]), (True, [0.0, 0.0])])
def test_inductor_s_measurements_are_paced_unless_somebody_waits(clock, begin, hurries, pauses):
    begin(hurries)

    def run_for_a_second(*_: Any, **__: Any) -> float:
        clock.now += 1.0
        return 1e3

    vars(benchmarking.benchmarker)["triton_do_bench"] = run_for_a_second  # Triton's own needs a GPU
    measured = [benchmarking.benchmarker.benchmark(lambda: None, device="cuda") for _ in range(2)]
    assert measured == [1e3, 1e3]
    assert clock.pauses == pauses


@pytest.mark.gpu
def test_each_measurement_on_a_gpu_is_paced(monkeypatch, begin):
    begin()
    pauses: list[float] = []
    monkeypatch.setattr(child_work, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    numbers = torch.zeros(1 << 20, device="cuda")
    for _ in range(2):
        benchmarking.benchmarker.benchmark(lambda: numbers.add_(1), device="cuda")
    assert len(pauses) == 2
    assert min(pauses) > 0
