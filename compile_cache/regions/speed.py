"""Times a call, compiled and eager: device time on a GPU, wall-clock time on a CPU.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_cache.aot.switches import on_gpu
from compile_cache.aot.traced import call_region
from compile_cache.regions.inputs import Kept

_RUNS = 3
# About 5 ms on a GPU, in which the host queues a whole call. So the events do not measure the host's pace.
_HEAD_START_CYCLES = 10_000_000


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of one call in milliseconds: the median of a few runs."""

    compiled_ms: float
    eager_ms: float


def compare_speed(compiled: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Speed:
    """Time `compiled(module, args, kwargs)`, and then the same call eager. Each run has its own copies of the inputs,
    because a call may change them.

    Frees the GPU memory that torch keeps for later before the eager runs, because they need other sizes. With both in
    turn, torch held 0.3 GB more for a block of FLUX.1.

    Raises:
        Exception: the copies do not fit into memory, or a call fails.
    """
    compiled_ms = _median_ms(compiled, module, args, kwargs)
    if on_gpu(module, args, kwargs):
        torch.cuda.empty_cache()
    return Speed(compiled_ms, _median_ms(call_region, module, args, kwargs))


def _median_ms(function: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> float:
    return statistics.median(_time_ms(function, module, Kept(module, args, kwargs)) for _ in range(_RUNS))


def _time_ms(function: Callable[..., Any], module: nn.Module, inputs: Kept) -> float:
    if not on_gpu(module, inputs.args, inputs.kwargs):
        started = time.perf_counter()
        function(module, inputs.args, inputs.kwargs)
        return (time.perf_counter() - started) * 1e3
    events: Any = torch.cuda  # torch's events are not annotated
    start, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
    if wait := getattr(torch.cuda, "_sleep", None):
        wait(_HEAD_START_CYCLES)
    start.record()
    function(module, inputs.args, inputs.kwargs)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
