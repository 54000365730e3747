"""The lanes of a boot's timeline: which bars each has. `drawing` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compile_cache.cli.terminal import printable
from compile_cache.lifecycle.report import BootReport
from compile_cache.timeline import MOST_SPANS, Span

# In the order of a boot.
_NAMES = ("setup", "regions", "preload", "restore", "publish", "second process")
# The colour of a span: by lane and name, else by lane.
_KINDS = {
    ("setup", "import"): "import",
    ("setup", "weights"): "weights",
    ("setup", "join"): "wait",
    ("setup", "warm_up"): "warm-up",
    ("preload", "load"): "load",
    ("restore", "turn to compile"): "wait",
}
_LANE_KINDS = {"preload": "import", "restore": "load", "publish": "publish", "second process": "compile"}
_REGION_KINDS = {"compile": "compile", "compile ahead": "ahead"}
# What each colour stands for.
KINDS = {
    "import": "import modules",
    "weights": "load weights",
    "warm-up": "warm up",
    "load": "restore, load, compare",
    "compile": "compile",
    "ahead": "compile ahead of time",
    "publish": "publish",
    "wait": "wait",
    "other": "other",
}


@dataclass(frozen=True, slots=True)
class Bar:
    """A span to draw, and its kind, one of `KINDS`. `start_s` counts from the boot's start."""

    name: str
    kind: str
    start_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """When it ends."""
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True)
class Lane:
    """Bars in rows: no two of a row overlap."""

    name: str
    rows: Sequence[Sequence[Bar]]


def lanes_of(report: BootReport) -> list[Lane]:
    """The lanes that have spans. Without spans, the report's phases stand one after the other."""
    spans = report.spans[:MOST_SPANS] or _phases_in_turn(report)
    names = [*_NAMES, *sorted({span.lane for span in spans} - set(_NAMES))]
    found = {name: sorted((s for s in spans if s.lane == name), key=lambda span: span.start_s) for name in names}
    return [Lane(name, _rows([_bar(span) for span in spans])) for name, spans in found.items() if spans]


def _phases_in_turn(report: BootReport) -> list[Span]:
    spans, start_s = [], 0.0
    for name, seconds in report.phases.items():
        spans.append(Span("setup", name, start_s, seconds))
        start_s += seconds
    return spans


def _bar(span: Span) -> Bar:
    kind = _KINDS.get((span.lane, span.name)) or _LANE_KINDS.get(span.lane, "other")
    if span.lane == "regions":
        kind = _REGION_KINDS.get(span.name.rpartition(": ")[2], "load")
    return Bar(printable(span.name), kind, max(0.0, span.start_s), max(0.0, span.seconds))


def _rows(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Each bar in the first row that is free at its start."""
    rows: list[list[Bar]] = []
    for bar in bars:
        free = next((row for row in rows if row[-1].end_s <= bar.start_s + 1e-6), None)
        if free is None:
            rows.append([bar])
        else:
            free.append(bar)
    return rows


def window_s(report: BootReport, lanes: Sequence[Lane]) -> float:
    """How many seconds to draw: to the last bar's end, but at most half of READY's time beyond READY. A second process
    takes longer: its bars are drawn up to 12 times READY's time."""
    last_s = max((bar.end_s for lane in lanes for row in lane.rows for bar in row), default=0.0)
    second_s = [bar.end_s for lane in lanes if lane.name == "second process" for row in lane.rows for bar in row]
    most_s = max(1.5 * report.ready_s, min(12.0 * report.ready_s, max(second_s, default=0.0)))
    return max(0.01, min(max(last_s, report.ready_s), most_s) * 1.04)


def later_than(time_s: float, lanes: Sequence[Lane]) -> int:
    """How many bars begin after `time_s`."""
    return sum(bar.start_s > time_s for lane in lanes for row in lane.rows for bar in row)
