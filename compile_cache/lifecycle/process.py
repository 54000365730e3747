"""The process that boots: its user, its signals, its age, and where its setup is read."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import pwd
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping

log = logging.getLogger("compile_cache")

# Where Cog 0.23 keeps its worker's own stderr. At the exit, the pipes that it has put in its place are gone.
_COGS_STDERR = 101

_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # in getpass.getuser's order


def name_user(environ: MutableMapping[str, str]) -> None:
    """Set `USER` where the user has no name, as under Kubernetes' `runAsUser`. torch and diffusers ask for one while
    they are imported, and the import fails without."""
    if any(environ.get(name) for name in _USER_VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["USER"] = f"uid-{os.getuid()}"


def keep_worker_alive_on_interrupt() -> None:
    """Under Cog, leave Ctrl-C to the server, which then stops this worker in order.

    A terminal sends SIGINT to both. A worker that takes it hangs in its teardown until it is killed, and never runs the
    exit hook. Only the main thread may set a handler.
    """
    under_cog = "coglet" in sys.modules and threading.current_thread() is threading.main_thread()
    if under_cog and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def process_age_s() -> float:
    """Seconds since this process was started (proc(5): field 22 of stat, in clock ticks since the machine's start)."""
    with open("/proc/self/stat") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def say(lines: Iterable[str]) -> None:
    """Log each line; where the program has configured no logging, which would drop them, print them to stderr."""
    is_configured = log.hasHandlers() or log.level != logging.NOTSET
    for line in lines:
        if is_configured:
            log.info(line)
        else:
            print(line, file=sys.stderr)


def say_unfinished_at_exit(waiting: Callable[[], int]) -> None:
    """Say at the exit how many kinds of calls are still `waiting` for their code, if there are any."""
    process = os.getpid()

    def say_unfinished() -> None:
        if os.getpid() == process and (count := waiting()):
            _say_last(
                f"background.unfinished calls={count} The process ends first; the next boot goes on. "
                "COMPILE_CACHE_COLD_START=block compiles before READY."
            )

    atexit.register(say_unfinished)


def _say_last(line: str) -> None:
    """Log a line at the exit; under Cog, write it to the server's own stderr."""
    if "coglet" not in sys.modules:
        log.warning(line)
        return
    with contextlib.suppress(OSError):  # another Cog has another file under this number, or none
        if os.path.samestat(os.fstat(_COGS_STDERR), os.stat(f"/proc/{os.getppid()}/fd/2")):
            os.write(_COGS_STDERR, f"{line}\n".encode())
