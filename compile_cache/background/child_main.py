"""The compiling process itself: it does the server's jobs one after another, and ends with the server.

`child.py` starts it as the leader of a process group. Compilers that a job starts belong to that group.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from compile_cache.importable import find

Handler = Callable[[bytes], bytes]

_LOOK_S = 0.5
_NICENESS = 10
_MOST_CHARACTERS = 1000  # of an error's message, in one line
# Errors of the process, not of its job: no memory, or a GPU context that an earlier error has broken.
_OF_PROCESS = re.compile(
    "MemoryError|out of memory|(can't|cannot) allocate memory|(CUDA|HIP)( driver)? error|(CUDNN|CUBLAS)_STATUS",
    re.IGNORECASE,
)


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
    """Raises `EOFError` or `OSError` when the server has hung up."""
    name, _, setup = read_message(channel.recv).body.partition(b"\0")
    try:
        handler = _made(name.decode(), setup)
    except BaseException as error:
        channel.sendall(encode(_failure("unready", error)))
        while True:  # until the server has read the message: it may still be sending a job
            read_message(channel.recv)
    channel.sendall(encode(Message("ready")))
    while True:
        channel.sendall(_do(handler, read_message(channel.recv).body))
        gc.collect()  # a process that waits for its next job should not hold the last one's memory


def _made(name: str, setup: bytes) -> Handler:
    """The handler. What its imports make stays, so garbage collections need not look at it, now and after each job."""
    gc.disable()
    try:
        handler: Handler = find(name)(setup)
        return handler
    finally:
        gc.freeze()
        gc.enable()


def _do(handler: Handler, job: bytes) -> bytes:
    """The encoded answer. The process goes on after any error of a job, `SystemExit` included."""
    try:
        return encode(Message("answer", handler(job)))
    except BaseException as error:
        return encode(_failure("failed", error))


def _failure(kind: Literal["unready", "failed"], error: BaseException) -> Message:
    """The message that tells the server of an error. The traceback goes to the log."""
    with contextlib.suppress(OSError):  # a full disk
        traceback.print_exception(error)
    chain = [f"{type(link).__name__}: {link}" for link in _chain(error)]
    module = type(error).__module__
    name = type(error).__qualname__
    told = {
        "error_type": name if module == "builtins" else f"{module}.{name}",
        "message": " ".join(str(error).split())[:_MOST_CHARACTERS],
        "may_succeed_afresh": any(_OF_PROCESS.search(link) for link in chain),
    }
    return Message(kind, json.dumps(told).encode())


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error, and the errors that led to it."""
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _give_way() -> None:
    """Lower this process's priority, and let a crash leave no core file."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    # A kernel that groups tasks by session (sched_autogroup) reads this session's priority from this file.
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_NICENESS))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


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


Kind = Literal["setup", "job", "ready", "unready", "answer", "failed"]

_HEADER = struct.Struct("!BQ")
_KINDS: tuple[Kind, ...] = ("setup", "job", "ready", "unready", "answer", "failed")
# The most bytes of one read. Memory grows as bytes arrive, whatever length a header claims.
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    The server sends `setup` once, then `job` again and again. The process sends `ready` or `unready` once, then
    `answer` or `failed` for each job. The body of `setup` is the handler's name, a zero byte and the handler's
    argument. The body of `unready` and `failed` is JSON: the arguments of `JobFailed`.
    """

    kind: Kind
    body: bytes = b""


def encode(message: Message) -> bytes:
    """The message's bytes."""
    return _HEADER.pack(_KINDS.index(message.kind), len(message.body)) + message.body


def read_message(receive: Callable[[int], bytes]) -> Message:
    """The next message. `receive(n)` returns 1 to n bytes, and none at the end.

    Raises `EOFError` if the other side has ended, `ValueError` if the bytes are no message.
    """
    kind, size_bytes = _HEADER.unpack(_read(receive, _HEADER.size))
    if kind >= len(_KINDS):
        raise ValueError(f"{kind} is no kind of message")
    return Message(_KINDS[kind], _read(receive, size_bytes))


def _read(receive: Callable[[int], bytes], size_bytes: int) -> bytes:
    content = bytearray()
    while len(content) < size_bytes:
        chunk = receive(min(size_bytes - len(content), _CHUNK_BYTES))
        if not chunk:
            raise EOFError("the other side has ended")
        content += chunk
    return bytes(content)
