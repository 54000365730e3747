"""One thread that calls a model: `setup` and all predictions use it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from compile_cache.errors import attempt

if TYPE_CHECKING:
    from pathlib import Path
    from queue import SimpleQueue

    from compile_cache.calls.caller import Caller
    from compile_cache.calls.first_calls import Notes

P = ParamSpec("P")
T = TypeVar("T")

# How soon a caller that waits learns that it was cancelled: Python tells it between two instructions.
_POLL_S = 0.05
# After so many polls each, about a second, a caller asks whether its call can still begin.
_POLLS_A_LOOK = 20


class ModelThread:
    """Calls a model, one call after another.

    Cog calls `run()` on changing threads, and cuDNN keeps its plans for each: on an H200, the first attention of each
    shape takes 60 ms on each thread, and the first convolution 3 ms. cuBLAS keeps memory for each.

        def setup(self):
            self.thread = self.boot.model_thread()
            ...
            self.boot.warm_up(self.run, prompt="a warm-up")

        def run(self, prompt: str) -> Path:
            with self.boot.prediction():
                return self.thread.call(self.draw, prompt)

    The exit waits at most 2 s for a call that still runs.
    """

    def __init__(self) -> None:
        self._starting = threading.Lock()
        # Python would close a generator that it collects together with its iterator on any thread.
        self._bodies: set[Generator[Any, Any, Any]] = set()
        self._notes: Notes | None = None
        self._is_noting = False
        self._start()

    def _start(self) -> None:
        from queue import SimpleQueue

        from compile_cache.torch_threads import end_at_exit

        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._running: str | None = ""  # a call's name; None once the thread has ended
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        end_at_exit(self._thread, partial(self._calls.put, None))
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
        from compile_cache.calls.caller import Caller

        self._put(_Call(self, function, Caller(), partial(function, *args)))

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` on the thread, with the caller's context variables and torch's modes.

        What is raised in the caller meanwhile, such as Cog's cancellation, is raised in `function` too, and the caller
        waits for its end. A `function` may itself call others here. If it returns a generator, the thread also makes
        each item of that.

        Raises:
            BaseException: any of `function`.
            TypeError: `function` is asynchronous.
            RuntimeError: the call would never begin, because the thread waits for the caller, or the program ends.
        """
        from compile_cache.calls.caller import Caller

        state = Caller()
        result: Any = self._made(function, state, partial(function, *args, **kwargs))
        if isinstance(result, Coroutine | AsyncGenerator):
            if isinstance(result, Coroutine):
                result.close()  # or Python warns that nothing awaits it
            raise TypeError(
                f"{_name(result)} is asynchronous: its body would run on the caller's thread, not on the model's. Give "
                "thread.call() a plain function. Asynchronous code awaits asyncio.to_thread(thread.call, function)."
            )
        return self._items(result, state) if isinstance(result, Generator) else result  # type: ignore[return-value]

    def make_first_calls(self, path: Path, is_over: Callable[[], bool]) -> None:
        """Make the slow calls on the thread that an earlier boot has written into a file, if it has. Do not wait."""
        if path.exists():
            from compile_cache.calls.first_calls import make

            self.begin(attempt, make, path, is_over)

    @contextlib.contextmanager
    def noting(self, path: Path) -> Iterator[None]:
        """On a GPU, while the context lasts, note which calls on the thread are slow. Then write them into a file, with
        those of earlier contexts, unless an earlier boot has done so."""
        from compile_cache.weights.early_weights import has_gpu

        if (path.exists() and self._notes is None) or not has_gpu():
            yield
            return
        from compile_cache.calls.first_calls import Notes

        self._notes, self._is_noting = self._notes or Notes(), True
        try:
            with self._notes if threading.current_thread() is self._thread else contextlib.nullcontext():
                yield
        finally:
            self._is_noting = False
        attempt(path.write_text, str(self._notes))

    def _items(self, body: Generator[Any, Any, T], state: Caller) -> Generator[Any, Any, T]:
        """What `body` yields and returns. The thread makes each step of it, and its end if the caller leaves it."""
        step = partial(body.send, None)
        self._bodies.add(body)
        try:
            while True:
                item = self._made(body, state, step)
                try:
                    step = partial(body.send, (yield item))
                except BaseException as error:
                    step = partial(body.throw, error)
                del item
        except StopIteration as end:  # of the body
            return end.value  # type: ignore[no-any-return]
        except BaseException:
            self.begin(attempt, state.run, body.close)  # a step may not have begun
            raise
        finally:
            self._bodies.remove(body)

    def _made(self, function: object, state: Caller, work: Callable[[], T]) -> T:
        """What `work` of `function` returns on the thread, in `state`.

        Raises:
            BaseException: any of `work`, or of the waiting.
        """
        if threading.current_thread() is self._thread:
            return state.run(work)
        if self._notes is not None and self._is_noting:
            work = partial(self._notes.take, work)
        call = _Call(self, function, state, work)
        try:
            self._put(call)
            call.wait()
        except BaseException as error:
            call.interrupt(type(error))
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
        while call := self._calls.get():
            self._running = call.name
            call.run()
            del call  # or its result would live until the next one
        self._running = None


