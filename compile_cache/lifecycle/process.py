"""The process that boots: its user, its signals, its age and its setup log."""

from __future__ import annotations

import logging
import os
import pwd
import signal
import sys
import threading
import time
from collections.abc import Iterable, MutableMapping

log = logging.getLogger("compile_cache")


_USER_VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME")  # in getpass.getuser's order


def name_user(environ: MutableMapping[str, str]) -> None:
    """Set `USER` if the user has no name, as under Kubernetes' `runAsUser`. Without a name, torch and diffusers fail to
    import."""
    if any(environ.get(name) for name in _USER_VARIABLES):
        return
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        environ["USER"] = f"uid-{os.getuid()}"


def keep_worker_alive_on_interrupt() -> None:
    """Under Cog, ignore Ctrl-C in this worker. The server handles it, and stops the worker in order.

    A terminal sends SIGINT to both. A worker that handles it hangs in its teardown until it is killed, and never runs
    the exit hook. Only the main thread may set a handler.
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
    """Log each line. Without a configured logging, which would drop them, print the lines to stderr."""
    is_configured = log.hasHandlers() or log.level != logging.NOTSET
    for line in lines:
        if is_configured:
            log.info(line)
        else:
            print(line, file=sys.stderr)
