"""Pauses after measurements on the GPU, so that predictions get most of it.

A GPU shares its time equally among processes, whatever their priority. While this process measures the candidates for a
kernel, predictions have half of the GPU. With a pause after each measurement, they have most of it.

This module imports torch's compiler. The server never imports it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch._inductor.runtime.benchmarking

# The length of a pause, in lengths of the measurement before it.
_PAUSE = 2.0
_measuring = threading.Lock()


@contextlib.contextmanager
def paced() -> Iterator[None]:
    """A measurement, and then a pause. A measurement inside another has no pause of its own."""
    if _measuring.locked():
        yield
        return
    with _measuring:
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
    time.sleep(_PAUSE * seconds)


def pace_tuning() -> None:
    """Pause after each of Inductor's measurements on the GPU, from now on, in this process."""
    benchmarking: Any = torch._inductor.runtime.benchmarking
    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):  # since torch 2.13
        benchmarking.set_gpu_benchmark_lock_context(paced)
    else:
        benchmarking.benchmarker.benchmark_gpu = paced()(benchmarking.benchmarker.benchmark_gpu)
