"""Records calls as CUDA graphs, and reads tokens from the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class Served(Protocol):
    """A running count of calls."""

    def served(self) -> dict[str, Counter[str]]:
        """The number of calls by module class and by the code that served them."""


class CallCounter(Protocol):
    """Counts calls by the code that serves them. `compile_cache.Boot` is one."""

    def prediction(self) -> Served:
        """A new count."""

    def count_again(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """Add calls that were counted before once more."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A call as a CUDA graph, and the code that served its modules when it was recorded."""

    graph: torch.cuda.CUDAGraph
    served: Mapping[str, Mapping[str, int]]
    counter: CallCounter | None

    def replay(self) -> None:
        """Queue the call. A replay calls no module, so it is counted here."""
        self.graph.replay()
        if self.counter is not None:
            self.counter.count_again(self.served)


class Recorder:
    """Records calls as CUDA graphs that share their memory.

    Only one graph at a time may be replayed, and its results must be outside that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(
        self, call: Callable[[], None], generator: torch.Generator, counter: CallCounter | None = None
    ) -> Recording:
        """Record one call, which draws random numbers from `generator`.

        Raises:
            RuntimeError: CUDA cannot record a part of the call.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # the first call allocates memory, and that must not be recorded
            call()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        counted = counter.prediction() if counter else None
        # Other threads may use the GPU during the recording.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            call()
        return Recording(graph, counted.served() if counted else {}, counter)


class Reading:
    """One token on its way from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._token = torch.zeros(1, 1, dtype=torch.long, pin_memory=self._is_cuda)
        self._arrived = torch.cuda.Event() if self._is_cuda else None

    def start(self, token: torch.Tensor) -> None:
        """Queue the copy behind the work of the device."""
        self._token.copy_(token, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> int:
        """Wait for the token, but not for work that was queued after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._token)
