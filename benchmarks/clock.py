"""How long the device takes for a call, and how fast it copies."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_WARM_UPS = 3
_COPIED_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_COPIES = 10


def median_s(call: Callable[[], Any], times: int) -> float:
    """The median of so many calls after a few that do not count: between CUDA events where there is a GPU."""
    for _ in range(_WARM_UPS):
        call()
    return median(_device_s(call) if torch.cuda.is_available() else _host_s(call) for _ in range(times))


def _device_s(call: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _host_s(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def copy_bytes_per_s() -> float:
    """What a large copy within the device's memory reads and writes, both counted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.zeros(_COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source), _COPIES)
