"""What report_page.html.jinja shows: a page that loads and runs nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader

from compile_cache.cli import terminal as out
from compile_cache.cli.report import StoredReport, lanes_of
from compile_cache.errors import CompileCacheError
from compile_cache.lifecycle.report import BootReport
from compile_cache.storage.catalog import Catalog, read_catalog, read_record
from compile_cache.storage.stores.base import ObjectStore
from compile_cache.timeline import Span

_MOST_IN_FULL = 20
_MOST_ROWS = 6
_MOST_TICKS = 8
# The width of a label's character, in percent of a timeline.
_CHARACTER = 0.74
# The colour of a span: by lane and name, else by lane. A region's spans are named `class: what`.
_KINDS = {"setup import": "import", "setup weights": "weights", "setup join": "wait", "setup warm_up": "warm-up"}
_KINDS |= {"preload load": "load", "regions compile": "compile", "regions compile ahead": "ahead", "regions": "load"}
_KINDS |= {"preload": "import", "restore": "load", "publish": "publish", "second process": "compile"}
# What each colour stands for.
MEANINGS = {"import": "import modules", "weights": "load weights", "warm-up": "warm up"}
MEANINGS |= {"load": "restore, load, compare", "compile": "compile", "ahead": "compile ahead of time"}
MEANINGS |= {"publish": "publish", "wait": "wait", "other": "other"}


class Bar(NamedTuple):
    """A span in a timeline; places are percents. The label is empty where neither the bar nor the space after it has
    room."""

    title: str
    seconds: float
    kind: str
    left: float
    width: float
    label: str
    is_label_beside: bool


def page_of(reports: Sequence[StoredReport], store: ObjectStore | None, now_s: float) -> str:
    """The page of some reports, the newest first, and of a store.

    Raises:
        CompileCacheError: the store cannot be listed, or there is nothing to show.
    """
    catalog = read_catalog(store) if store else Catalog()
    versions = sorted((v for v in catalog.versions if v.packs), key=lambda v: (-v.used_s, v.key.prefix))
    if not reports and not versions:
        where = f"{store.location} has no versions" if store else "there is no store"
        raise CompileCacheError(f"there is nothing to show: {where}. Give boot reports: files, or folders")
    names = {stored.report.model_name for stored in reports} - {""} or {version.key.model_name for version in versions}
    history: dict[tuple[str, ...], list[BootReport]] = {}
    for report in (stored.report for stored in reports):
        key = (report.model_name, report.model_version, report.environment, _kind_of_boot(report))
        history.setdefault(key, []).append(report)
    environments = dict.fromkeys(version.key.environment for version in versions) if store else {}
    loader = PackageLoader("compile_cache.cli", "")
    templates = Environment(loader=loader, autoescape=True, finalize=_printable, trim_blocks=True, lstrip_blocks=True)
    templates.filters |= {"time": out.time_text, "seconds": seconds_text, "size": out.size_text, "age": out.age_text}
    templates.filters |= {"short": out.short_version, "digest": out.short, "count": out.count_text}
    templates.filters |= {"kind": _kind_of_boot, "verdict": _verdict, "timeline": timeline_of}
    templates.filters["median"] = statistics.median
    return templates.get_template("report_page.html.jinja").render(
        title=f"Boots of {names.pop()}" if len(names) == 1 else "Boots and compiled artifacts",
        now_s=now_s,
        reports=reports,
        kinds=MEANINGS,
        most_in_full=_MOST_IN_FULL,
        longest_s=max((stored.report.ready_s for stored in reports), default=0.0) or 1.0,
        history=history,
        store=store,
        versions=versions,
        environments={one: out.environment_text(read_record(store, catalog, one)) for one in environments if store},
    )


def _printable(value: Any) -> Any:
    """Anybody may have chosen a name: write out what does not print. The template escapes the rest."""
    return out.printable(value) if type(value) is str else value


def seconds_text(seconds: float) -> str:
    """`46.3 s`, `4.60 s`, `25 ms`, `< 1 ms`."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.001 else "< 1 ms"
    return f"{seconds:.2f} s" if seconds < 9.95 else f"{seconds:.1f} s"


