"""Real Cog servers, and their processes: which live, by a mark in their environment."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy
from fresh_boot import ROOT
from PIL import Image

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, files

MARK = "SOAK_LIFE"
_COMPILER = b"compile_cache.background.child"
_LOOK_S = 0.05


def with_tini(predictor: str, log: Path, environ: Mapping[str, str], project: Path = ROOT) -> CogServer:
    """A server as it runs in a container, under tini where that is installed; not started. It dies with tini."""
    wrapper = ("tini", "-s", "-p", "SIGKILL", "--") if shutil.which("tini") else ()
    return CogServer(predictor, log, environ, project, wrapper)


def pixels(answer: Mapping[str, Any]) -> Any:
    """The picture of a server's answer: [height, width, 3], from 0 to 255."""
    with Image.open(io.BytesIO(files(answer)[0])) as image:
        return numpy.asarray(image.convert("RGB"), dtype=numpy.int16)


def marked(mark: str) -> list[int]:
    """The living processes that were started with this mark, zombies left out."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not is_zombie and wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def compilers(mark: str) -> list[int]:
    """Those of them that compile."""
    return [pid for pid in marked(mark) if _COMPILER in command(pid)]


def command(pid: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int:
    """The process that started another one; 0 if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def kill(pid: int, number: int) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def wait_gone(mark: str, timeout_s: float, but: Collection[int] = ()) -> list[int]:
    """The marked processes that still live after so many seconds, `but` for one."""
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in marked(mark) if pid not in but]) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return left
