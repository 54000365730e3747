"""The second process's own side: its loop, which answers one order at a time, and how it gives way to predictions."""

from __future__ import annotations

import gc
import os
import re
import resource
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from compile_cache.errors import OrderFailed, causes
from compile_cache.importable import find

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


def serve(channel: Connection) -> None:
    """Prepare to answer orders, which may take seconds; say nothing, or why it failed; then answer each order. Raises
    `EOFError` or `OSError` when the server has hung up."""
    handler = _attempt(_handler, *channel.recv())
    has_failed = isinstance(handler, OrderFailed)
    channel.send(handler if has_failed else None)
    while not has_failed:
        channel.send(_attempt(handler, channel.recv()))
        gc.collect()  # the last order's memory, which a process that waits should not hold


def _handler(name: str, setup: bytes, hurries: bool) -> Any:
    """The function that answers orders. Automatic garbage collection is off, since it slows torch's tracing: this
    process collects after each order, and within one where memory matters. What imports make stays, so no collection
    looks at it."""
    _give_way(hurries)
    gc.disable()
    try:
        return find(name)(setup)
    finally:
        gc.freeze()


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
