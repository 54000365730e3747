"""A child of this process, in a session of its own, which ends with it; and their channel. It imports no torch.

`Child` is this process's side. `main`, and what follows it, is the child's side.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import NoReturn

from compile_cache.errors import log
from compile_cache.importable import find, own_python

# How often each process looks whether the other one lives. A fork of either may keep the channel open.
LOOK_S = 0.5
# A killed process that lasts longer hangs in the kernel. The exit does not wait for it.
END_S = 5.0


# Whether this process is a child.
is_child = False


class Child:
    """A process of this Python that calls a function with its end of `channel`, and then ends.

    It ends at `end`, or when this process ends in any way, together with every process that it started. The thread that
    started it may end earlier. Thread-safe, but for the channel. `is_ended`: whether `end` was called.
    """

    def __init__(
        self, target: str, output: int, environ: Mapping[str, str] | None = None, passed: Sequence[int] = ()
    ) -> None:
        """Start it and return at once.

        Args:
            target: the function: `package.module:function`.
            output: the file descriptor of its stdout and stderr.
            environ: its variables; without them, this process's.
            passed: other file descriptors that it holds.

        Raises:
            OSError: no process can be started.
        """
        self._server = os.getpid()
        self._ending, self.is_ended = threading.Lock(), False
        self.channel, theirs = Pipe()
        watched, self._held = os.pipe()
        try:
            self._process = _spawn(target, (theirs.fileno(), watched), output, environ, passed)
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(watched)

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs. This does not reap it, so no other process can get its group's number."""
        if self._process.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # other code has reaped it
            return False

    @property
    def exit_code(self) -> int | None:
        """Its exit code, once it has ended by itself and `end` was called: negative if a signal killed it."""
        return self._process.returncode

    def end(self) -> bool:
        """Kill it and its process group, and reap it. False the second time, and in a fork, which kills nothing."""
        with self._ending:
            if self.is_ended or os.getpid() != self._server:
                return False
            self.is_ended = True
            # Unless other code has reaped it, no other group can have its number.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                log.warning("process.not_ended pid=%d It was killed, but hangs in the kernel.", self.pid)
            return True

    def close(self) -> None:
        """Close this process's files. No other thread may use the channel any more."""
        self.channel.close()
        os.close(self._held)


def _spawn(
    target: str, own: tuple[int, int], output: int, environ: Mapping[str, str] | None, passed: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a child. `own` has the file descriptors of its end of the channel, and of the pipe that it watches."""
    return subprocess.Popen(
        own_python(__name__, target, *map(str, (os.getpid(), *own))),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=(*own, *passed),
        start_new_session=True,
        env=environ,
    )


def main() -> None:
    """Call the function until it returns, or its server ends or hangs up. The command line is that of `_spawn`."""
    global is_child
    is_child = True
    target = sys.argv[1]
    server, channel, watched = (int(text) for text in sys.argv[2:5])
    del sys.argv[1:]  # libraries that the function imports may read it
    for descriptor in (channel, watched):
        os.set_inheritable(descriptor, False)
    _end_with(server, watched)
    faulthandler.enable()
    with suppress(EOFError, OSError):
        find(target)(Connection(channel))
    _end_group()


def _end_with(server: int, watched: int) -> None:
    """From now on, end the whole process group when the process `server` ends, however it ends.

    `watched` is a pipe on which nothing is ever written. The server holds its other end. The kernel kills the group
    when that end closes, even while C code holds Python's lock. A thread checks too, for two cases: the kernel does not
    know F_SETSIG (gVisor), or a fork of the server outlives it and keeps the pipe open. PR_SET_PDEATHSIG is no way: it
    follows the thread that started this process.
    """
    with suppress(OSError):
        fcntl.fcntl(watched, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(watched, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(watched, fcntl.F_SETFL, fcntl.fcntl(watched, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(server, watched), name="compile-cache-watch", daemon=True).start()


def _watch(server: int, watched: int) -> NoReturn:
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    while os.getppid() == server and not poll.poll(LOOK_S * 1000):
        pass
    _end_group()


def _end_group() -> NoReturn:
    """Kill every process of the group. This process is one of them."""
    os.killpg(0, signal.SIGKILL)
    os._exit(1)  # not reached: SIGKILL cannot be held back
