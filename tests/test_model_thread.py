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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from marked_processes import wait_for

from compile_cache import ModelThread


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
        assert self._has_begun.wait(30)

    def run(self) -> None:
        with contextlib.suppress(Cancelled):
            self._has_begun.set()
            self._model.call(self._work)
            while True:  # the cancellation comes later
                time.sleep(0.0001)

    def cancel(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Cancelled))
        self.join(30)
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
        signal.alarm(10)
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
    assert began.wait(30)
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
        first = threads.submit(model.call, lambda: (began.set(), may_end.wait(30), "whole")[-1])
        assert began.wait(30)
        Caller(model, lambda: made.append(1)).cancel()
        may_end.set()
        assert first.result(30) == "whole"
    model.call(int)
    assert made == []


@pytest.mark.timeout(20)
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
