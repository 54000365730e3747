"""The second process's side: its start, its end, and the loop that answers one order after another.

`child.py` starts it as the leader of a process group. Compilers that an order starts belong to that group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import json
import os
import re
import resource
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from compile_cache.errors import causes
from compile_cache.importable import find

Handler = Callable[[bytes], bytes]

CGROUP = Path("/sys/fs/cgroup")
_LOOK_S = 0.5
_NICENESS = 10
# torch has no more, on a host of any size (torch/_inductor/config.py).
_MOST_THREADS = 32
_MOST_CHARACTERS = 1000  # of an error's message, in one line
# Errors of the process, not of its order: no memory, or a GPU context that an earlier error has broken.
_OF_PROCESS = re.compile(
    "MemoryError|out of memory|(can't|cannot) allocate memory|(CUDA|HIP)( driver)? error|(CUDNN|CUBLAS)_STATUS",
    re.IGNORECASE,
)
# Of a message: whether it is an error, and the length of its body.
_HEADER = struct.Struct("!BQ")
# The most bytes of one read. Memory grows as bytes arrive, whatever length a header claims.
_CHUNK_BYTES = 1 << 20


def main() -> None:
    """Serve until the server ends or hangs up. The command line has the file descriptors: see `child.py`."""
    server, channel, liveness = (int(text) for text in sys.argv[1:4])
    del sys.argv[1:]  # libraries that a handler imports may read it
    for descriptor in (channel, liveness):
        os.set_inheritable(descriptor, False)
    _end_with(server, liveness)
    _give_way()
    faulthandler.enable()
    with contextlib.suppress(EOFError, OSError):
        _serve(socket.socket(fileno=channel))
    _end_group()


def _serve(channel: socket.socket) -> None:
    """Answer the setup, and then each order. Raises `EOFError` or `OSError` when the server has hung up."""
    _, setup = read_message(channel.recv)
    try:
        handler = _handler(setup)
    except BaseException as error:
        channel.sendall(_failure(error))
        while True:  # until the server has read the message: it may still be sending an order
            read_message(channel.recv)
    channel.sendall(encode(b""))
    while True:
        channel.sendall(_answer(handler, read_message(channel.recv)[1]))
        gc.collect()  # a process that waits for its next order should not hold the last one's memory


def _handler(setup: bytes) -> Handler:
    """The handler. What its imports make stays, so garbage collections need not look at it, now and after each
    order."""
    name, _, argument = setup.partition(b"\0")
    gc.disable()
    try:
        handler: Handler = find(name.decode())(argument)
        return handler
    finally:
        gc.freeze()
        gc.enable()


def _answer(handler: Handler, order: bytes) -> bytes:
    """The encoded answer. The process goes on after any error of an order, `SystemExit` included."""
    try:
        return encode(handler(order))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    """The message that tells the server of an error: the arguments of `OrderFailed`. The traceback goes to the log."""
    with contextlib.suppress(OSError):  # a full disk
        traceback.print_exception(error)
    chain = [f"{type(link).__name__}: {link}" for link in causes(error)]
    module = type(error).__module__
    name = type(error).__qualname__
    told = {
        "error_type": name if module == "builtins" else f"{module}.{name}",
        "message": " ".join(str(error).split())[:_MOST_CHARACTERS],
        "may_succeed_afresh": any(_OF_PROCESS.search(link) for link in chain),
    }
    return encode(json.dumps(told).encode(), is_error=True)


def _give_way() -> None:
    """Leave the CPU to predictions, and let a crash leave no core file."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compile_threads()))
    with contextlib.suppress(OSError):
        niceness = os.nice(_NICENESS)
        # A kernel that groups tasks by session (sched_autogroup) reads this session's priority from this file.
        Path("/proc/self/autogroup").write_text(str(niceness))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def compile_threads() -> int:
    """One for every two CPUs that this process may use, at most 32; on two or three CPUs, two.

    torch would start one for each CPU, and ignore a container's quota. Then predictions have no CPU of their own: a low
    priority makes a worker's turns on a CPU shorter, but does not prevent them. And when a container has used up its
    quota, predictions stop too, whatever their priority.
    """
    allowed = len(os.sched_getaffinity(0))
    cpus = min(allowed, quota_cpus(CGROUP) or allowed)
    return min(_MOST_THREADS, max(cpus // 2, min(cpus, 2)))


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
    with contextlib.suppress(OSError):
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


def encode(body: bytes, is_error: bool = False) -> bytes:
    """A message's bytes. The first message of the server is the setup: the handler's name, a zero byte and its
    argument. Each other message is an order. The process answers each with an answer or an error."""
    return _HEADER.pack(is_error, len(body)) + body


def read_message(receive: Callable[[int], bytes]) -> tuple[bool, bytes]:
    """Whether the next message is an error, and its body. `receive(n)` returns 1 to n bytes, and none at the end.

    Raises `EOFError` if the other side has ended, `ValueError` if the bytes are no message.
    """
    is_error, size_bytes = _HEADER.unpack(_read(receive, _HEADER.size))
    if is_error > 1:
        raise ValueError("these bytes are no message")
    return bool(is_error), _read(receive, size_bytes)


def _read(receive: Callable[[int], bytes], size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        chunk = receive(min(size_bytes - len(content), _CHUNK_BYTES))
        if not chunk:
            raise EOFError("the other side has ended")
        content += chunk
    return bytes(content)
