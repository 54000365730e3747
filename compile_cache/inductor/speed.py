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

from compile_cache.inductor.spec import on_gpu
from compile_cache.inductor.traced import call_region

# The module, args and kwargs of a call.
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

_RUNS = 3
# About 5 ms on a GPU, in which the host queues a whole call. So the events do not measure the host's pace.
_HEAD_START_CYCLES = 10_000_000


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of one call in milliseconds: the median of a few runs."""

    compiled_ms: float
    eager_ms: float


def compare_speed(compiled: Callable[..., Any], copies: Callable[[], Call]) -> Speed:
    """Time `compiled(module, args, kwargs)` and the same call eager, in turn. Each run has its own copy of the call,
    because a call may change its inputs.

    Raises:
        Exception: the copies do not fit into memory, or a call fails.
    """
    compiled_ms, eager_ms = [], []
    for _ in range(_RUNS):
        compiled_ms.append(_time_ms(compiled, copies()))
        eager_ms.append(_time_ms(call_region, copies()))
    return Speed(statistics.median(compiled_ms), statistics.median(eager_ms))


def _time_ms(function: Callable[..., Any], call: Call) -> float:
    if not on_gpu(*call):
        started = time.perf_counter()
        function(*call)
        return (time.perf_counter() - started) * 1e3
    events: Any = torch.cuda  # torch's events are not annotated
    start, end = events.Event(enable_timing=True), events.Event(enable_timing=True)
    if wait := getattr(torch.cuda, "_sleep", None):
        wait(_HEAD_START_CYCLES)
    start.record()
    function(*call)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
