"""The timeline of a boot: what each of its threads did, from when, and for how long.

If the program has imported OpenTelemetry, these are its spans too: until READY, of the span in which the boot began
(Cog's `cog.setup.predictor`), and then roots.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        context: Any = sys.modules.get("opentelemetry.context")
        self._parent = context.get_current() if context is not None else None
        _recording.append(self)

    @property
    def age_s(self) -> float:
        """The seconds since the boot began."""
        return time.perf_counter() - self._origin

    def end_setup(self) -> None:
        """From now on, spans of traces are roots."""
        self._parent = None

    def add(self, lane: str, name: str, began: float, seconds: float | None = None) -> None:
        """Add work that began at `began`, by `time.perf_counter`. If `seconds` is None, it ends now."""
        seconds = time.perf_counter() - began if seconds is None else seconds
        if len(self.spans) < _MOST_SPANS and began >= self._origin:
            self.spans.append(Span(lane, name, began - self._origin, seconds))
        trace: Any = sys.modules.get("opentelemetry.trace")
        if trace is not None and began >= self._origin:
            parent = self._parent if self._parent is not None else sys.modules["opentelemetry.context"].Context()
            start_ns = int((self.started_s + began - self._origin) * 1e9)
            span = trace.get_tracer("compile_cache").start_span(f"{lane}: {name}", parent, start_time=start_ns)
            span.end(start_ns + int(seconds * 1e9))


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
