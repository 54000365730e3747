"""The timeline of a boot: what each of its threads did, from when, and for how long."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

# A server compiles for months: the report keeps the beginning.
_MOST_SPANS = 256
_MOST_BOOTS = 16


@dataclass(frozen=True, slots=True)
class Span:
    """Work of one `lane`: `setup` (the caller's thread), `restore`, `preload`, `regions` (calls of the warm-up that
    compile, load or compare), `publish` or `second process`. `start_s` counts from the boot's start."""

    lane: str
    name: str
    start_s: float
    seconds: float


class Timeline:
    """The spans of the boot that begins now. Any thread may add one; the first 256 are kept."""

    def __init__(self) -> None:
        self.started_s = time.time()
        self.spans: list[Span] = []
        self._origin = time.perf_counter()
        _recording.append(self)

    def add(self, lane: str, name: str, began: float, seconds: float | None = None) -> None:
        """Add work that began at `began`, by `time.perf_counter`. If `seconds` is None, it ends now."""
        seconds = time.perf_counter() - began if seconds is None else seconds
        if len(self.spans) < _MOST_SPANS and began >= self._origin:
            self.spans.append(Span(lane, name, began - self._origin, seconds))


# A boot's threads work on after the caller has dropped the boot.
_recording: deque[Timeline] = deque(maxlen=_MOST_BOOTS)


def note(lane: str, name: str, began: float, seconds: float | None = None) -> None:
    """Add work to the timelines of the last 16 boots of this process. See `Timeline.add`."""
    for timeline in list(_recording):
        timeline.add(lane, name, began, seconds)


@contextlib.contextmanager
def noted(lane: str, name: str) -> Iterator[None]:
    """Note the context's time, also if it raises."""
    began = time.perf_counter()
    try:
        yield
    finally:
        note(lane, name, began)
