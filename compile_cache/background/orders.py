"""The server's side: orders code for calls, one at a time, and takes the files of answers into the cache directory.

The second process writes into a folder of its own, beside the cache directory: torch takes a library that exists for a
finished one, and g++ writes it in place. The folder's path is as long as the cache directory's. Inductor pickles the
paths of kernels, and looks up tuning's results by them (`AutotuneCache`); no setting makes them relative. Because both
paths have the same length, one can replace the other in any file, pickles included.

This module imports no torch, so that the second process may begin before that.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import PriorityQueue
from typing import TYPE_CHECKING

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import (
    ArtifactError,
    CompileCacheError,
    Failure,
    OrderFailed,
    ProcessDied,
    ProcessNotReady,
    attempt,
    log,
)
from compile_cache.files import replacing
from compile_cache.inductor.function_file import PRECOMPILED, SUFFIX, copy_artifact
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory, empty_folder
from compile_cache.timeline import note
from compile_cache.torch_threads import end_at_exit

if TYPE_CHECKING:
    from compile_cache.calls.torch_call import Call
    from compile_cache.inductor.make import Answer, Dimensions
    from compile_cache.inductor.torch_state import ServerState

_HANDLER = "compile_cache.background.child_work:Maker"
_ATTEMPTS = 2
# A whole transformer with tuning takes two minutes on a fast machine.
_LIMIT_S = 900.0
_IDLE_S = 30.0
# How often a wait looks at the clock.
_LOOK_S = 0.1
_LETTERS = str.maketrans("0123456789", "abcdefghij")
# torch rewrites these files in place.
_REWRITTEN = (".best_config",)


@dataclass(slots=True, eq=False)
class Order:
    """A call for which code is wanted: the bytes of `hand_over`, whether all its tensors are on a GPU, and the sizes
    that the code leaves open. Orders of the lowest `rank` come first. `record` is the record of graphs that the server
    has of such calls, to which this one's are added.

    `state` is the server's, taken once the call was served. `answer` is set on the queue's thread; `close` cancels it.
    """

    name: str
    rank: tuple[int, ...]
    call: bytes
    is_on_gpu: bool = False
    dynamic: Dimensions = ()
    record: str = ""
    state: ServerState | None = None
    answer: Future[Answer] = field(default_factory=Future)


class Orders:
    """The orders of a boot: `queue`. The second process's folder is `workshop`, beside the cache directory."""

    def __init__(self, settings: Settings, directory: CacheDirectory) -> None:
        self._settings = settings
        self._directory = directory
        self.workshop = directory.path.with_name(directory.path.name.translate(_LETTERS))
        # The variables with which the process began.
        self._variables: dict[str, str] = {}
        self.queue = OrderQueue(self._start, _LIMIT_S, _IDLE_S)

    def pack(
        self, name: str, call: Call, dynamic: Dimensions, rank: tuple[int, ...], shares_weights: bool, record: str = ""
    ) -> Order:
        """An order of code for a call that is not served yet.

        Raises:
            NotHandedOver: no other process can build this call.
        """
        from compile_cache.calls.pickling import hand_over
        from compile_cache.calls.spec import on_gpu

        return Order(name, rank, hand_over(call, shares_weights), on_gpu(call), dynamic, record)

    def submit(self, order: Order) -> None:
        """Queue an order whose call this thread has just served eager.

        Raises:
            NotHandedOver: another process cannot have the state that the call depends on.
        """
        from compile_cache.inductor.torch_state import ServerState

        order.state = ServerState.read(order.is_on_gpu)
        if self._variables and self._variables != {**os.environ}:
            self.queue.begin_anew()
        self.queue.put(order)

    def copy_in(self, answer: Answer) -> None:
        """Copy an answer's files into the cache directory: kernels first, then the artifacts that need them.

        Raises:
            ArtifactError: an artifact is damaged.
            OSError: a file is missing, or the cache directory cannot be written.
        """
        self._directory.ledger.expect(answer.files)  # before they exist: another thread may be looking
        files = sorted(answer.files, key=lambda path: path.startswith(PRECOMPILED))
        _copy(files, self.workshop, self._directory.path)

    def _start(self, hurries: bool) -> CompilingProcess:
        """Start the process in its folder, with a copy of the cache directory, so that nothing is compiled twice.

        Raises:
            OSError: the folder cannot be written, or no process can be started.
        """
        path = str(self.workshop)
        empty_folder(self.workshop)
        for file in self._directory.scan():
            with contextlib.suppress(ArtifactError):  # a damaged one
                _copy([file], self._directory.path, self.workshop)
        self._variables = {**os.environ}
        environ = self._variables | {"TORCHINDUCTOR_CACHE_DIR": path, "TRITON_CACHE_DIR": f"{path}/triton"}
        # A killed compiler leaves its temporary files. The next boot empties this folder.
        environ["TMPDIR"] = str(self._directory.compilers)
        main = getattr(sys.modules["__main__"], "__file__", None)
        setup = pickle.dumps((self._settings, path, hurries, main))
        return CompilingProcess(_HANDLER, setup, self._directory.logs / "compiling.log", environ, hurries)


