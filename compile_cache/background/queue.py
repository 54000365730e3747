"""The server's side: orders that wait for the second process, and the thread that hands them over."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, PriorityQueue
from typing import TYPE_CHECKING

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import CompileCacheError, Failure, OrderFailed, ProcessDied, ProcessNotReady, attempt
from compile_cache.inductor.make import Answer, Dimensions
from compile_cache.timeline import note
from compile_cache.torch_threads import end_at_exit

if TYPE_CHECKING:
    from compile_cache.inductor.state import ServerState

log = logging.getLogger("compile_cache")

_ATTEMPTS = 2


@dataclass(slots=True, eq=False)
class Order:
    """A call for which code is wanted: the bytes of `hand_over`, whether all its tensors are on a GPU, and the sizes
    that the code leaves open. Orders of the lowest `rank` come first.

    `state` is the server's, taken once the call was served. `answer` is set on the queue's thread; `close` cancels it.
    """

    name: str
    rank: int
    call: bytes
    is_on_gpu: bool = False
    dynamic: Dimensions = ()
    state: ServerState | None = None
    answer: Future[Answer] = field(default_factory=Future)


class OrderQueue:
    """Orders for a compiling process. A daemon thread hands them over, one at a time, once `released` is set.

    The process starts with the first order, and ends after `idle_s` without one. An order gets one more try in a new
    process if its process died, hung or ran out of memory. All methods are thread-safe.
    """

    def __init__(
        self, start: Callable[[], CompilingProcess], limit_s: float, idle_s: float, released: threading.Event
    ) -> None:
        self._start = start
        self._limit_s = limit_s
        self._idle_s = idle_s
        self._server = os.getpid()
        # By rank, and then in the order in which they came. None wakes the thread.
        self._orders: PriorityQueue[tuple[int, int, Order | None]] = PriorityQueue()
        self._numbers = itertools.count()
        self._putting = threading.Lock()
        self.released = released
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process: CompilingProcess | None = None

    def put(self, order: Order) -> None:
        """Queue an order and return at once."""
        with self._putting:
            if self._is_closed:
                order.answer.cancel()
                return
            self._orders.put((order.rank, next(self._numbers), order))
            if self._thread is None:  # a boot that has nothing to compile starts none
                self._start_thread()

    @property
    def waiting(self) -> int:
        """How many orders are not answered. An order is answered when the callbacks of its answer have returned."""
        return self._orders.unfinished_tasks

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
        with self._putting:
            self._is_closed = True
        with self._orders.mutex:
            self._orders.all_tasks_done.notify_all()
        self._orders.put((-1, next(self._numbers), None))
        self.released.set()
        atexit.unregister(self.close)
        with self._starting:
            process = self._process
        if process is not None:
            process.stop()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="compile-cache-orders", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("background.no_thread error=%s Orders wait until the next one is made.", error)
            return
        self._thread = thread
        end_at_exit(thread, self.close)

    def _run(self) -> None:
        self.released.wait()
        while (order := self._next()) is not None:
            started, orders = time.perf_counter(), [order]
            answer = attempt(self._answer, order)
            if isinstance(answer, Failure):
                if isinstance(answer.error, ProcessNotReady):  # the others would fail alike; later ones are tried again
                    orders += self._take_all()
                known = isinstance(answer.error, CompileCacheError)
                answer = Answer(reason=str(answer.error) if known else answer.reason)
            for each in orders:
                self._finish(each, answer, started)
        for order in self._take_all():
            order.answer.cancel()

    def _next(self) -> Order | None:
        """The next order, once there is one; None after `close`. Meanwhile an idle process is ended."""
        while not self._is_closed:
            try:
                return self._orders.get(timeout=None if self._process is None else self._idle_s)[-1]
            except Empty:
                self._end_process()
        return None

    def _take_all(self) -> list[Order]:
        """Take all orders out of the queue."""
        taken = [self._orders.get()[-1] for _ in range(self._orders.qsize())]
        return [order for order in taken if order is not None]

    def _answer(self, order: Order, number: int = 1) -> Answer:
        """The process's answer. If a process may be to blame for a failure, a new one gets one more try.

        Raises:
            OrderFailed, ProcessDied: of the last try.
        """
        try:
            content = pickle.dumps((order.call, order.state, order.dynamic))
            process = self._ensure_process()
            log.info("background.begin call=%s waiting=%d", order.name, self.waiting)
            answer: Answer = pickle.loads(process.answer(content, self._limit_s))
            return answer
        except (OrderFailed, ProcessDied) as error:
            if not self._is_closed:  # `close` stopped the process
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
        if self._process is not None and not self._process.is_alive:
            self._end_process()
        with self._starting:  # `close` then waits for the start, and stops the process
            if self._is_closed:
                raise ProcessDied("The queue is closed.")
            if self._process is None:
                started = attempt(self._start)
                if isinstance(started, Failure):
                    raise ProcessNotReady(f"The compiling process cannot be started: {started.reason}")
                self._process = started
                atexit.register(self.close)
                log.info("background.started pid=%d", self._process.pid)
            return self._process

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
