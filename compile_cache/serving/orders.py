"""Orders code for calls from the compiling process, and takes it into the cache directory.

Nothing here imports torch's compiler before the first artifact arrives.
"""

from __future__ import annotations

import contextvars
import logging
import math
import os
import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.background.call import hand_over, hand_over_shared
from compile_cache.background.compile_threads import compile_threads
from compile_cache.background.jobs import Done, Jobs
from compile_cache.background.order import Making, Order, PackedCall, Place
from compile_cache.background.process import CompilingProcess
from compile_cache.background.state import ServerState
from compile_cache.background.workshop import Workshop
from compile_cache.inductor.border import Failure, attempt
from compile_cache.inductor.options import RECOMPILE_LIMIT
from compile_cache.inductor.spec import on_gpu
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.timeline import note, noted

if TYPE_CHECKING:
    from compile_cache.inductor.precompiled import Precompiled

log = logging.getLogger("compile_cache")

_HANDLER = "compile_cache.background.making:start_making"
# A whole transformer with tuning takes two minutes on a fast machine.
_JOB_TIMEOUT_S = 900.0
_IDLE_S = 30.0
# Loading an artifact holds Python's lock for about 0.1 s, which a prediction would wait for. So it waits for a moment
# in which no region is called, between two predictions or while the GPU works, but not for long.
_GAP_S = 0.1
_LONGEST_WAIT_S = 2.0


class Orders:
    """A compiling process, and the calls that wait for it.

    `open_artifacts` imports torch's compiler, and `load` loads an artifact. The jobs' thread calls both. `calls` counts
    the regions' calls so far.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        open_artifacts: Callable[[], None],
        load: Callable[[str], Precompiled],
        calls: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._open_artifacts, self._load, self._calls = open_artifacts, load, calls
        # When the functions that the process made arrived, by path, on the clock of `time.monotonic`.
        self.arrived_s: dict[str, float] = {}
        self._workshop = Workshop(directory)
        self._log = directory.logs / "compiling.log"
        self._jobs = Jobs(self._start, _JOB_TIMEOUT_S, _IDLE_S)
        self._jobs.hold()

    def release(self) -> None:
        """Let the process begin: the server is READY."""
        self._jobs.release()

    @property
    def waiting(self) -> int:
        """How many orders have no answer yet."""
        return self._jobs.waiting

    @property
    def is_full(self) -> bool:
        """Whether no more orders are taken now."""
        return self.waiting >= RECOMPILE_LIMIT

    def wait(self, timeout_s: float) -> bool:
        """Block until every order has its answer; False after `timeout_s`."""
        return self._jobs.wait(timeout_s)

    def pack(self, module: nn.Module, args: Any, kwargs: Any, shares_weights: bool) -> PackedCall:
        """A call in bytes for the compiling process.

        Raises:
            NotHandedOver: no other process can build this call.
        """
        if not shares_weights:
            return PackedCall(hand_over(module, args, kwargs), on_gpu(module, args, kwargs))
        call = hand_over_shared(module, args, kwargs, _is_shared)
        if call.unshared:
            log.info(
                "background.unshared reason=%s The second process allocates its own copy of the weights.", call.unshared
            )
        return PackedCall(call.content, on_gpu(module, args, kwargs))

    def order(
        self,
        name: str,
        call: PackedCall,
        dynamic: tuple[tuple[int, int], ...],
        done: Callable[[Making, Precompiled | None], None],
    ) -> None:
        """Order code for a call that this thread has just served eager. Another thread calls `done` with the answer
        and the loaded function, if there is one.

        Raises:
            StateNotTaken: another process cannot have the state that the call depends on.
        """
        order = Order(call.content, ServerState.take(call.on_gpu), dynamic)
        # torch 2.13 keeps settings in context variables. An artifact is loaded with the settings of this call.
        context = contextvars.copy_context()
        self._jobs.submit(name, pickle.dumps(order), lambda answer: context.run(self._receive, answer, done))

    def _start(self) -> CompilingProcess:
        self._workshop.prepare()
        path = str(self._workshop.path)
        environ = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads()),
            **os.environ,
            **{"TORCHINDUCTOR_CACHE_DIR": path, "TRITON_CACHE_DIR": f"{path}/triton"},
        }
        place = Place(self._settings, path)
        return CompilingProcess.start(_HANDLER, pickle.dumps(place), self._log, environ)

    def _receive(self, answer: Done, done: Callable[[Making, Precompiled | None], None]) -> None:
        note("second process", answer.name, time.perf_counter() - answer.seconds, answer.seconds)
        taken = attempt(self._taken, answer)
        if isinstance(taken, Failure):
            taken = Making(reason=f"its artifact cannot be used: {taken.reason}"), None
        making, function = taken
        log.info("background.done call=%s seconds=%.1f reason=%s", answer.name, answer.seconds, making.reason or "-")
        done(making, function)

    def _taken(self, answer: Done) -> tuple[Making, Precompiled | None]:
        """The answer to an order, with its artifact loaded. Raises the errors of loading."""
        making: Making = Making(reason=answer.reason) if answer.answer is None else pickle.loads(answer.answer)
        if not making.files:
            return making, None
        self.wait_for_gap()
        if not making.path:  # the files of graphs, which no other code of this boot is compared with
            self._workshop.take(making.files)
            self.arrived_s |= {path: -math.inf for path in making.files}
            return making, None
        with noted("second process", f"{answer.name}: load"):
            self._open_artifacts()
            self.arrived_s[making.path] = time.monotonic()  # before its file exists: the publisher may be looking
            self._workshop.take(making.files)
            return making, self._load(making.path)

    def wait_for_gap(self) -> None:
        """Wait until no region was called for a moment, or for 2 s."""
        calls = self._calls()
        for _ in range(round(_LONGEST_WAIT_S / _GAP_S)):
            time.sleep(_GAP_S)
            before, calls = calls, self._calls()
            if calls == before:
                return


def _is_shared(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_cuda
