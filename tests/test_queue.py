"""The thread that hands orders to the compiling process: starts, ends, second tries, and callbacks that fail."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from background_handlers import order
from marked_processes import PATIENCE_S, wait_for
from programs import run_program

from compile_cache.background.child import CompilingProcess
from compile_cache.background.orders import Order, OrderQueue


class Started:
    """Starts processes in a folder, and counts them. `fault` is raised instead, where there is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.factory = "make_pickled"
        self.setup = b""
        self.fault: Exception | None = None
        self.processes: list[CompilingProcess] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, hurries: bool) -> CompilingProcess:
        if self.fault is not None:
            raise self.fault
        handler = f"background_handlers:{self.factory}"
        self.processes.append(CompilingProcess(handler, self.setup, self._folder / "log", os.environ))
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return self.processes[-1]


@pytest.fixture
def started(tmp_path) -> Started:
    return Started(tmp_path)


@pytest.fixture
def make_queue(started) -> Iterator[Callable[..., OrderQueue]]:
    made: list[OrderQueue] = []

    def make(limit_s: float = PATIENCE_S, idle_s: float = PATIENCE_S) -> OrderQueue:
        made.append(OrderQueue(started, limit_s, idle_s))
        return made[-1]

    yield make
    for queue in made:
        queue.close()
    assert not any(process.is_alive for process in started.processes)


@pytest.fixture
def held(make_queue) -> OrderQueue:
    """A queue that has not begun."""
    return make_queue()


@pytest.fixture
def queue(held) -> OrderQueue:
    held.release()
    return held


def put(queue: OrderQueue, *contents: bytes, ranks: tuple[int, ...] = ()) -> list[Order]:
    """Make an order of each."""
    ranks = ranks or (0,) * len(contents)
    orders = [Order(str(n), (ranks[n],), content) for n, content in enumerate(contents)]
    for each in orders:
        queue.put(each)
    return orders


def answer(queue: OrderQueue, content: bytes) -> Any:
    """Make one order and wait for its answer."""
    (made,) = put(queue, content)
    assert queue.wait(PATIENCE_S)
    return made.answer.result(0)


def finish(queue: OrderQueue) -> None:
    """Begin what waits, and wait for all of it."""
    queue.release()
    assert queue.wait(PATIENCE_S)


def has_process(queue: OrderQueue) -> bool:
    process = queue._process
    return process is not None and process.is_alive


def test_orders_begin_once_released_lowest_rank_first_by_one_process_on_another_thread(held, started):
    done: list[tuple[str, int]] = []
    orders = put(held, *[order("echo", size=number) for number in range(4)], ranks=(2, 0, 1, 0))
    for each in orders:
        each.answer.add_done_callback(lambda _, name=each.name: done.append((name, threading.get_ident())))
    assert not held.wait(0.5)
    assert (held.waiting, started.processes) == (4, [])
    finish(held)
    assert [name for name, _ in done] == ["1", "3", "2", "0"]
    assert [each.answer.result(0).content for each in orders] == [b"e" * number for number in range(4)]
    assert len({thread for _, thread in done} | {threading.get_ident()}) == 2
    assert has_process(held)
    assert (held.waiting, len(started.processes)) == (0, 1)


