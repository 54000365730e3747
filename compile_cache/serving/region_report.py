"""The steps of the ladder, and the report of a region.

late → precompiled → graphs → eager: a function compiled ahead of time that is loaded after READY; one that is loaded;
graphs of `torch.compile` out of stored files; the model's own code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compile_cache.errors import log
from compile_cache.serving.moment import LOCK
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.inductor.make import Answer, Traced
    from compile_cache.serving.kinds import Kinds

# Best first. A region reports the worst step that any call needed.
_LADDER = ("unused", "late", "precompiled", "graphs", "eager")
# New failures over weeks must not fill a server's report.
_LONGEST_REASON = 4000
_MOST_REASONS = 20
# Runs of one call differ by some percent. A smaller difference is none.
_SLOWER = 0.9


@dataclass(slots=True)
class RegionReport:
    """The report of one module class.

    `settled` is the worst step of the ladder that any call needed: `late`, `precompiled`, `graphs` or `eager`; `unused`
    if nothing called the class. `reason` says why no better one. It leaves out the `waiting` kinds of calls,
    which wait for the second process; `step` is the step with them.

    `graphs` counts the graphs that were found; `loaded` and `made` count precompiled functions. `compile_s` is the
    time that the second process took for these; `compare_s` is the time to compare code and to trace graphs.

    `relative_error` is the largest checked ‖compiled − eager‖ / ‖eager‖ on real activations. JSON has no infinity:
    there an infinite error is the text `Infinity`.

    `not_precompiled` says why the next boot will not have some kinds of calls precompiled. `compiled_ms` and `eager_ms`
    are the device time of the slowest timed call; None if this boot compiled nothing. `is_left_eager`:
    `COMPILE_CACHE_LEAVE_EAGER` names the class.
    """

    name: str
    instances: int
    settled: str = "unused"
    waiting: int = 0
    reason: str = ""
    graphs: int = 0
    loaded: int = 0
    made: int = 0
    compare_s: float = 0.0
    compile_s: float = 0.0
    relative_error: float | None = None
    tolerance: float | None = None
    compiled_ms: float | None = None
    eager_ms: float | None = None
    not_precompiled: list[str] = field(default_factory=list)
    is_left_eager: bool = False

    @property
    def step(self) -> str:
        """The worst step of the ladder that any call needs now."""
        return "eager" if self.waiting else self.settled

    @property
    def speedup(self) -> float | None:
        """Eager time divided by compiled time; None if nothing was timed."""
        return self.eager_ms / self.compiled_ms if self.eager_ms and self.compiled_ms else None

    @property
    def is_slower(self) -> bool:
        """Whether compiled calls take longer than eager ones, by more than the error of timing."""
        return self.speedup is not None and self.speedup < _SLOWER

    def lower_to(self, step: str) -> None:
        """Go down to `step`. A region at that step or below stays there."""
        with LOCK:
            if _LADDER.index(step) > _LADDER.index(self.settled):
                self.settled = step

    def wait_for(self, kinds: Kinds) -> None:
        """Note how many kinds of calls are served eager until their code arrives, or a comparison of it ends."""
        with LOCK:  # so that no older number comes last
            self.waiting = kinds.waiting

    def explain(self, reason: str, call: object = "") -> None:
        """Add a reason, once. If it is why a kind of call is eager, the first such `call` is named."""
        if reason not in self.reason and len(self.reason) < _LONGEST_REASON:
            reason = f"eager for {call}: {reason}" if call else reason
            log.info("compile.note region=%s reason=%s", self.name, reason)
            self.reason = "; ".join(filter(None, (self.reason, reason)))

    def note_eager(self, reason: str, call: object = "") -> None:
        """Go down to eager, and say why."""
        self.lower_to("eager")
        self.explain(reason, call)

    def note_not_precompiled(self, reason: str) -> None:
        """Add a reason why the next boot will not have a kind of call precompiled, once."""
        self.explain(f"not precompiled: {reason}")
        if reason not in self.not_precompiled and len(self.not_precompiled) < _MOST_REASONS:
            self.not_precompiled.append(reason)

    def note_traced(self, traced: Traced, started: float) -> None:
        """Note how the graphs of one call came. Tracing began at `started`."""
        self.graphs += traced.counts.graphs
        self.compare_s += traced.seconds
        note("regions", f"{self.name}: look up", started, traced.seconds)
        if traced.broken_by:
            self.explain(f"with graph breaks: {traced.broken_by}")

    def note_made(self, answer: Answer) -> None:
        """Count a function that was compiled ahead of time, and add the times of its call, if it was timed."""
        self.made += 1
        if answer.eager_ms > (self.eager_ms or 0.0):
            self.compiled_ms, self.eager_ms = answer.compiled_ms, answer.eager_ms
            if self.is_slower:
                log.warning(
                    "compile.slower region=%s compiled_ms=%.3f eager_ms=%.3f Compiled code is slower than eager here. "
                    "To leave the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
                    self.name,
                    answer.compiled_ms,
                    answer.eager_ms,
                )

    def note_error(self, error: float, tolerance: float) -> None:
        """Add the result of a comparison with eager."""
        self.relative_error = max(error, self.relative_error or 0.0)
        self.tolerance = tolerance
