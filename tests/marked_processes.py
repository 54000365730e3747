"""What a test sees of processes: those that were started with its mark, shared memory, and what its own has open."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 120.0


class Marked:
    """The processes that were started with a variable of the test's own, and all that these have started.

    One that is being replaced by another program (exec) is not seen for a moment. In a `with`, all end when it does: a
    test that fails beside a `Popen` would wait for it else.
    """

    def __init__(self) -> None:
        self._entry = f"BACKGROUND_TEST={uuid.uuid4().hex}"
        self.environ = {**os.environ, "BACKGROUND_TEST": self._entry.partition("=")[2]}
        self.environ.pop("PYTHONUNBUFFERED", None)

    def __enter__(self) -> Marked:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def pids(self) -> set[int]:
        return {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if self._is_in(folder)}

    def _is_in(self, folder: Path) -> bool:
        try:
            return self._entry.encode() in (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            return False

    def kill(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def open_files() -> Counter[str]:
    """The files and sockets that this process has open. Threads that earlier tests have left may close some meanwhile,
    so compare by subtraction, not by number."""
    found = Counter[str]()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found[os.readlink(descriptor)] += 1
    return found
