"""The queue of jobs for the compiling process. One thread of the server hands them over and manages the process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import CompileCacheError, JobFailed, JobTimedOut, ProcessDied, ProcessNotReady
from compile_cache.torch_threads import end_at_exit

log = logging.getLogger("compile_cache")

_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a job: an answer, or the reason why there is none.

    `is_final` is False if no process could be started or prepared. A later submit may then succeed. `attempts` counts
    how often a process got the job. `seconds` is the time since the first attempt.
    """

    name: str
    answer: bytes | None
    reason: str
    seconds: float
    attempts: int
    is_final: bool


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    content: bytes
    done: Callable[[Done], None]
    rank: int


class Jobs:
    """Jobs for a compiling process. A daemon thread does them: the lowest rank first, then the one submitted first.

    The process starts with the first job, and ends after `idle_s` without a job. A job gets one more try in a new
    process if its process died, hung or ran out of memory. All methods are thread-safe.
    """

    def __init__(self, start: Callable[[], CompilingProcess], job_timeout_s: float, idle_s: float) -> None:
        self._start = start
        self._job_timeout_s = job_timeout_s
        self._idle_s = idle_s
        self._server = os.getpid()
        self._changed = threading.Condition()
        self._queue: list[_Job] = []
        self._waiting = 0
        self._is_held = False
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._process: CompilingProcess | None = None

    def submit(self, name: str, job: bytes, done: Callable[[Done], None], rank: int = 0) -> None:
        """Queue a job and return at once. The jobs' thread calls `done`, but not after `close`."""
        with self._changed:
            if self._is_closed:
                return
            self._queue.append(_Job(name, job, done, rank))
            self._waiting += 1
            self._start_thread()
            self._changed.notify_all()

    def hold(self) -> None:
        """Begin no job until `release`. A job that has begun goes on."""
        with self._changed:
            self._is_held = True

    def release(self) -> None:
        """Begin the jobs that were held."""
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """How many submitted jobs are not done. A job is done when its `done` has returned."""
        return self._waiting

    def wait(self, timeout_s: float) -> bool:
        """Wait until every job is done or `close` is called; True if every job is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._is_closed, timeout_s)
            return not self._waiting

    def close(self) -> None:
        """Accept no more jobs, drop the queue, and stop the process. Also the exit hook. Does nothing in a fork."""
        if os.getpid() != self._server:
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        atexit.unregister(self.close)
        with self._starting:
            process = self._process
        if process is not None:
            process.stop()

    def _start_thread(self) -> None:
        """Start the thread with the first job. A boot that has nothing to compile starts none."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="compile-cache-jobs", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("background.no_thread error=%s Jobs wait until the next one is submitted.", error)
            return
        self._thread = thread
        end_at_exit(thread, self.close)

    def _run(self) -> None:
        while (job := self._next()) is not None:
            done = self._do(job)
            if self._is_closed:
                return
            self._finish(job, done)
            if not done.is_final:
                self._give_up(done.reason)

    def _next(self) -> _Job | None:
        """The next job, once there is one; None after `close`. Meanwhile an idle process is ended."""
        while True:
            with self._changed:
                idle_s = None if self._process is None else self._idle_s
                self._changed.wait_for(lambda: self._is_closed or (self._queue and not self._is_held), idle_s)
                if self._is_closed:
                    return None
                if self._queue and not self._is_held:
                    first = min(self._queue, key=lambda job: job.rank)
                    self._queue.remove(first)
                    return first
            self._end_process()

    def _do(self, job: _Job) -> Done:
        """Give the job to a process. If that process may be to blame for a failure, try once more in a new one."""
        started = time.monotonic()
        answer, reason, attempts, is_final = None, "", 0, True
        while attempts < _ATTEMPTS and not self._is_closed:
            try:
                process = self._ensure_process()
                attempts += 1
                answer = process.do(job.content, self._job_timeout_s)
                reason, is_final = "", True
                break
            except (JobFailed, JobTimedOut, ProcessDied) as error:
                reason, is_final = str(error), not isinstance(error, ProcessNotReady)
                self._say_failed(job.name, attempts, error)
                if isinstance(error, JobFailed) and not error.may_succeed_afresh:
                    break
                self._end_process()
            except Exception as error:
                reason, is_final = f"The compiling process cannot be started: {error}", False
                self._say_failed(job.name, attempts, error)
                break
        seconds = time.monotonic() - started
        return Done(job.name, answer, reason, seconds, attempts, is_final)

    def _say_failed(self, name: str, attempts: int, error: Exception) -> None:
        if self._is_closed:  # `close` stopped the process
            return
        is_known = isinstance(error, CompileCacheError | OSError)
        log.log(
            # The job's own error goes to its caller, who knows its meaning.
            logging.INFO if isinstance(error, JobFailed) else logging.WARNING,
            "background.failed job=%s attempt=%d error=%s",
            name,
            attempts,
            error,
            exc_info=None if is_known else error,
        )

    def _ensure_process(self) -> CompilingProcess:
        """The process, started anew if it died while idle. Raises the errors of `start`."""
        if self._process is not None and not self._process.is_alive:
            self._end_process()
        with self._starting:  # `close` then waits for the start, and stops the process
            if self._is_closed:
                raise ProcessDied("The jobs are closed.")
            if self._process is None:
                self._process = self._start()
                # Exit hooks run last in, first out. If the process's own hook ran first, the process would seem to have
                # died.
                atexit.unregister(self.close)
                atexit.register(self.close)
                log.info("background.started pid=%d", self._process.pid)
            return self._process

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    def _finish(self, job: _Job, done: Done) -> None:
        """Call the job's `done`. This is the border of the thread: an error is logged, and the next job is done."""
        try:
            job.done(done)
        except Exception as error:
            log.warning("background.not_taken job=%s error=%r", job.name, error, exc_info=error)
        with self._changed:
            self._waiting -= 1
            self._changed.notify_all()

    def _give_up(self, reason: str) -> None:
        """Answer every waiting job with `reason`, because each would fail alike. The next submit tries again."""
        with self._changed:
            jobs, self._queue = self._queue, []
        for job in jobs:
            self._finish(job, Done(job.name, None, reason, 0.0, 0, False))
