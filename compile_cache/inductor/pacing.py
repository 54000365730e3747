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
# All pauses of one order: its time is limited (`_JOB_TIMEOUT_S` in serving/orders.py).
_MOST_S = 60.0


class Pace:
    """Pauses after the measurements of one order after another."""

    def __init__(self) -> None:
        self._measuring = threading.Lock()
        self._left_s = _MOST_S

    def begin_order(self) -> None:
        """Let the pauses take a minute again."""
        self._left_s = _MOST_S

    @contextlib.contextmanager
    def measurement(self) -> Iterator[None]:
        """A measurement, and then a pause. A measurement inside another has no pause of its own."""
        if self._measuring.locked():
            yield
            return
        with self._measuring:
            started = time.monotonic()
            yield
            pause_s = min(_PAUSE * (time.monotonic() - started), self._left_s)
        self._left_s -= pause_s
        time.sleep(pause_s)

    def apply_to_inductor(self) -> None:
        """Pause after each of Inductor's measurements on the GPU, from now on, in this process."""
        benchmarking: Any = torch._inductor.runtime.benchmarking
        if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):  # since torch 2.13
            benchmarking.set_gpu_benchmark_lock_context(self.measurement)
        else:
            benchmarking.benchmarker.benchmark_gpu = self.measurement()(benchmarking.benchmarker.benchmark_gpu)
