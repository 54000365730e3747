"""The thread that hands jobs to the compiling process: starts, ends, second tries, and callers that fail."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from background_handlers import order
from boots import python_path
from marked_processes import PATIENCE_S, wait_for

from compile_cache.background.child import CompilingProcess
from compile_cache.background.queue import Done, Jobs


class Started:
    """Starts processes in a folder, and counts them. `fault` is raised instead, where there is one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.factory = "make"
        self.setup = b""
        self.fault: Exception | None = None
        self.processes: list[CompilingProcess] = []
        self.begun = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self) -> CompilingProcess:
        if self.fault is not None:
            raise self.fault
        handler = f"background_handlers:{self.factory}"
        self.processes.append(CompilingProcess.start(handler, self.setup, self._folder / "log", os.environ))
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)
        return self.processes[-1]


@pytest.fixture
def started(tmp_path) -> Started:
    return Started(tmp_path)


@pytest.fixture
def make_jobs(started) -> Iterator[Callable[..., Jobs]]:
    made: list[Jobs] = []

    def make(job_timeout_s: float = PATIENCE_S, idle_s: float = PATIENCE_S) -> Jobs:
        made.append(Jobs(started, job_timeout_s, idle_s))
        return made[-1]

    yield make
    for jobs in made:
        jobs.close()
    assert not any(process.is_alive for process in started.processes)


def has_process(jobs: Jobs) -> bool:
    process = jobs._process
    return process is not None and process.is_alive


def do(jobs: Jobs, content: bytes, name: str = "a job") -> Done:
    """Submit one job and wait for it."""
    done: list[Done] = []
    jobs.submit(name, content, done.append)
    assert jobs.wait(PATIENCE_S)
    return done[0]


def test_jobs_are_done_in_their_order_by_one_process_on_another_thread(make_jobs, started):
    jobs = make_jobs()
    assert not has_process(jobs)
    done: list[Done] = []
    threads: set[int] = set()

    def take(it: Done) -> None:
        done.append(it)
        threads.add(threading.get_ident())

    for number in range(5):
        jobs.submit(str(number), order("echo", size=number), take)
    assert jobs.wait(PATIENCE_S)
    assert [(it.name, it.answer) for it in done] == [(str(number), b"e" * number) for number in range(5)]
    assert all((it.reason, it.attempts, it.is_final) == ("", 1, True) for it in done)
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert len(started.processes) == 1
    assert has_process(jobs)


def test_a_lower_rank_is_done_first(make_jobs):
    jobs = make_jobs()
    jobs.hold()
    done: list[Done] = []
    for name, rank in (("decoder", 2), ("block", 0), ("encoder", 1), ("another block", 0)):
        jobs.submit(name, order("echo", size=1), done.append, rank)
    jobs.release()
    assert jobs.wait(PATIENCE_S)
    assert [it.name for it in done] == ["block", "another block", "encoder", "decoder"]


def test_jobs_submitted_by_many_threads_are_all_done(make_jobs):
    jobs = make_jobs()
    done: list[Done] = []

    def submit() -> None:
        for _ in range(10):
            jobs.submit("a job", order("echo", size=1), done.append)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert jobs.wait(PATIENCE_S)
    assert len(done) == 80
    assert jobs.waiting == 0


def test_no_process_starts_before_the_release(make_jobs, started):
    jobs = make_jobs()
    jobs.hold()
    done: list[Done] = []
    jobs.submit("a job", order("echo", size=1), done.append)
    assert not jobs.wait(0.5)
    assert not started.processes
    assert jobs.waiting == 1
    jobs.release()
    assert jobs.wait(PATIENCE_S)
    assert done[0].answer == b"e"


def test_idle_process_ends_and_the_next_job_starts_another(make_jobs, started):
    jobs = make_jobs(idle_s=0.2)
    first = do(jobs, order("describe"))
    wait_for(lambda: not has_process(jobs))
    second = do(jobs, order("describe"))
    assert json.loads(first.answer)["pid"] != json.loads(second.answer)["pid"]
    assert len(started.processes) == 2


def test_process_that_dies_idle_costs_the_next_job_no_attempt(make_jobs, started):
    jobs = make_jobs()
    do(jobs, order("describe"))
    os.kill(started.processes[0].pid, 9)
    wait_for(lambda: not has_process(jobs))
    done = do(jobs, order("echo", size=1))
    assert (done.answer, done.attempts) == (b"e", 1)
    assert len(started.processes) == 2


@pytest.mark.parametrize("how", ["death", "memory", "hang"])
def test_job_that_fails_once_is_done_by_a_new_process(make_jobs, started, tmp_path, how):
    jobs = make_jobs(job_timeout_s=8.0)
    done = do(jobs, order("fail_once", folder=str(tmp_path), how=how))
    assert (done.answer, done.reason, done.attempts, done.is_final) == (b"done", "", 2, True)
    assert len(started.processes) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (order("die"), "was killed by SIGKILL"),
        (order("abort"), "was killed by SIGABRT.*about to abort"),
        (order("exit", code=3), "ended with exit code 3"),
        (order("raise", error="MemoryError", message=""), "ValueError: wrapped"),
    ],
)
def test_job_that_fails_twice_is_given_up_and_the_next_one_is_done(make_jobs, started, content, reason):
    jobs = make_jobs()
    done: list[Done] = []
    jobs.submit("a bad one", content, done.append)
    jobs.submit("a good one", order("echo", size=1), done.append)
    assert jobs.wait(PATIENCE_S)
    bad, good = done
    assert (bad.name, bad.answer, bad.attempts, bad.is_final) == ("a bad one", None, 2, True)
    assert re.search(reason, bad.reason), bad.reason
    assert (good.answer, good.attempts) == (b"e", 1)
    assert len(started.processes) == 3


