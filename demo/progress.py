"""What a server does until its code is compiled, from its log and its cache directory."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

# Lines of the log, and what follows each.
_STAGES = (
    (re.compile(r"Running setup"), "importing torch and the model, loading the weights"),
    (re.compile(r"ready after"), "ready"),
    (re.compile(r"background\.begin call=(\w+)"), "a second process compiles {}"),
)
_LOOK_S = 0.5
_SILENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class Doing:
    """What a server does just now, and how many kernels its boot has built."""

    stage: str
    kernels: int

    def __str__(self) -> str:
        """One line."""
        return f"{self.stage}, {self.kernels} kernels built" if self.kernels else self.stage


def stage(log: str) -> str:
    """The stage by the last line of the log that names one."""
    for line in reversed(log.splitlines()):
        for pattern, text in _STAGES:
            if found := pattern.search(line):
                return text.format(*found.groups())
    return "starting the server"


def doing(log: Path, cache: Path) -> Doing:
    """What a server does that logs to `log` and compiles into `cache`."""
    now = stage(log.read_text(errors="replace"))
    kernels = (name.endswith(".so") for _, _, names in os.walk(cache) for name in names)
    return Doing(now, sum(kernels) if now.startswith("a second process") else 0)


@contextlib.contextmanager
def told(console: Console, title: str, look: Callable[[], Doing]) -> Iterator[None]:
    """Print what `look` finds while the block runs: on a terminal in one line that changes, else a line for each stage,
    and one after 15 s of silence."""
    is_over = threading.Event()
    started = time.monotonic()

    def lines() -> Iterator[tuple[Doing, str]]:
        while not is_over.wait(_LOOK_S):
            doing = look()
            yield doing, f"{title}, {time.monotonic() - started:.0f} s: {doing}"

    def change() -> None:
        with console.status(title) as status:
            for _, line in lines():
                status.update(line)

    def print_lines() -> None:
        said, said_at = "", started
        for doing, line in lines():
            if doing.stage != said or time.monotonic() - said_at > _SILENCE_S:
                said, said_at = doing.stage, time.monotonic()
                console.print(line, soft_wrap=True)

    teller = threading.Thread(target=change if console.is_terminal else print_lines)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
