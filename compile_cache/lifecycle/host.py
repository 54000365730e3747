"""The host of a boot: the server that starts it, its cache directory, and its user, signals, age and log."""

from __future__ import annotations

import contextlib
import functools
import getpass
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from compile_cache.errors import CacheDirectoryError, Failure, log
from compile_cache.key.model_version import has_common_name, model_name
from compile_cache.settings import Settings, split_url
from compile_cache.storage.directory import CacheDirectory

# Of a boot's packages, those with thousands of source files.
_LARGE_PACKAGES = ("torch", "transformers", "diffusers")
# In the command line of Cog's server (python -m cog.server.http), the parent of the process that boots.
_SERVER = b"cog.server.http"
# `cog serve` passes this option, and so do platforms that keep a server running.
_KEPT_RUNNING = b"--await-explicit-shutdown"
_SETUP_BUDGET_S = 240.0
_SAVED_STDERR = 101
# Cog's worker forwards lines in milliseconds. Those that it has not forwarded when a setup fails are lost.
_FORWARDED_S = 0.5
# INFO and what is above it: a level that no program sets, so that one that a program sets later is told from it.
_SHOWN = logging.INFO - 1


def resolve_cold_start(settings: Settings) -> Settings:
    """The settings with `auto` replaced.

    `cold_start` becomes `background` in a Cog server that stays, and wherever a hit is required, and `block` elsewhere.
    `unseen` becomes `background`, or `eager` in a server of one prediction whose setup compiles: it would end before
    the answer came. Only a server of one prediction has no `setup_budget_s` then, and nothing is required of its boot.
    """
    cold_start, server = settings.cold_start, _server()
    require = settings.require if server != "answers once" else "off"
    if require == "hit":  # a setup that lacks code fails, so it compiles none
        cold_start = "background"
    elif cold_start == "auto":
        cold_start = "background" if server == "stays" else "block"
    unseen = settings.unseen
    if unseen == "auto":
        unseen = "eager" if (server, cold_start) == ("answers once", "block") else "background"
    budget_s = settings.setup_budget_s
    if budget_s is None and server != "answers once":
        budget_s = _SETUP_BUDGET_S
    return replace(settings, cold_start=cold_start, unseen=unseen, setup_budget_s=budget_s, require=require)


def _server() -> str:
    """Whether the Cog server that has started this process `stays` or `answers once`; empty without such a server.

    `cog run` and `cog predict` start a server for one prediction. They mount the project over the image's working
    directory, and do not ask the server to await its shutdown.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no /proc: not Linux, where Cog's images run
        return ""
    if _SERVER not in command:
        return ""
    is_kept = any(part.startswith(_KEPT_RUNNING) for part in command)
    return "stays" if is_kept or not os.path.ismount(os.getcwd()) else "answers once"


def name_user(environ: MutableMapping[str, str]) -> None:
    """Set `USER` if the user has no name, as under Kubernetes' `runAsUser`. Without a name, torch and diffusers fail to
    import."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError since Python 3.13
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
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def bytecode_warnings() -> Iterator[str]:
    """A warning if Python compiles the source of a large package in each boot, because nothing keeps its bytecode."""
    specs = [module.__spec__ for name in _LARGE_PACKAGES if (module := sys.modules.get(name)) and module.__spec__]
    missing = [spec.name for spec in specs if spec.cached and not os.path.exists(spec.cached)]
    if missing:
        yield (
            f"Each boot compiles the Python source of {' and '.join(missing)}, which takes seconds: there is no "
            "bytecode, and none was written. Run `python -m compileall` over site-packages when the image is built."
        )


def show_log() -> None:
    """Print the library's lines to stderr, unless somebody has configured the logging."""
    if not log.hasHandlers() and log.level == logging.NOTSET:
        log.addHandler(_UntilConfigured())
        log.setLevel(_SHOWN)


@functools.cache
def container_log() -> logging.Handler:
    """Prints lines into the container's log, also at the exit, when Cog's pipes are gone. Cog's worker has saved its
    server's stderr as file descriptor 101. In any other process, this prints nothing."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(_SAVED_STDERR), os.stat(f"/proc/{os.getppid()}/fd/2")):
            return logging.StreamHandler(os.fdopen(_SAVED_STDERR, "w", closefd=False))
    return logging.NullHandler()


def log_failed_setup(error: BaseException) -> None:
    """Log an error that fails the setup, once: Cog shows no traceback of it anywhere. First one line, then the
    traceback, unless the error is only about to be raised. Takes half a second under Cog."""
    if "is_logged" not in vars(error):
        vars(error)["is_logged"] = True
        raised = error if error.__traceback__ else None
        log.error("setup.failed The setup failed: %s", Failure(error).reason if raised else error, exc_info=raised)
        if "coglet" in sys.modules:
            time.sleep(_FORWARDED_S)


class _UntilConfigured(logging.StreamHandler[TextIO]):
    """Prints lines to stderr until the program configures its logging."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line. Once the root logger has a handler, step back."""
        if logging.getLogger().handlers:
            log.removeHandler(self)
            if log.level == _SHOWN:
                log.setLevel(logging.NOTSET)
        else:
            super().emit(record)


def claim_workplace(
    settings: Settings, model: str, warn: Callable[[str], None]
) -> tuple[CacheDirectory | None, Settings]:
    """Claim the cache directory at the fixed path; else one of this user in the folder of temporary files; else serve
    eager. Returns it, and the boot's settings from now on."""
    directory: CacheDirectory | None = None
    try:
        directory = CacheDirectory.claim(Path(settings.dir))
    except CacheDirectoryError as error:
        settings = replace(settings, store="off", layers=(), publish=False)
        warn(f"{error} This boot compiles into a temporary folder, and restores and publishes nothing.")
        try:
            directory = CacheDirectory.claim(Path(tempfile.gettempdir(), f"compile-cache-{os.geteuid()}"))
        except (CacheDirectoryError, OSError) as temporary:
            warn(f"No temporary folder can be made either, so this boot serves eager: {temporary}")
    if directory is not None and os.statvfs(directory.path).f_flag & os.ST_NOEXEC:
        warn(
            f"{directory.path} is mounted noexec, so compiled code cannot be loaded from it. This boot serves eager. "
            "Set COMPILE_CACHE_DIR to a folder on another mount, or mount it with exec."
        )
        directory = None
    is_shared = split_url(settings.store)[0] != "file"
    if directory is None:
        settings = replace(settings, scope="off")
    elif is_shared and not settings.model_name and has_common_name(model):
        warn(
            f"{settings.store} names the model {model_name(model)!r}, after its folder {model}. Other models' folders "
            "may have the same name. Set COMPILE_CACHE_MODEL_NAME."
        )
    return directory, settings
