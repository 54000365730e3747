"""Resolves `COMPILE_CACHE_COLD_START=auto`: whether this boot compiles before READY or after it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from compile_cache.settings import Settings

# In the command line of Cog's server (python -m cog.server.http), the parent of the process that boots.
_SERVER = b"cog.server.http"
# `cog serve` passes this option, and so do platforms that keep a server running.
_KEPT_RUNNING = b"--await-explicit-shutdown"


def resolve_cold_start(settings: Settings) -> Settings:
    """The settings with `auto` replaced.

    `cold_start` becomes `background` in a Cog server that stays, if functions may be compiled ahead of time: the second
    process does nothing else. Elsewhere it becomes `block`. `unseen` follows `cold_start`.
    """
    cold_start = settings.cold_start
    if cold_start == "auto":
        cold_start = "background" if settings.precompile and _is_lasting_server() else "block"
    unseen = cold_start if settings.unseen == "auto" else settings.unseen
    return replace(settings, cold_start=cold_start, unseen=unseen)


def _is_lasting_server() -> bool:
    """Whether a Cog server that stays has started this process.

    `cog run` and `cog predict` start a server for one prediction. They mount the project over the image's working
    directory, and do not ask the server to await its shutdown.
    """
    try:
        command = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    except OSError:  # no /proc: not Linux, where Cog's images run
        return False
    if _SERVER not in command:
        return False
    is_kept = any(part.startswith(_KEPT_RUNNING) for part in command)
    return is_kept or not os.path.ismount(os.getcwd())
