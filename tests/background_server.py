"""A server with a compiling process, which a test kills.

    python background_server.py FOLDER MODE [SECONDS]

It prints a line when its process is at work. After SECONDS it kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from background_handlers import job

from compile_cache.background.process import CompilingProcess
from compile_cache.errors import ProcessDied

HOUR_S = 3600.0


def start(folder: Path) -> CompilingProcess:
    return CompilingProcess.start("background_handlers:make", b"", folder / "log", os.environ)


def work(folder: Path, job_name: str) -> None:
    """Hand over a job that never ends, on another thread, and wait until it has begun."""
    process = start(folder)
    hangs = threading.Thread(target=attempt, args=(process, job(job_name, folder=str(folder))), daemon=True)
    hangs.start()
    while not (folder / "hangs").exists():
        time.sleep(0.01)


def attempt(process: CompilingProcess, content: bytes) -> None:
    try:
        process.do(content, HOUR_S)
    except ProcessDied as error:
        print(error)


def serve(folder: Path, mode: str) -> None:
    if mode == "restless":  # killed at any moment of a process's life
        print("at work", flush=True)
        while True:
            work(folder, "hang")
            (folder / "hangs").unlink()
    work(folder, "hold_the_lock" if mode == "hold_the_lock" else "hang")
    fork = 0
    if mode == "fork":  # keeps open what this process has open, and runs its exit hooks
        fork = os.fork()
        if fork == 0:
            os.setsid()
            time.sleep(HOUR_S)
    print(f"at work {fork}", flush=True)
    if mode != "exit":
        time.sleep(HOUR_S)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    serve(Path(sys.argv[1]), sys.argv[2])
