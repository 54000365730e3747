"""Handlers for a compiling process: orders that work, fail, crash, hang and leave processes behind."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def make(setup: bytes) -> Callable[[bytes], bytes]:
    """The handler of orders that `order` writes: each names a function of this module, without its underscore. `setup`
    comes back with each answer to `describe`."""

    def answer(order: bytes) -> bytes:
        told = json.loads(order)
        return globals()[f"_{told.pop('name')}"](setup=setup, **told)

    return answer


def make_pickled(setup: bytes) -> Callable[[bytes], bytes]:
    """As `make`, for the queue, which pickles: the answer is a `content` that has no `reason`."""
    answer = make(setup)
    return lambda order: pickle.dumps(SimpleNamespace(content=answer(pickle.loads(order)[0]), reason=""))


def build_source(folder: Path) -> Path:
    """The source of a library of some megabytes, which the linker takes a while to write."""
    (folder / "content").write_bytes(os.urandom(8 << 20))
    source = folder / "library.s"
    source.write_text(f'.data\n.incbin "{folder / "content"}"\n.section .note.GNU-stack,"",@progbits\n')
    return source


def make_library(setup: bytes) -> Callable[[bytes], bytes]:
    """Builds the library that an order names, as torch does: in place, unless it exists."""
    _, folder, *_ = pickle.loads(setup)

    def answer(order: bytes) -> bytes:
        library = Path(folder, pickle.loads(order)[0].decode() + ".so")
        library.with_suffix(".begun").touch()
        if not library.exists():
            subprocess.run(["gcc", "-shared", "-o", library, os.environ["BACKGROUND_SOURCE"]], check=True)
        files = (library.name,)
        return pickle.dumps(SimpleNamespace(path=library.name, files=files, reason="", is_precompiled=False))

    return answer


def make_nonsense(setup: bytes) -> Callable[[bytes], bytes]:
    return lambda order: b"no pickle"


def order(name: str, **arguments: Any) -> bytes:
    return json.dumps({"name": name, **arguments}).encode()


def make_nothing(setup: bytes) -> Callable[[bytes], bytes]:
    raise LookupError(f"nothing is made from {setup.decode()}")


def make_crash(setup: bytes) -> Callable[[bytes], bytes]:
    print("crashing before the first order")
    os.abort()


def make_once(setup: bytes) -> Callable[[bytes], bytes]:
    """As `make` with no setup, but crashes where the folder `setup` has no file `tried` yet."""
    if _is_first_time(setup.decode()):
        os.abort()
    return make_pickled(b"")


class _Ring:
    """Garbage, once nobody has it."""

    def __init__(self) -> None:
        self.own = self


def _describe(setup: bytes) -> bytes:
    described = {
        "setup": setup.decode(),
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "path": sys.path,
        "arguments": sys.argv[1:],
        "cwd": os.getcwd(),
        "environ": dict(os.environ),
        "open": {number: os.readlink(f"/proc/self/fd/{number}") for number in _descriptors()},
        "core_limit": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "has_torch": "torch" in sys.modules,
        "collects": gc.isenabled(),
        "garbage": sum(isinstance(each, _Ring) for each in gc.get_objects()),
    }
    _Ring()
    return json.dumps(described).encode()


def _descriptors() -> list[str]:
    return [number for number in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{number}")]


def _echo(setup: bytes, size: int) -> bytes:
    return b"e" * size


def _speak(setup: bytes) -> bytes:
    print("said with print")
    print("said to stderr", file=sys.stderr)
    os.write(1, b"written to 1\n")
    subprocess.run(["sh", "-c", "echo said by a grandchild; echo grandchild to stderr >&2; cat"], check=True)
    return b""


def _raise(setup: bytes, error: str, message: str) -> bytes:
    try:
        raise {"MemoryError": MemoryError, "RuntimeError": RuntimeError, "SystemExit": SystemExit}[error](message)
    except BaseException as cause:
        raise ValueError("wrapped") from cause


def _fail(setup: bytes, message: str) -> bytes:
    raise OSError(28, message)


def _exit(setup: bytes, code: int) -> bytes:
    subprocess.Popen(["sleep", "600"])
    print("about to exit")
    os._exit(code)


def _abort(setup: bytes) -> bytes:
    print("about to abort")
    os.abort()


def _die(setup: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


def _list_inherited(setup: bytes) -> bytes:
    """Write into the log what a child has open that C code has started."""
    os.system("ls -l /proc/self/fd")
    return b""


def _leave(setup: bytes, code: int) -> bytes:
    """End, and leave a fork that has the channel open."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(code)


def _babble(setup: bytes) -> bytes:
    for number in _descriptors():
        if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            os.write(int(number), b"\xff" * 100)
    time.sleep(600)
    return b""


def _hang(setup: bytes, folder: str, semaphores: int = 1) -> bytes:
    """Hang with a child, a fork and semaphores."""
    subprocess.Popen(["sleep", "600"])
    kept = [multiprocessing.get_context("fork").Lock() for _ in range(semaphores)]
    if os.fork() == 0:
        time.sleep(600)
    Path(folder, "hangs").touch()
    time.sleep(600)
    return repr(kept).encode()


def _hold_the_lock(setup: bytes, folder: str) -> bytes:
    """Hang in C code that keeps Python's lock: no other thread of this process runs."""
    ctypes.PyDLL(None).system(f"touch '{folder}/hangs'; sleep 600".encode())
    return b""


def _fail_once(setup: bytes, folder: str, how: str) -> bytes:
    if not _is_first_time(folder):
        return b"done"
    if how == "memory":
        raise MemoryError("no memory for this")
    return _die(setup)


def _is_first_time(folder: str) -> bool:
    tried = Path(folder, "tried")
    is_first = not tried.exists()
    tried.touch()
    return is_first