def test_orders_that_begin_in_time_are_finished_and_the_others_wait_for_the_release(held, started, monkeypatch):
    """That ends the process that has hurried."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[-1], perf_counter=time.perf_counter, sleep=time.sleep)
    monkeypatch.setattr("compile_cache.background.orders.time", clock)
    first, second, late = put(held, *[order("echo", size=1)] * 3)
    second.answer.add_done_callback(lambda _: now.append(2.0))
    for _ in range(2):
        held.finish(1.0)
        assert [each.answer.done() for each in (first, second, late)] == [True, True, False]
        assert (held.waiting, held.hurries, len(started.processes)) == (1, True, 1)
    finish(held)
    assert late.answer.result(0).content == b"e"
    assert (held.hurries, [process.is_alive for process in started.processes]) == (False, [False, True])


def test_a_process_that_began_too_early_is_replaced_and_one_that_nobody_asks_for_is_idle(make_queue, started):
    queue = make_queue()
    queue.begin()
    queue.begin_anew()
    (made,) = put(queue, order("describe"))
    queue.finish(math.inf)
    early, later = started.processes
    assert (early.is_alive, json.loads(made.answer.result(0).content)["pid"]) == (False, later.pid)
    queue = make_queue(idle_s=0.1)
    queue.begin()
    wait_for(lambda: not started.processes[-1].is_alive)


@pytest.mark.parametrize("end", [OrderQueue.release, OrderQueue.close])
def test_a_process_that_got_no_order_ends_with_the_setup_and_none_begins_later(held, started, end):
    held.begin()
    end(held)
    assert [process.is_alive for process in started.processes] == [False]
    held.begin()
    assert len(started.processes) == 1


def test_orders_between_two_waits_begin_with_the_second_and_after_the_release_at_once(held):
    put(held, order("echo", size=1))
    held.finish(math.inf)
    (between,) = put(held, order("echo", size=1))
    assert not held.wait(0.5)
    held.finish(math.inf)
    assert between.answer.done()
    held.release()
    held.finish(math.inf)
    assert not held.hurries
    assert answer(held, order("echo", size=1)).content == b"e"


def test_a_process_begins_before_the_first_order_and_answers_it_unless_all_are_released(held, make_queue, started):
    held.begin()
    held.begin()
    (ahead,) = started.processes
    assert held.hurries
    (made,) = put(held, order("describe"))
    held.begin()
    held.finish(math.inf)
    assert json.loads(made.answer.result(0).content)["pid"] == ahead.pid
    assert started.processes == [ahead]
    held.release()
    released = make_queue()
    released.release()
    for queue in (held, released):
        queue.begin()
        assert (queue.hurries, has_process(queue)) == (False, False)


def test_orders_of_many_threads_start_one_thread_and_are_all_answered(queue, monkeypatch):
    end = mock.Mock(side_effect=lambda *_: time.sleep(0.1))
    monkeypatch.setattr("compile_cache.background.orders.end_at_exit", end)
    with ThreadPoolExecutor(8) as threads:
        made = [*threads.map(lambda _: put(queue, *[order("echo", size=1)] * 10), range(8))]
    assert queue.wait(PATIENCE_S)
    assert [each.answer.done() for orders in made for each in orders] == [True] * 80
    assert end.call_count == 1


def test_idle_process_ends_and_the_next_order_starts_another(make_queue, started):
    queue = make_queue(idle_s=0.2)
    queue.release()
    first = answer(queue, order("describe"))
    wait_for(lambda: not has_process(queue))
    assert json.loads(first.content)["pid"] != json.loads(answer(queue, order("describe")).content)["pid"]
    assert len(started.processes) == 2


def test_process_that_dies_idle_costs_the_next_order_no_attempt(queue, started, caplog):
    answer(queue, order("describe"))
    os.kill(started.processes[0].pid, 9)
    wait_for(lambda: not has_process(queue))
    assert answer(queue, order("echo", size=1)).content == b"e"
    assert len(started.processes) == 2
    assert "background.failed" not in caplog.text


@pytest.mark.parametrize("how", ["death", "memory"])
def test_order_that_fails_once_is_answered_by_a_new_process(queue, started, tmp_path, how):
    done = answer(queue, order("fail_once", folder=str(tmp_path), how=how))
    assert (done.content, done.reason) == (b"done", "")
    assert len(started.processes) == 2


@pytest.mark.parametrize(
    ("content", "reason", "processes"),
    [
        (order("die"), "was killed by SIGKILL", 3),
        (order("raise", error="MemoryError", message=""), "ValueError: wrapped", 3),
        (order("hang", folder="/tmp"), "gave no answer in 2 s", 3),
        (order("fail", message="disk is full"), r"OSError: \[Errno 28\] disk is full", 1),  # its own: no second try
    ],
)
def test_order_that_fails_twice_is_given_up_and_not_the_next(make_queue, started, tmp_path, content, reason, processes):
    queue = make_queue(limit_s=2.0 if b"hang" in content else PATIENCE_S)
    bad, good = put(queue, content.replace(b"/tmp", str(tmp_path).encode()), order("echo", size=1))
    # On a busy machine, a process may take longer than the short limit to begin.
    bad.answer.add_done_callback(lambda _: setattr(queue, "_limit_s", PATIENCE_S))
    finish(queue)
    assert re.search(reason, bad.answer.result(0).reason)
    assert good.answer.result(0).content == b"e"
    assert len(started.processes) == processes


def test_callback_that_fails_is_logged_and_one_may_make_the_next_order(held, caplog):
    first, second = put(held, *[order("echo", size=1)] * 2)
    later: list[Order] = []

    def fail(_: Any) -> None:
        raise LookupError("no place for it")

    first.answer.add_done_callback(fail)
    second.answer.add_done_callback(lambda _: later.extend(put(held, order("echo", size=2))))
    finish(held)
    assert "no place for it" in caplog.text
    assert [each.answer.result(0).content for each in later] == [b"ee"]


@pytest.mark.parametrize("fault", [OSError(12, "Cannot allocate memory"), RuntimeError("no thread"), "make_nothing"])
def test_every_order_is_answered_when_no_process_can_be_prepared_and_a_later_one_is_done(held, started, fault):
    orders = put(held, *[order("echo", size=1)] * 3)
    if isinstance(fault, str):
        started.factory, words = fault, "could not prepare itself: LookupError"
    else:
        started.fault, words = fault, f"cannot be started: {type(fault).__name__}: {fault}"
    finish(held)
    assert all(words in each.answer.result(0).reason for each in orders)
    assert len(started.processes) == (2 if isinstance(fault, str) else 0)
    started.factory, started.fault = "make_pickled", None
    assert answer(held, order("echo", size=1)).content == b"e"


def test_answers_that_cannot_be_read_end_no_thread(queue, started):
    started.factory = "make_nonsense"
    for _ in range(2):
        assert "UnpicklingError" in answer(queue, order("echo", size=1)).reason


def test_process_that_crashes_once_while_it_is_prepared_is_started_again(queue, started, tmp_path):
    started.factory, started.setup = "make_once", str(tmp_path).encode()
    assert answer(queue, order("echo", size=1)).content == b"e"
    assert len(started.processes) == 2


def test_close_cancels_what_waits_and_ends_the_process(queue, started, tmp_path, caplog):
    orders = put(queue, order("hang", folder=str(tmp_path)), order("echo", size=1))
    wait_for((tmp_path / "hangs").exists)
    with caplog.at_level(logging.INFO, "compile_cache"):
        queue.close()
        assert not queue.wait(PATIENCE_S)
    assert not has_process(queue)
    orders += put(queue, order("echo", size=1))
    queue.close()
    wait_for(lambda: all(each.answer.cancelled() for each in orders))
    time.sleep(0.5)  # a thread that went on would start another process
    assert len(started.processes) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    assert "region.failed" not in caplog.text


def test_close_ends_a_process_whose_start_is_under_way(make_queue, started, tmp_path):
    queue = make_queue(limit_s=10 * PATIENCE_S)  # the order's own limit does not end the process
    queue.release()
    started.may_end.clear()
    put(queue, order("hang", folder=str(tmp_path)))
    assert started.begun.wait(PATIENCE_S)
    closing = threading.Thread(target=queue.close)
    closing.start()
    closing.join(0.3)
    put(queue, order("hang", folder=str(tmp_path)))  # it waits for no start
    started.may_end.set()
    closing.join(PATIENCE_S)
    wait_for(lambda: not started.processes[0].is_alive)


EXITING = """
import logging, sys, threading
from pathlib import Path
from test_queue import OrderQueue, Started, order, put, wait_for
logging.basicConfig(level=logging.WARNING)
folder = Path(sys.argv[1])
started = Started(folder)
queue = OrderQueue(started, 600.0, 600.0)
put(queue, order("hang", folder=str(folder)))
queue.release()
wait_for((folder / "hangs").exists)
print(started.processes[0].pid)
"""


def test_server_that_exits_stops_its_order_and_says_nothing(tmp_path):
    done = run_program(EXITING, tmp_path, folder=Path(__file__).parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert not Path(f"/proc/{int(done.stdout)}").exists()
