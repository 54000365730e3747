"""The second process, which answers one order at a time: its handle in the server, and its own start, loop and end.

`CompilingProcess` and what follows it is the server's side. `main` and what follows it is the second process's side. It
leads a process group, to which compilers that an order starts belong.
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import os
import pickle
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from compile_cache.errors import OrderFailed, ProcessDied, ProcessNotReady, causes, log
from compile_cache.importable import find, own_python

# How often a wait checks that the other process lives. A process left by an order may keep the channel open.
_LOOK_S = 0.5
# A killed process that lasts longer hangs in the kernel. The exit does not wait for it.
_END_S = 5.0
_LOG_LIMIT_BYTES = 8 << 20
_LOG_TAIL_BYTES = 16 << 10
_LONGEST_LINE = 300
_CRASH_DUMP = "Fatal Python error"  # how faulthandler's lines begin
CGROUP = Path("/sys/fs/cgroup")
_NICENESS = 10
# torch has no more, on a host of any size (torch/_inductor/config.py).
_MOST_THREADS = 32
_MOST_CHARACTERS = 1000  # of an error's message, in one line
# Errors of the process, not of its order: no memory, or a GPU context that an earlier error has broken.
_OF_PROCESS = re.compile(
    "MemoryError|out of memory|(can't|cannot) allocate memory|(CUDA|HIP)( driver)? error|(CUDNN|CUBLAS)_STATUS",
    re.IGNORECASE,
)


class CompilingProcess:
    """A child that answers orders one at a time, at a low priority, in a session of its own.

    It ends at `stop`, or when this process ends in any way, together with every process that its orders started. The
    thread that started it may end earlier. Thread-safe: a second `answer` waits for the first.
    """

    def __init__(
        self, handler: str, setup: bytes, log: Path, environ: Mapping[str, str], hurries: bool = False
    ) -> None:
        """Start the process and return at once, before its imports are done. Unless it `hurries`, it leaves the CPU to
        this process.

        `handler` names a function, "package.module:function". The child calls it once with `setup`; it returns the
        function that answers an order. The output of the child and its children is appended to `log`; a log of more
        than 8 MiB is emptied.
        Raises `OSError` if no process can be started, or `log` cannot be written.
        """
        self._setup = handler, setup, hurries  # sent before the first order
        with ExitStack() as theirs, ExitStack() as ours:
            self._channel, its_channel = Pipe()
            ours.enter_context(self._channel)
            theirs.enter_context(its_channel)
            watched, held = os.pipe()
            theirs.callback(os.close, watched)
            ours.callback(os.close, held)
            self._output = ours.enter_context(log.open("a+b"))
            self._child = _spawn((its_channel.fileno(), watched), self._output.fileno(), environ)
            self._held = ours.pop_all()
        self._log = log
        self._log_start = self._bound_log()
        self._server = os.getpid()
        self._is_ready = False
        self._is_stopped = False
        self._answering = threading.RLock()
        self._stopping = threading.Lock()

    @property
    def pid(self) -> int:
        """The child's process id, which is also its process group."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child runs. This does not reap it, so no other process can get its group's number."""
        if self._child.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # other code has reaped it
            return False

    def answer(self, order: bytes, timeout_s: float) -> bytes:
        """The answer to an order. The first one's time includes the start of the process.

        Raises `OrderFailed` if the order raised an error; the process lives on. Before it raises `ProcessDied` or
        `ProcessNotReady`, the process and its whole group have ended.
        """
        with self._answering:
            try:
                if self._is_ready:
                    self._log_start = self._bound_log()
                watchdog = threading.Timer(timeout_s + _END_S, self.stop)  # of a child that reads nothing
                watchdog.daemon = True
                watchdog.start()
                answer = self._exchange(order, time.monotonic() + timeout_s)
                watchdog.cancel()
            except TimeoutError:
                self.stop()
                late = f"The compiling process gave no answer in {timeout_s:g} s and was ended. See {self._log}."
                raise self._death(late) from None
            # The child is gone, `stop` has closed the files (ValueError), or no message came.
            except (EOFError, OSError, ValueError, OverflowError, pickle.UnpicklingError) as error:
                raise self._stop_dead() from error
        if isinstance(answer, OrderFailed):
            raise answer
        return answer

    def stop(self) -> None:
        """Kill the child and its process group, and reap it. Does nothing the second time, or in a fork."""
        if os.getpid() != self._server:
            return
        with self._stopping:
            if self._is_stopped:
                return
            self._is_stopped = True
            self._end_group()
        # A thread in `answer` sees that the child is gone, and leaves. Its files must stay open until then.
        if self._answering.acquire(timeout=_END_S):
            self._held.close()
            self._answering.release()

    def _end_group(self) -> None:
        # The child is not reaped yet, so no other group can have its number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            log.warning(
                "background.not_ended pid=%d The compiling process was killed, but hangs in the kernel.",
                self._child.pid,
            )

    def _exchange(self, order: bytes, deadline: float) -> bytes | OrderFailed:
        """The answer to an order.

        Raises `TimeoutError` after the deadline; `EOFError` or an `OSError` when the child is gone.
        """
        if not self._is_ready:
            self._channel.send(self._setup)
            if reason := self._receive(deadline):
                self.stop()
                raise ProcessNotReady(f"The compiling process could not prepare itself: {reason}. See {self._log}.")
            self._is_ready = True
        self._channel.send(order)
        answer: bytes | OrderFailed = self._receive(deadline)
        return answer

    def _receive(self, deadline: float) -> Any:
        """The next message, if it begins before the deadline and the child's end."""
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self._channel.poll(min(_LOOK_S, remaining_s)):
                return self._channel.recv()
            if not self.is_alive:
                raise EOFError("the process has ended")
        raise TimeoutError

    def _stop_dead(self) -> ProcessDied:
        """Reap a child that ended by itself, kill the processes it left, and say how it ended."""
        if self._is_stopped:
            return ProcessDied("The compiling process was stopped.")
        deadline = time.monotonic() + _LOOK_S  # a child that ends closes its files first
        while (is_alive := self.is_alive) and time.monotonic() < deadline:
            time.sleep(_LOOK_S / 100)
        last_line = self._last_line()
        self.stop()
        how = "broke off the exchange and was ended" if is_alive else _in_words(self._child.returncode)
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


