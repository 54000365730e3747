"""One thread that calls a model: `setup` and all predictions use it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from queue import SimpleQueue

P = ParamSpec("P")
T = TypeVar("T")

# How soon a caller that waits learns that it was cancelled: Python tells it between two instructions.
_POLL_S = 0.05


class ThreadOfModel(threading.Thread):
    """The thread that a `ModelThread` calls its model on."""


class ModelThread:
    """Calls a model, one call after another.

    Cog calls `run()` on changing threads, and cuDNN keeps its plans for each: on an H200, the first attention of each
    shape takes 60 ms on each thread, and the first convolution 3 ms. cuBLAS keeps memory for each.

        def setup(self):
            self.thread = ModelThread()
            ...
            boot.warm_up(self.run, prompt="a warm-up")

        def run(self, prompt: str) -> Path:
            with self.boot.prediction():
                return self.thread.call(self.draw, prompt)

    It does not delay the exit.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._start()

    def _start(self) -> None:
        from queue import SimpleQueue

        self._calls: SimpleQueue[_Call] = SimpleQueue()
        self._thread = ThreadOfModel(target=self._run, name="model", daemon=True)
        self._thread.start()
        self._process = os.getpid()

    def _put(self, call: _Call) -> None:
        if self._process != os.getpid():  # a fork has none of the process's other threads
            with self._starting:
                if self._process != os.getpid():
                    self._start()
        self._calls.put(call)

    def begin(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function`, which handles its own errors, on the thread. Do not wait."""
        self._put(_Call(partial(function, *args)))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on the thread, with the caller's context variables.

        What is raised in the caller meanwhile, such as Cog's cancellation, is raised in `function` too, and the caller
        waits for its end. A `function` may itself call others here.

        Raises:
            BaseException: any of `function`.
        """
        from contextvars import copy_context

        if threading.current_thread() is self._thread:
            return function(*args, **kwargs)
        call = _Call(partial(copy_context().run, function, *args, **kwargs))
        try:
            self._put(call)
            call.wait()
        except BaseException as error:
            call.interrupt(type(error), self._thread.ident or 0)
            call.wait()
            call.error = None
            raise
        raised, call.error = call.error, None
        try:
            if raised is not None:
                raise raised
            return call.result  # type: ignore[no-any-return]
        finally:
            del raised  # its traceback has this frame, and would keep all tensors of the call

    def _run(self) -> None:
        while True:
            self._calls.get().make()


class _Call:
    """A call that waits, runs, or has ended."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._work = work
        self._lock = threading.Lock()
        self._is_running = self._is_over = self._has_ended = False
        # Held until the call has ended. An exception that is raised in a thread from outside can leave the locks of
        # Python's events and conditions held, but not this one.
        self._ending = threading.Lock()
        self._ending.acquire()

    def make(self) -> None:
        """Make the call, unless it was interrupted before."""
        try:
            with self._lock:
                self._is_running = not self._is_over
            if self._is_running:
                try:
                    self.result = self._work()
                finally:
                    with self._lock:
                        was_interrupted, self._is_over = self._is_over, True
                    if was_interrupted:
                        # In place of what may wait to be raised. Taken back, Python 3.11 and 3.12 would look for it in
                        # each loop and call of each thread from then on.
                        _raise_in(threading.get_ident(), InterruptedError)
        except BaseException as error:
            self.error = error
        del self._work
        self._has_ended = True
        self._ending.release()

    def wait(self) -> None:
        """Wait until the call has ended."""
        while not self._has_ended:
            self._ending.acquire(timeout=_POLL_S)

    def interrupt(self, kind: type[BaseException], thread: int) -> None:
        """Raise `kind` in `thread` if the call runs there; let it not begin otherwise."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            if self._is_running:
                _raise_in(thread, kind)
            else:
                self._has_ended = True


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread before its next instruction, in place of what waits to be raised there."""
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))