class OrderQueue:
    """Orders for a compiling process. A daemon thread hands them over, one at a time, after `release`, at READY, or
    while somebody waits for them to `finish`: then the process `hurries`.

    The process starts with the first order, or with `begin`, and ends after `idle_s` without one. An order gets one
    more try in a new process if its process died, hung or ran out of memory. All methods are thread-safe.
    """

    def __init__(self, start: Callable[[bool], CompilingProcess], limit_s: float, idle_s: float) -> None:
        self._start = start
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._server = os.getpid()
        # By rank, and then in the order in which they came.
        self._orders: PriorityQueue[tuple[tuple[int, ...], int, Order]] = PriorityQueue()
        self._numbers = itertools.count()
        self._putting = threading.Lock()
        # Orders begin before this time of `time.monotonic`. It and the next two change under the mutex of `_orders`.
        self._until_s = 0.0
        self._is_answering = self._is_closed = False
        self.hurries = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process: CompilingProcess | None = None

    def put(self, order: Order) -> None:
        """Queue an order and return at once.

        Raises:
            RuntimeError: no thread can be started.
        """
        with self._putting:
            if self._is_closed:
                order.answer.cancel()
                return
            self._start_thread()
            self._orders.put((order.rank, next(self._numbers), order))

    def _start_thread(self) -> None:
        if self._thread is None:  # a boot that has nothing to compile starts none
            thread = threading.Thread(target=self._run, name="compile-cache-orders", daemon=True)
            thread.start()
            end_at_exit(thread, self.close)
            self._thread = thread

    @property
    def waiting(self) -> int:
        """How many orders are not answered. An order is answered when the callbacks of its answer have returned."""
        return self._orders.unfinished_tasks

    def begin(self) -> None:
        """Start a process that hurries before there is an order: it imports torch's compiler beside this one's imports.

        Raises:
            ProcessNotReady: none can be started.
            RuntimeError: no thread can be started.
        """
        with self._putting:
            if not (self._thread or self._until_s or self._is_closed):
                self.hurries = True
                self._ensure_process()
                self._start_thread()

    def begin_anew(self) -> None:
        """End a process that hurries, unless somebody waits for it: a new one would have other variables."""
        if self.hurries and not self._until_s:
            self._end_process()

    def release(self) -> None:
        """Let orders be answered from now on, by a process that gives way to predictions."""
        with self._putting:  # not while a process begins
            process = self._process if self.hurries else None
            if process is not None:
                self._process = None
            self.hurries = False
        if process is not None:  # requests put orders meanwhile; the next process empties its folder
            process.stop()
        with self._orders.mutex:
            self._until_s = math.inf
            self._orders.not_empty.notify_all()

    def finish(self, until_s: float) -> None:
        """Wait until all orders are answered that begin before `until_s` of `time.monotonic`."""
        with self._orders.mutex:
            before_s, self._until_s = self._until_s, until_s
            self.hurries |= not before_s
            self._orders.not_empty.notify_all()
            try:
                while self.waiting and not self._is_closed and (time.monotonic() < until_s or self._is_answering):
                    self._orders.all_tasks_done.wait(_LOOK_S)
            finally:
                self._until_s = before_s
                self._orders.not_empty.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until every order is answered or `close` is called; True if every order is answered."""
        with self._orders.mutex:
            self._orders.all_tasks_done.wait_for(lambda: not self.waiting or self._is_closed, timeout_s)
            return not self.waiting

    def close(self) -> None:
        """Accept no more orders, let the thread cancel those that are left, and stop the process. Also the exit hook.
        Does nothing in a fork."""
        if os.getpid() != self._server:
            return
        with self._putting, self._orders.mutex:
            self._is_closed = True
            self._orders.all_tasks_done.notify_all()
            self._orders.not_empty.notify_all()
        atexit.unregister(self.close)
        with self._starting:
            self._end_process()

    def _run(self) -> None:
        while (order := self._next()) is not None:
            from compile_cache.inductor.make import Answer  # an order is a call, so torch is imported

            started, orders = time.perf_counter(), [order]
            answer = attempt(self._answer, order)
            if isinstance(answer, Failure):
                if isinstance(answer.error, ProcessNotReady):  # the others would fail alike; later ones are tried again
                    orders += self._drain()
                known = isinstance(answer.error, CompileCacheError)
                answer = Answer(reason=str(answer.error) if known else answer.reason)
            for each in orders:
                self._finish(each, answer, started)
        for order in self._drain():
            order.answer.cancel()
            self._orders.task_done()

    def _next(self) -> Order | None:
        """The next order, once one may begin; None after `close`. Meanwhile an idle process is ended."""
        queue = self._orders
        while not self._is_closed:
            with queue.mutex:
                self._is_answering = False
                idle_s = None if self._process is None or queue.queue else self._idle_s
                begins = queue.not_empty.wait_for(lambda: self._is_closed or self._may_begin(), idle_s)
                self._is_answering = begins and not self._is_closed
            if self._is_answering:
                return queue.get()[-1]
            if not begins:
                self._end_process()
        return None

    def _may_begin(self) -> bool:
        return bool(self._orders.queue) and time.monotonic() < self._until_s

    def _drain(self) -> list[Order]:
        """Take all orders out of the queue."""
        return [self._orders.get()[-1] for _ in range(self._orders.qsize())]

    def _answer(self, order: Order, number: int = 1) -> Answer:
        """The process's answer. If a process may be to blame for a failure, a new one gets one more try.

        Raises:
            OrderFailed, ProcessDied: of the last try.
        """
        try:
            content = pickle.dumps((order.call, order.state, order.dynamic, order.record))
            process = self._ensure_process()
            log.info("background.begin call=%s waiting=%d", order.name, self.waiting)
            answer: Answer = pickle.loads(process.answer(content, self._limit_s))
            return answer
        except (OrderFailed, ProcessDied) as error:
            if self._is_closed:  # `close` stopped the process, and orders are cancelled
                from compile_cache.inductor.make import Answer

                return Answer()
            # The order's own error goes to its caller, who knows its meaning.
            level = logging.INFO if isinstance(error, OrderFailed) else logging.WARNING
            log.log(level, "background.failed call=%s attempt=%d error=%s", order.name, number, error)
            is_its_own = isinstance(error, OrderFailed) and not error.may_succeed_afresh
            if not is_its_own:
                self._end_process()
            if is_its_own or number >= _ATTEMPTS:
                raise
        return self._answer(order, number + 1)

    def _ensure_process(self) -> CompilingProcess:
        """The process, started anew if it died while idle. Raises `ProcessNotReady` if none can be started."""
        with self._starting:  # `close` then waits for the start, and stops the process
            if self._is_closed:
                raise ProcessDied("The queue is closed.")
            if self._process is not None and self._process.is_alive:
                return self._process
            self._end_process()
            process = attempt(self._start, self.hurries)
            if isinstance(process, Failure):
                raise ProcessNotReady(f"The compiling process cannot be started: {process.reason}")
            self._process = process
            atexit.register(self.close)
            log.info("background.started pid=%d", process.pid)
            return process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _finish(self, order: Order, answer: Answer, started: float) -> None:
        """Set an order's answer, whose callbacks run meanwhile."""
        if self._is_closed:
            order.answer.cancel()
            return
        note("second process", order.name, started)
        log.info(
            "background.done call=%s seconds=%.1f waiting=%d reason=%s",
            order.name,
            time.perf_counter() - started,
            self.waiting - 1,
            answer.reason or "-",
        )
        order.answer.set_result(answer)
        self._orders.task_done()


def _copy(paths: Iterable[str], source: Path, target: Path) -> None:
    """Copy files, and replace the path of the one folder by the other's in each. Files that exist stay, unless torch
    rewrites them, or they are functions: one that is damaged is made anew."""
    old, new = os.fsencode(source), os.fsencode(target)
    assert len(old) == len(new)
    for path in paths:
        if (target / path).exists() and not path.endswith((*_REWRITTEN, SUFFIX)):
            continue
        if path.endswith(SUFFIX):
            copy_artifact(source / path, target / path, old, new)
            continue
        with replacing(target / path) as file:
            file.write((source / path).read_bytes().replace(old, new))
        shutil.copymode(source / path, target / path)