def _spawn(passed: tuple[int, int], output: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the worker. `passed` has its two file descriptors, in the worker's order."""
    return subprocess.Popen(
        own_python("compile_cache.background.child", *map(str, (os.getpid(), *passed))),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=passed,
        start_new_session=True,
        env=dict(environ),
    )


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "hangs in the kernel"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"was killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")


def main() -> None:
    """Serve until the server ends or hangs up. The command line has the file descriptors: see `_spawn`."""
    server, channel, liveness = (int(text) for text in sys.argv[1:4])
    del sys.argv[1:]  # libraries that a handler imports may read it
    for descriptor in (channel, liveness):
        os.set_inheritable(descriptor, False)
    _end_with(server, liveness)
    faulthandler.enable()
    with suppress(EOFError, OSError):
        _serve(Connection(channel))
    _end_group()


def _serve(channel: Connection) -> None:
    """Answer the setup, with nothing or why it failed, and then each order. Raises `EOFError` or `OSError` when the
    server has hung up."""
    handler = _attempt(_handler, *channel.recv())
    has_failed = isinstance(handler, OrderFailed)
    channel.send(handler if has_failed else None)
    while not has_failed:
        channel.send(_attempt(handler, channel.recv()))
        gc.collect()  # a process that waits for its next order should not hold the last one's memory


def _handler(name: str, setup: bytes, hurries: bool) -> Any:
    """The function that answers orders. What its imports make stays, so garbage collections need not look at it, now
    and after each order."""
    _give_way(hurries)
    gc.disable()
    try:
        return find(name)(setup)
    finally:
        gc.freeze()
        gc.enable()


def _attempt(step: Callable[..., Any], *inputs: Any) -> Any:
    """The result of a step, or what tells the server of its error, `SystemExit` included. The traceback goes to the
    log."""
    try:
        return step(*inputs)
    except BaseException as error:
        with suppress(OSError):  # a full disk
            traceback.print_exception(error)
        chain = [f"{type(link).__name__}: {link}" for link in causes(error)]
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = " ".join(str(error).split())[:_MOST_CHARACTERS]
        may_succeed_afresh = any(_OF_PROCESS.search(link) for link in chain)
        return OrderFailed(f"{name}: {message}" if message else name, may_succeed_afresh)


def _give_way(hurries: bool) -> None:
    """Leave the CPU to predictions, unless somebody waits for this process, and let a crash leave no core file."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads(hurries)))
    with suppress(OSError):
        niceness = os.nice(0 if hurries else _NICENESS)
        # A kernel that groups tasks by session (sched_autogroup) reads this session's priority from this file.
        Path("/proc/self/autogroup").write_text(str(niceness))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def compile_threads(hurries: bool = False) -> int:
    """One for every two CPUs that this process may use, at most 32; on two or three CPUs, two. One for each CPU if the
    process `hurries`.

    torch would start one for each CPU, and ignore a container's quota. Then predictions have no CPU of their own: a low
    priority makes a worker's turns on a CPU shorter, but does not prevent them. And when a container has used up its
    quota, predictions stop too, whatever their priority.
    """
    allowed = len(os.sched_getaffinity(0))
    cpus = min(allowed, quota_cpus(CGROUP) or allowed)
    return min(_MOST_THREADS, cpus if hurries else max(cpus // 2, min(cpus, 2)))


def quota_cpus(cgroup: Path) -> int:
    """The CPUs that a container's quota allows, rounded down, but at least 1; 0 without a quota.

    Sources: cgroup v2's `cpu.max` ("max 100000" or "150000 100000", in µs), and v1's `cpu.cfs_quota_us` (-1: none) and
    `cpu.cfs_period_us`.
    """
    try:
        if (both := cgroup / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(quota) // int(period)) if int(quota) > 0 else 0
    except (OSError, ValueError, ZeroDivisionError):  # not Linux's files, or "max"
        return 0


def _end_with(server: int, liveness: int) -> None:
    """From now on, end the whole process group when the process `server` ends, however it ends.

    `liveness` is a pipe on which nothing is ever written. The server holds its other end. The kernel kills the group
    when that end closes, even while C code holds Python's lock. A thread checks too, for two cases: the kernel does not
    know F_SETSIG (gVisor), or a fork of the server outlives it and keeps the pipe open. PR_SET_PDEATHSIG is no way: it
    follows the thread that started this process.
    """
    with suppress(OSError):
        fcntl.fcntl(liveness, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(liveness, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(liveness, fcntl.F_SETFL, fcntl.fcntl(liveness, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(server, liveness), name="compile-cache-watch", daemon=True).start()


def _watch(server: int, liveness: int) -> NoReturn:
    poll = select.poll()
    poll.register(liveness, select.POLLIN)
    while os.getppid() == server and not poll.poll(_LOOK_S * 1000):
        pass
    _end_group()


def _end_group() -> NoReturn:
    """Kill every process of the group. This process is one of them."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached: SIGKILL cannot be held back