def test_job_that_hangs_twice_is_given_up(make_jobs, tmp_path):
    jobs = make_jobs(job_timeout_s=8.0)
    done = do(jobs, order("hang", folder=str(tmp_path)))
    assert (done.answer, done.attempts, done.is_final) == (None, 2, True)
    assert "gave no answer in 8 s" in done.reason


def test_job_that_raises_is_not_tried_again(make_jobs, started):
    jobs = make_jobs()
    done = do(jobs, order("fail", message="disk is full"))
    assert (done.answer, done.attempts, done.is_final) == (None, 1, True)
    assert "OSError: [Errno 28] disk is full" in done.reason
    assert do(jobs, order("echo", size=1)).answer == b"e"
    assert len(started.processes) == 1


def test_caller_that_fails_is_logged_and_the_next_job_is_done(make_jobs, caplog):
    jobs = make_jobs()
    done: list[Done] = []

    def fail(it: Done) -> None:
        raise LookupError(f"no place for {it.name}")

    with caplog.at_level(logging.WARNING, "compile_cache"):
        jobs.submit("the first", order("echo", size=1), fail)
        jobs.submit("the second", order("echo", size=1), done.append)
        assert jobs.wait(PATIENCE_S)
    assert done[0].answer == b"e"
    (record,) = caplog.records
    assert "no place for the first" in record.getMessage()
    assert record.exc_info is not None


def test_caller_may_submit_the_next_job(make_jobs):
    jobs = make_jobs()
    done: list[Done] = []
    jobs.submit("1", order("echo", size=1), lambda _: jobs.submit("2", order("echo", size=2), done.append))
    assert jobs.wait(PATIENCE_S)
    assert [it.answer for it in done] == [b"ee"]


@pytest.mark.parametrize("fault", [OSError(12, "Cannot allocate memory"), RuntimeError("no thread")])
def test_every_job_is_answered_when_no_process_can_be_started_and_a_later_one_is_done(make_jobs, started, fault):
    jobs = make_jobs()
    jobs.hold()
    done: list[Done] = []
    for number in range(3):
        jobs.submit(str(number), order("echo", size=1), done.append)
    started.fault = fault
    jobs.release()
    assert jobs.wait(PATIENCE_S)
    assert [it.name for it in done] == ["0", "1", "2"]
    assert all(str(fault) in it.reason and it.attempts == 0 and not it.is_final for it in done)
    started.fault = None
    assert do(jobs, order("echo", size=1)).answer == b"e"


def test_every_job_is_answered_when_no_process_can_be_prepared_and_none_is_blamed(make_jobs, started):
    jobs = make_jobs()
    jobs.hold()
    done: list[Done] = []
    for number in range(3):
        jobs.submit(str(number), order("echo", size=1), done.append)
    started.factory = "make_nothing"
    jobs.release()
    assert jobs.wait(PATIENCE_S)
    assert [(it.attempts, it.is_final) for it in done] == [(2, False), (0, False), (0, False)]
    assert all("could not prepare itself: LookupError" in it.reason for it in done)
    assert len(started.processes) == 2
    started.factory = "make"
    assert do(jobs, order("echo", size=1)).answer == b"e"


def test_process_that_crashes_once_while_it_is_prepared_is_started_again(make_jobs, started, tmp_path):
    started.factory, started.setup = "make_once", str(tmp_path).encode()
    done = do(make_jobs(), order("echo", size=1))
    assert (done.answer, done.attempts) == (b"e", 2)


def test_close_drops_what_waits_and_ends_the_process(make_jobs, started, tmp_path, caplog):
    jobs = make_jobs()
    done: list[Done] = []
    jobs.submit("1", order("hang", folder=str(tmp_path)), done.append)
    jobs.submit("2", order("echo", size=1), done.append)
    wait_for((tmp_path / "hangs").exists)
    with caplog.at_level(logging.INFO, "compile_cache"):
        jobs.close()
        assert not jobs.wait(PATIENCE_S)
    assert not has_process(jobs)
    jobs.submit("3", order("echo", size=1), done.append)
    jobs.close()
    time.sleep(0.5)  # a thread that went on would start another process
    assert jobs.waiting == 2
    assert not done
    assert len(started.processes) == 1
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_close_ends_a_process_whose_start_is_under_way(make_jobs, started, tmp_path):
    jobs = make_jobs()
    started.may_end.clear()
    jobs.submit("1", order("hang", folder=str(tmp_path)), print)
    assert started.begun.wait(PATIENCE_S)
    closing = threading.Thread(target=jobs.close)
    closing.start()
    closing.join(0.3)
    started.may_end.set()
    closing.join(PATIENCE_S)
    wait_for(lambda: not started.processes[0].is_alive)


def test_server_that_exits_stops_its_job_and_says_nothing(tmp_path):
    program = f"""
    import logging, os, time
    from pathlib import Path
    from background_handlers import order
    from compile_cache.background.queue import Jobs
    from compile_cache.background.child import CompilingProcess
    logging.basicConfig(level=logging.WARNING)
    folder = Path({str(tmp_path)!r})
    started = []
    def start():
        started.append(CompilingProcess.start("background_handlers:make", b"", folder / "log", os.environ))
        return started[-1]
    jobs = Jobs(start, 600.0, 600.0)
    jobs.submit("1", order("hang", folder=str(folder)), print)
    while not (folder / "hangs").exists():
        time.sleep(0.01)
    print(started[0].pid)
    """
    environ = {**os.environ, "PYTHONPATH": python_path(*filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert not Path(f"/proc/{int(done.stdout)}").exists()
