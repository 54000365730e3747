"""The ladder's steps, and what a region reports of its own.

precompiled → cached → cold → eager. An artifact that was compiled ahead of time serves the calls that it fits; the
others go to `torch.compile`, which finds a graph or compiles one; the model's own code serves the rest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

log = logging.getLogger("compile_cache")

# Best first. A region reports the worst step that any call needed.
_LADDER = ("unused", "precompiled", "cached", "cold", "eager")
# A server that meets new failures for weeks must not fill its report with them.
_LONGEST_REASON = 4000


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

    def note_error(self, error: float, tolerance: float) -> None:
        """Add the result of a comparison with eager."""
        self.relative_error = max(error, self.relative_error or 0.0)
        self.tolerance = tolerance

    def note_peaks(self, compiled_bytes: int | None, eager_bytes: int | None) -> None:
        """Add the device memory that a compiled call and its eager reference took."""
        if compiled_bytes is not None and compiled_bytes > (self.compiled_peak_bytes or 0):
            self.compiled_peak_bytes, self.eager_peak_bytes = compiled_bytes, eager_bytes