class _Call:
    """A call that waits, runs, or has ended."""

    def __init__(self, model: ModelThread, function: object, state: Caller, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self._model, self.name = model, _name(function)
        self._state, self._work = state, work
        self._lock = threading.Lock()
        self._is_running = self._is_over = self._has_ended = False
        # Held until the call has ended. An exception that is raised in a thread from outside can leave the locks of
        # Python's events and conditions held, but not this one.
        self._ending = threading.Lock()
        self._ending.acquire()

    @property
    def ident(self) -> int | None:
        """The thread that makes the call; None once it has ended."""
        return None if self._has_ended else self._model._thread.ident

    def run(self) -> None:
        """Make the call, unless it was interrupted before."""
        try:
            self._state.run(self._run)  # no interruption reaches the setting of modes
        except BaseException as error:
            self.error = error
        del self._state, self._work
        self._has_ended = True
        self._ending.release()

    def _run(self) -> None:
        with self._lock:
            self._is_running = not self._is_over
        if self._is_running:
            try:
                self.result = self._work()
            finally:
                with self._lock:
                    was_interrupted, self._is_over = self._is_over, True
                if was_interrupted:
                    # In place of what may wait to be raised. Taken back, Python 3.11 and 3.12 would look for it in each
                    # loop and call of each thread from then on.
                    _raise_in(threading.get_ident(), InterruptedError)

    def wait(self) -> None:
        """Wait until the call has ended.

        Raises:
            RuntimeError: it would never begin.
        """
        name, model = self.name, self._model
        for polls in count(1):
            if self._has_ended:
                return
            if model._running is None:  # an exception from outside would break the thread's own is_alive()
                raise RuntimeError(f"{name} cannot begin on the model's thread, which has ended with the program")
            self._ending.acquire(timeout=_POLL_S)
            if polls % _POLLS_A_LOOK == 0 and not self._is_running and _waits_for_caller(model._thread):
                raise RuntimeError(
                    f"{name} cannot begin on the model's thread: {model._running} runs there, and waits for the thread "
                    f"that calls {name}. Call {name} in {model._running} itself, or do not wait for it there."
                )

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise `kind` in the call if it runs; let it not begin otherwise."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            if self._is_running:
                _raise_in(self._model._thread.ident or 0, kind)
            else:
                self._has_ended = True


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", function))


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise `kind` in a thread before its next instruction, in place of what waits to be raised there."""
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _waits_for_caller(thread: threading.Thread) -> bool:
    """Whether `thread` waits for the calling one, also by way of others: each for a thread's end, for a future that a
    thread of a pool works at, or for a call on a model's thread, and without a limit of time.

    Other ways to wait, such as for an event, cannot be told from one that ends. A thread that was seen to wait for one
    that waits does not go on, so what is found stays true.
    """
    from concurrent.futures import Future
    from concurrent.futures.thread import _WorkItem
    from traceback import walk_stack

    waits = [each.__code__ for each in (threading.Thread.join, Future.result, Future.exception, _Call.wait)]
    frames, ident, caller = sys._current_frames(), thread.ident, threading.get_ident()
    stacks = {each: [frame for frame, _ in walk_stack(top)] for each, top in frames.items()}
    working = ((f, each) for each, stack in stacks.items() for f in stack if f.f_code is _WorkItem.run.__code__)
    workers = {f.f_locals["self"].future: each for f, each in working}
    while ident in stacks and ident != caller:
        known = (f.f_locals for f in stacks.pop(ident) if f.f_code in waits)
        awaited = next((names["self"] for names in known if names.get("timeout") is None), None)
        ident = workers.get(awaited) or getattr(awaited, "ident", None)
    return ident == caller
