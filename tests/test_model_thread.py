"""One thread calls the model, whichever thread asks."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from marked_processes import PATIENCE_S, wait_for
from programs import run_program

from compile_cache import ModelThread
from compile_cache.lifecycle import model_thread


class Cancelled(BaseException):
    """As Cog raises it in a cancelled prediction."""


@pytest.fixture
def model() -> ModelThread:
    return ModelThread()


class Caller(threading.Thread):
    """Calls `work` on a model's thread until it is cancelled."""

    def __init__(self, model: ModelThread, work: Callable[[], object]) -> None:
        super().__init__()
        self._model, self._work = model, work
        self._has_begun = threading.Event()
        self.start()
        assert self._has_begun.wait(PATIENCE_S)

    def run(self) -> None:
        with contextlib.suppress(Cancelled):
            self._has_begun.set()
            self._model.call(self._work)
            while True:  # the cancellation comes later
                time.sleep(0.0001)

    def cancel(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Cancelled))
        self.join(PATIENCE_S)
        assert not self.is_alive()


def test_all_callers_are_served_by_one_thread_that_is_none_of_theirs(model):
    with ThreadPoolExecutor(4) as threads:
        served = list(threads.map(lambda _: model.call(threading.get_ident), range(20)))
    assert len(set(served)) == 1
    assert served[0] != threading.get_ident()


def test_a_call_may_call_again(model):
    assert model.call(lambda: model.call(threading.get_ident)) == model.call(threading.get_ident)


def test_a_call_has_the_callers_context_its_arguments_and_its_result(model):
    name = contextvars.ContextVar("name", default="")
    name.set("the name")
    assert model.call(lambda *args, **kwargs: (name.get(), args, kwargs), 1, two=2) == ("the name", (1,), {"two": 2})


def test_a_fork_has_a_thread_of_its_own(model):
    if (child := os.fork()) == 0:
        signal.alarm(60)
        os._exit(model.call(lambda: 0))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_cancellation_ends_the_work_before_the_caller_goes_on(model):
    began, seen = threading.Event(), []

    def work() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.001)
        except Cancelled as error:
            seen.append(error)
            raise

    caller = Caller(model, work)
    assert began.wait(PATIENCE_S)
    caller.cancel()
    assert len(seen) == 1
    assert model.call(lambda: "served") == "served"


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "cancelled"])
def test_a_call_that_fails_or_is_cancelled_keeps_nothing_alive_and_the_next_one_is_served(model, fails):
    class Tensor:
        pass

    def work() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        while not fails:
            time.sleep(0.001)
        raise ValueError

    kept: list[weakref.ref[Tensor]] = []
    gc.disable()
    try:
        if fails:
            with pytest.raises(ValueError):  # noqa: PT011
                model.call(work)
        else:
            caller = Caller(model, work)
            wait_for(lambda: kept)
            caller.cancel()
        assert model.call(lambda: 1) == 1
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_cancelled_call_that_waits_is_not_made_and_the_one_before_it_goes_on(model):
    began, may_end, made = threading.Event(), threading.Event(), []
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(model.call, lambda: (began.set(), may_end.wait(PATIENCE_S), "whole")[-1])
        assert began.wait(PATIENCE_S)
        Caller(model, lambda: made.append(1)).cancel()
        may_end.set()
        assert first.result(PATIENCE_S) == "whole"
    model.call(int)
    assert made == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("cancels", [False, True], ids=["ended", "cancelled"])
def test_no_call_leaves_an_exception_that_python_looks_for_from_then_on(model, cancels):
    """Python 3.11 and 3.12 would look for it in each loop and call of each thread: calls took half as long again. A
    function that 3.11 profiles never begins then."""

    def profiled() -> int:
        sys.setprofile(lambda *_: None)
        try:
            return sum(abs(number) for number in range(100))
        finally:
            sys.setprofile(None)

    model.call(int)
    if cancels:
        Caller(model, lambda: time.sleep(0.2)).cancel()
    assert model.call(profiled) == 4950


def test_a_cancellation_at_any_moment_leaves_a_thread_that_serves(model):
    """Also one that comes just as the work begins or ends, or while its caller begins to wait."""
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for number in range(1000):
            Caller(model, lambda length=number * 7 % 3000: sum(range(length))).cancel()
            assert model.call(lambda: "served") == "served"
    finally:
        sys.setswitchinterval(interval_s)


# torch's modes.

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "autocast without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "device": lambda: torch.device("meta"),
}


def modes() -> list[Any]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    made = torch.ones(2, 2) @ torch.ones(2, 2)
    return [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), *autocast, made.device, made.dtype]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_call_has_torchs_modes_of_its_caller_and_leaves_none(model, mode):
    before = modes()
    with mode():
        assert model.call(modes) == modes()
    assert model.call(modes) == before
    model.call(mode().__enter__)
    assert model.call(modes) == before


@pytest.mark.gpu
def test_a_call_has_the_callers_cuda_device_and_stream(model):
    """The last GPU, where a machine has several."""
    before = model.call(torch.cuda.current_stream)
    with torch.cuda.device(torch.cuda.device_count() - 1), torch.cuda.stream(torch.cuda.Stream()):
        assert model.call(torch.cuda.current_stream) == torch.cuda.current_stream()
        assert model.call(torch.cuda.current_device) == torch.cuda.current_device()
    assert model.call(torch.cuda.current_stream) == before


