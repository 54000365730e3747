"""The second process, which answers one order at a time, as the server has it."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from compile_cache.child_process import END_S, LOOK_S, Child
from compile_cache.errors import OrderFailed, ProcessDied, ProcessNotReady

_LOG_LIMIT_BYTES = 8 << 20
_LOG_TAIL_BYTES = 16 << 10
_LONGEST_LINE = 300
_CRASH_DUMP = "Fatal Python error"  # how faulthandler's lines begin


class CompilingProcess(Child):
    """A child that answers orders one at a time, at a low priority. Thread-safe: a second `answer` waits for the first.
    See `Child` for its end."""

    def __init__(
        self, handler: str, setup: bytes, log: Path, environ: Mapping[str, str], hurries: bool = False
    ) -> None:
        """Start the process and return at once, before its imports are done. Unless it `hurries`, it leaves the CPU to
        this process.

        `handler` names a function, "package.module:function". The child calls it once with `setup`, which has some
        kilobytes; it returns the function that answers an order. The output of the child and its children is appended
        to `log`; a log of more than 8 MiB is emptied.
        Raises `OSError` if no process can be started, or `log` cannot be written.
        """
        self._output = log.open("a+b")
        try:
            super().__init__("compile_cache.background.child_main:serve", self._output.fileno(), environ)
        except BaseException:
            self._output.close()
            raise
        with suppress(OSError):  # it has ended, which the first order tells
            self.channel.send((handler, setup, hurries))
        self._log = log
        self._log_start = self._bound_log()
        self._is_ready = False
        self._answering = threading.RLock()

    def answer(self, order: bytes, timeout_s: float) -> bytes:
        """The answer to an order. The first one's time includes the start of the process.

        Raises `OrderFailed` if the order raised an error; the process lives on. Before it raises `ProcessDied` or
        `ProcessNotReady`, the process and its whole group have ended.
        """
        with self._answering:
            watchdog = threading.Timer(timeout_s + END_S, self.stop)  # of a child that reads nothing
            watchdog.daemon = True
            try:
                if self._is_ready:
                    self._log_start = self._bound_log()
                watchdog.start()
                answer = self._exchange(order, time.monotonic() + timeout_s)
            except TimeoutError:
                self.stop()
                late = f"The compiling process gave no answer in {timeout_s:g} s and was ended. See {self._log}."
                raise self._death(late) from None
            # The child is gone, `stop` has closed the files (ValueError), or no message came.
            except (EOFError, OSError, ValueError, OverflowError, pickle.UnpicklingError) as error:
                raise self._stop_dead() from error
            finally:
                watchdog.cancel()
        if isinstance(answer, OrderFailed):
            raise answer
        return answer

    def stop(self) -> None:
        """Kill the child and its process group, and reap it. Does nothing the second time, or in a fork."""
        # A thread in `answer` sees that the child is gone, and leaves. Its files must stay open until then.
        if self.end() and self._answering.acquire(timeout=END_S):
            self.close()
            self._output.close()
            self._answering.release()

    def _exchange(self, order: bytes, deadline: float) -> bytes | OrderFailed:
        """The answer to an order.

        Raises `TimeoutError` after the deadline; `EOFError` or an `OSError` when the child is gone.
        """
        if not self._is_ready:
            if reason := self._receive(deadline):
                self.stop()
                raise ProcessNotReady(f"The compiling process could not prepare itself: {reason}. See {self._log}.")
            self._is_ready = True
        self.channel.send(order)
        answer: bytes | OrderFailed = self._receive(deadline)
        return answer

    def _receive(self, deadline: float) -> Any:
        """The next message, if it begins before the deadline and the child's end."""
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self.channel.poll(min(LOOK_S, remaining_s)):
                return self.channel.recv()
            if not self.is_alive:
                raise EOFError("the process has ended")
        raise TimeoutError

    def _stop_dead(self) -> ProcessDied:
        """Reap a child that ended by itself, kill the processes it left, and say how it ended."""
        if self.is_ended:
            return ProcessDied("The compiling process was stopped.")
        deadline = time.monotonic() + LOOK_S  # a child that ends closes its files first
        while (is_alive := self.is_alive) and time.monotonic() < deadline:
            time.sleep(LOOK_S / 100)
        last_line = self._last_line()
        self.stop()
        how = "broke off the exchange and was ended" if is_alive else _in_words(self.exit_code)
        return self._death(f"The compiling process {how}. {last_line}")

    def _death(self, told: str) -> ProcessDied:
        return ProcessDied(told) if self._is_ready else ProcessNotReady(told)

    def _bound_log(self) -> int:
        """The size of the log in bytes. A log that is too large is emptied first; its writers append, so they go on."""
        if os.fstat(self._output.fileno()).st_size > _LOG_LIMIT_BYTES:
            self._output.truncate(0)
        return self._output.seek(0, os.SEEK_END)

    def _last_line(self) -> str:
        """The log's last line about the current order, before Python's own dump of a crash."""
        size_bytes = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(size_bytes - _LOG_TAIL_BYTES, min(self._log_start, size_bytes)))
        text = self._output.read().decode(errors="replace")
        lines = [line for line in text.partition(_CRASH_DUMP)[0].splitlines() if line.strip()]
        if not lines:
            return f"It wrote no last line into {self._log}."
        return f"The last line of {self._log}: {lines[-1].strip()[:_LONGEST_LINE]}"


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "hangs in the kernel"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