def _kind_of_boot(report: BootReport) -> str:
    """`eager`: nothing is to be compiled; `warm`: nothing had to be; `cold`: something was, or is being compiled."""
    if report.scope == "off" or not report.regions:
        return "eager"
    return "warm" if report.fully_cached else "cold"


def _verdict(report: BootReport) -> str:
    """The result of a boot, in a sentence."""
    if _kind_of_boot(report) == "eager":
        return "Compiling was off." if report.scope == "off" else "Nothing was given to compile."
    if report.fully_precompiled:
        return "All regions were loaded from the store. Nothing was traced or compiled."
    if report.fully_cached:
        return "All graphs came from the cache. Nothing was compiled."
    if waiting := sum(region.waiting for region in report.regions):
        return f"When this was reported, {waiting} kinds of calls were served eager: a second process compiles them."
    made = sum(region.made for region in report.regions)
    compiled = f"{out.count_text(made, 'function')} compiled, also for the next boot" if made else "the regions say why"
    return f"Not everything came from the cache: {compiled}."


def timeline_of(report: BootReport) -> dict[str, Any]:
    """What is drawn of a boot: to its last span, but at most half of READY's time beyond READY. A second process takes
    longer: its spans are drawn up to 12 times READY's time."""
    lanes = lanes_of(report)
    spans = [span for rows in lanes.values() for row in rows for span in row]
    last_s = max((span.start_s + span.seconds for span in spans), default=0.0)
    second_s = max((span.start_s + span.seconds for span in spans if span.lane == "second process"), default=0.0)
    most_s = max(1.5 * report.ready_s, min(12.0 * report.ready_s, second_s))
    window_s = max(0.01, 1.04 * min(max(report.ready_s, last_s), most_s))
    power = 10.0 ** math.floor(math.log10(window_s / _MOST_TICKS))
    step_s = next(step * power for step in (1, 2, 5, 10) if step * power * _MOST_TICKS >= window_s)
    ticks_s = [number * step_s for number in range(_MOST_TICKS) if number * step_s < window_s]
    lanes = {lane: [[s for s in row if s.start_s < window_s] for row in rows] for lane, rows in lanes.items()}
    bars = {lane: [list(_bars(row, window_s)) for row in rows if row][:_MOST_ROWS] for lane, rows in lanes.items()}
    return {
        "lanes": {lane: rows for lane, rows in bars.items() if rows},
        "ticks": [(100 * time_s / window_s, f"{time_s:g} s" if time_s else "0") for time_s in ticks_s],
        "ready": 100 * report.ready_s / window_s,
        "kinds": {bar.kind for rows in bars.values() for row in rows for bar in row if bar.seconds >= 0.001},
        "later": sum(span.start_s >= window_s for span in spans),
    }


def kind_of(span: Span) -> str:
    """What a span's colour stands for: one of `MEANINGS`."""
    what = span.name.rpartition(": ")[2]
    return _KINDS.get(f"{span.lane} {what}") or _KINDS.get(span.lane, "other")


def _bars(row: Sequence[Span], window_s: float) -> Iterator[Bar]:
    """The spans of one row."""
    starts = [*(100 * span.start_s / window_s for span in row), 100.0]
    for span, left, next_left in zip(row, starts, starts[1:], strict=False):
        left = min(left, 99.8)
        width = max(0.2, min(100 * span.seconds / window_s, 100 - left))
        what, seconds = span.name.rpartition(": ")[2], seconds_text(span.seconds)
        texts = [f"{span.name} {seconds}", f"{what} {seconds}", what]
        rooms = {False: width, True: next_left - left - width}
        places = [(text, beside) for beside in rooms for text in texts if len(text) * _CHARACTER + 1 <= rooms[beside]]
        title = f"{span.name}: {span.seconds:.3f} s, from {span.start_s:.3f} s"
        yield Bar(title, span.seconds, kind_of(span), left, width, *(places or [("", False)])[0])