# Generators.

VARIABLE = contextvars.ContextVar("variable", default=0)


def counting(ended: list[int]) -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        ended.append(threading.get_ident())


def test_each_step_of_a_generator_is_made_on_the_thread(model):
    def replying() -> Iterator[Any]:
        reply = yield threading.get_ident()
        with pytest.raises(KeyError):
            yield reply, threading.get_ident()
        return threading.get_ident()

    here = model.call(threading.get_ident)
    items = model.call(replying)
    assert next(items) == here
    assert items.send("reply") == ("reply", here)
    with pytest.raises(StopIteration) as ended:
        items.throw(KeyError())
    assert ended.value.value == here


@pytest.mark.parametrize("leave", ["close", "drop", "collect"])
def test_a_generator_that_its_caller_leaves_ends_on_the_thread(model, leave):
    ended: list[int] = []
    items = model.call(counting, ended)
    next(items)
    if leave == "close":
        items.close()
    elif leave == "collect":
        circle = [items]
        circle.append(circle)
        del circle
    del items
    gc.collect()
    assert ended == [model.call(threading.get_ident)]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_generator_keeps_the_modes_of_its_call_and_its_own(model, mode):
    def body() -> Iterator[Any]:
        yield modes(), VARIABLE.get()
        with mode():
            token = VARIABLE.set(1)
            inside = modes()
            yield
            assert (modes(), VARIABLE.get()) == (inside, 1)
            VARIABLE.reset(token)
        yield modes(), VARIABLE.get()

    before = modes()
    with mode():
        items, outside = model.call(body), modes()
    assert next(items) == (outside, 0)
    next(items)
    assert (modes(), VARIABLE.get()) == (model.call(modes), model.call(VARIABLE.get)) == (before, 0)
    assert next(items) == (outside, 0)


def test_torch_may_be_imported_in_a_call():
    done = run_program("""
from compile_cache import ModelThread
def body():
    import torch
    with torch.inference_mode():
        yield
        assert torch.is_inference_mode_enabled()
    yield torch.is_inference_mode_enabled()
assert [*ModelThread().call(body)] == [None, False]
""")
    assert done.returncode == 0, done.stderr


async def awaited() -> None:
    pass


async def streamed() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize("function", [awaited, streamed, lambda: awaited(), partial(awaited)])
def test_what_is_asynchronous_is_refused_by_name(model, function):
    with pytest.raises(TypeError, match=r"(awaited|streamed) is asynchronous.*asyncio.to_thread"):
        model.call(function)


# Calls that wait for the thread from inside it.


def inner() -> str:
    return "served"


def by_a_result(model: ModelThread, pool: ThreadPoolExecutor) -> Any:
    return pool.submit(model.call, inner).result()


def by_a_pools_end(model: ModelThread, _: ThreadPoolExecutor) -> Any:
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(model.call, inner) for _ in range(2)]
    return futures[1].result()


def by_another_model(model: ModelThread, pool: ThreadPoolExecutor) -> Any:
    return ModelThread().call(by_a_result, model, pool)


def by_a_circle(model: ModelThread, _: ThreadPoolExecutor) -> Any:
    return ModelThread().call(ModelThread().call, model.call, inner)


def by_an_item(model: ModelThread, pool: ThreadPoolExecutor) -> Any:
    yield by_a_result(model, pool)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outer", [by_a_result, by_a_pools_end, by_another_model, by_a_circle, by_an_item])
def test_a_call_that_its_thread_waits_for_fails_and_names_both(model, outer, monkeypatch):
    monkeypatch.setattr(model_thread, "_POLLS_A_LOOK", 1)
    with ThreadPoolExecutor() as pool:
        with pytest.raises(RuntimeError, match=rf"inner cannot begin .*{outer.__name__} runs there"):
            [*model.call(outer, model, pool)]
        assert model.call(inner) == "served"


@pytest.mark.timeout(120)
def test_a_call_that_only_waits_long_is_served(model, monkeypatch):
    """Its thread waits for another future, for an event, or for the call with a limit."""
    monkeypatch.setattr(model_thread, "_POLLS_A_LOOK", 1)
    may_end = threading.Event()

    def waiting() -> None:
        waits = pool.submit(model.call, inner)
        calls.append(waits)
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        pool.submit(may_end.wait, 0.3).result()
        may_end.wait(0.3)

    calls: list[Any] = []
    with ThreadPoolExecutor() as pool:
        model.call(waiting)
        assert calls[0].result(PATIENCE_S) == "served"


# The exit of a program.

EXIT = """
import sys, threading
import torch
from compile_cache import ModelThread, torch_threads
torch_threads._LONGEST_WAIT_S = 0.2
model, has_begun = ModelThread(), threading.Event()
def call():
    has_begun.set()
    torch.ones(500, 500) @ torch.ones(500, 500)
def calls(): [call() for _ in iter(int, 1)]
{begin}
has_begun.wait()
sys.exit(3)
"""


@pytest.mark.parametrize(
    "begin",
    [
        "model.begin(calls)",
        "threading.Thread(target=lambda: [model.call(call) for _ in iter(int, 1)], daemon=True).start()",
    ],
    ids=["one call", "many calls"],
)
def test_a_program_that_ends_while_the_thread_is_in_torch_keeps_its_exit_code(begin):
    done = run_program(EXIT.format(begin=begin))
    assert done.returncode == 3, done.stderr
