"""The ladder's steps, and what a region reports of its own.

precompiled → cached → cold → eager. An artifact that was compiled ahead of time serves the calls that it fits; the
others go to `torch.compile`, which finds a graph or compiles one; the model's own code serves the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

log = logging.getLogger("compile_cache")

# Best first. A region reports the worst step that any call needed.
_LADDER = ("unused", "precompiled", "cached", "cold", "eager")
# A server that meets new failures for weeks must not fill its report with them.
_LONGEST_REASON = 4000
_MOST_REASONS = 20
# Three runs of one call differ by some percent: less is no difference.
_SLOWER = 0.9


@dataclass(slots=True)
class RegionReport:
    """One module class: its step of the ladder (`precompiled`, `cached`, `cold` or `eager`), which is the worst that
    any call needed, and why not a better one; `unused` if nothing called it. While `waiting` kinds of calls are served
    eager until their code arrives, the step is `eager`; `settled` is the step without them.

    `graphs` are those that torch compiled or found, `loaded` and `made` the precompiled functions. `compile_s` is what
    all that took but for `precompile_s`, in which functions were compiled ahead of time for the next boot.
    `relative_error` is ‖compiled − eager‖ / ‖eager‖ on real activations, the largest of all that was checked; in JSON,
    which has no infinity, an infinite one is the text `Infinity`. The peaks are device memory over what was in use
    before the call, of the largest call that was checked.

    `not_precompiled` says of each kind of call that will not be precompiled in the next boot why not. `compiled_ms` and
    `eager_ms` are the device time of one call, of the slowest that was timed; they are None where this boot compiled
    nothing. `is_left_eager`: `COMPILE_CACHE_LEAVE_EAGER` names the class.
    """

    name: str
    instances: int
    step: str = "unused"
    settled: str = "unused"
    waiting: int = 0
    reason: str = ""
    graphs: int = 0
    loaded: int = 0
    made: int = 0
    compile_s: float = 0.0
    precompile_s: float = 0.0
    relative_error: float | None = None
    tolerance: float | None = None
    compiled_peak_bytes: int | None = None
    eager_peak_bytes: int | None = None
    compiled_ms: float | None = None
    eager_ms: float | None = None
    not_precompiled: list[str] = field(default_factory=list)
    is_left_eager: bool = False

    @property
    def speedup(self) -> float | None:
        """Eager's time over the compiled time; None where nothing was timed."""
        return self.eager_ms / self.compiled_ms if self.eager_ms and self.compiled_ms else None

    @property
    def is_slower(self) -> bool:
        """Whether compiled calls take longer than eager ones, by more than timing errs."""
        return self.speedup is not None and self.speedup < _SLOWER

    def take_step(self, step: str) -> None:
        """Go down to `step`; a region that is there or below stays where it is."""
        if _LADDER.index(step) > _LADDER.index(self.settled):
            self.settled = step
        self.wait_for(self.waiting)

    def wait_for(self, kinds: int) -> None:
        """Note that so many kinds of calls are served eager until their code arrives."""
        self.waiting = kinds
        self.step = "eager" if kinds else self.settled

    def explain(self, reason: str) -> None:
        """Add a reason, once."""
        if reason not in self.reason and len(self.reason) < _LONGEST_REASON:
            log.info("compile.note region=%s reason=%s", self.name, reason)
            self.reason = "; ".join(filter(None, (self.reason, reason)))

    def note_not_precompiled(self, reason: str) -> None:
        """Add why a kind of call will not be precompiled in the next boot, once."""
        if reason not in self.not_precompiled and len(self.not_precompiled) < _MOST_REASONS:
            self.not_precompiled.append(reason)

    def note_speed(self, compiled_ms: float, eager_ms: float) -> None:
        """Add the times of one call."""
        if eager_ms > (self.eager_ms or 0.0):
            self.compiled_ms, self.eager_ms = compiled_ms, eager_ms

    def note_error(self, error: float, tolerance: float) -> None:
        """Add the result of a comparison with eager."""
        self.relative_error = max(error, self.relative_error or 0.0)
        self.tolerance = tolerance

    def note_peaks(self, compiled_bytes: int | None, eager_bytes: int | None) -> None:
        """Add the device memory that a compiled call and its eager reference took."""
        if compiled_bytes is not None and compiled_bytes > (self.compiled_peak_bytes or 0):
            self.compiled_peak_bytes, self.eager_peak_bytes = compiled_bytes, eager_bytes
