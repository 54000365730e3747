"""A server with a compiling process, which a test kills.

    python background_server.py FOLDER MODE [SECONDS]

It prints a line when its process is at work. After SECONDS it kills itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from background_handlers import order

from compile_cache.background.child import CompilingProcess
from compile_cache.errors import ProcessDied

HOUR_S = 3600.0


def work(folder: Path, order_name: str, **arguments: int) -> CompilingProcess:
    """Hand over a job that never ends, on another thread, and wait until it has begun."""
    process = CompilingProcess("background_handlers:make", b"", folder / "log", os.environ)
    content = order(order_name, folder=str(folder), **arguments)
    threading.Thread(target=attempt, args=(process, content), daemon=True).start()
    while not (folder / "hangs").exists():
        time.sleep(0.01)
    return process


def attempt(process: CompilingProcess, content: bytes) -> None:
    with suppress(ProcessDied):
        process.answer(content, HOUR_S)


def work_and_stop(folder: Path) -> NoReturn:
    """Start and stop processes, so that a kill comes at any moment of a process's life."""
    print("at work", flush=True)
    while True:
        # No semaphores: a kill in the middle of glibc's sem_open leaves a file of 32 bytes in /dev/shm.
        process = work(folder, "hang", semaphores=0)
        time.sleep(random.uniform(0.0, 0.3))
        process.stop()
        (folder / "hangs").unlink()


def serve(folder: Path, mode: str) -> None:
    if mode == "restless":
        work_and_stop(folder)
    work(folder, "hold_the_lock" if mode == "hold_the_lock" else "hang")
    fork = 0
    if mode == "fork":  # it keeps open what this process has open
        fork = os.fork()
        if fork == 0:
            os.setsid()
            time.sleep(HOUR_S)
    print(f"at work {fork}", flush=True)
    if mode != "exit":
        time.sleep(HOUR_S)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    if len(sys.argv) > 3:
        threading.Timer(float(sys.argv[3]), os.kill, (os.getpid(), signal.SIGKILL)).start()
    serve(Path(sys.argv[1]), sys.argv[2])
