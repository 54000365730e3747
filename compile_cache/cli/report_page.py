"""`report`: reads the reports of boots, and writes them as a page that loads and runs nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from compile_cache.cli import printing as out
from compile_cache.errors import CompileCacheError, first_line
from compile_cache.files import replacing
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.timeline import Span

# In the order of a boot.
_LANES = ("setup", "regions", "preload", "restore", "publish", "second process")


_MOST_IN_FULL = 20
_MOST_ROWS = 6
_MOST_TICKS = 8
# The colour of a span: by lane and name, else by lane. A region's spans are named `class: what`.
_KINDS = {"setup import": "import", "setup weights": "weights", "setup join": "wait", "setup warm_up": "warm-up"}
_KINDS |= {"preload load": "load", "regions": "load", "preload": "import", "restore": "load", "publish": "publish"}
_KINDS |= {"second process": "compile"}
# What each colour stands for.
MEANINGS = {"import": "import modules", "weights": "load weights", "warm-up": "warm up"}
MEANINGS |= {"load": "restore, load, compare", "compile": "compile", "publish": "publish"}
MEANINGS |= {"wait": "wait", "other": "other"}


def write_report(paths: Sequence[Path], output: Path) -> None:
    """Write the page, and print what is on it. Its name ends with `.html`, so it replaces no boot's report.

    Raises:
        CompileCacheError: a report cannot be read, or `output` has another name.
        OSError: the file cannot be written.
    """
    if output.suffix != ".html" or output.is_dir():
        raise CompileCacheError(f"{output} cannot be the page: give --output a file's name that ends with .html")
    read = {path.resolve(): read_report(path) for path in paths}
    reports = dict(sorted(read.items(), key=lambda item: (-item[1].started_s, item[0])))
    with replacing(output) as file:
        file.write(page_of(reports, time.time()).encode())
    out.print_line(f"wrote {output}: {out.count_text(len(reports), 'boot')}")


def read_report(path: Path) -> BootReport:
    """The report in a file.

    Raises:
        CompileCacheError: the file cannot be read, or is no report of this version of compile_cache.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise ValueError("it is not a regular file")
        # Not strict: a report has an infinite number as text.
        report = msgspec.json.decode(path.read_bytes(), type=BootReport, strict=False)
        if not report.ready_s:
            raise ValueError("it lacks ready_s")
        return report
    except OSError as error:
        raise CompileCacheError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CompileCacheError(
            f"{path} is no boot report of this version of compile_cache: {first_line(error)}. Give a file that a boot "
            "has written, or use the version of compile-cache that wrote it"
        ) from error


def lanes_of(spans: Iterable[Span]) -> dict[str, list[list[Span]]]:
    """The spans by lane, in rows in which no two overlap."""
    lanes: dict[str, list[list[Span]]] = {lane: [] for lane in _LANES}
    for span in sorted(spans, key=lambda span: span.start_s):
        rows = lanes.setdefault(span.lane, [])
        row = next((row for row in rows if row[-1].start_s + row[-1].seconds <= span.start_s + 1e-6), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return {lane: rows for lane, rows in lanes.items() if rows}


class Bar(NamedTuple):
    """A span in a timeline; places are percents. Its name, and its time, are shown if the next bar leaves `room`."""

    span: Span
    kind: str
    left: float
    width: float
    room: float


def page_of(reports: Mapping[Path, BootReport], now_s: float) -> str:
    """The page of some reports by file, the newest first."""
    import statistics  # these two take long, and the other commands do not need them

    from jinja2 import Environment, PackageLoader

    names = {report.model_name for report in reports.values()} - {""}
    history: dict[tuple[str, ...], list[BootReport]] = {}
    for report in reports.values():
        key = (report.model_name, report.model_version, report.environment, _kind_of_boot(report))
        history.setdefault(key, []).append(report)
    loader = PackageLoader("compile_cache.cli", "")
    templates = Environment(loader=loader, autoescape=True, finalize=_printable, trim_blocks=True, lstrip_blocks=True)
    templates.filters |= {"time": out.time_text, "seconds": seconds_text, "size": out.size_text}
    templates.filters |= {"short": out.short_version, "digest": out.short, "count": out.count_text}
    templates.filters |= {"kind": _kind_of_boot, "verdict": _verdict, "timeline": timeline_of}
    templates.filters["median"] = statistics.median
    return templates.get_template("report_page.html.jinja").render(
        title=f"Boots of {names.pop()}" if len(names) == 1 else "Boots",
        now_s=now_s,
        reports=list(reports.items()),
        kinds=MEANINGS,
        most_in_full=_MOST_IN_FULL,
        longest_s=max(report.ready_s for report in reports.values()),
        history=history,
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
    ends_s = [(span.start_s + span.seconds, span.lane) for span in report.spans]
    last_s = max((end_s for end_s, _ in ends_s), default=0.0)
    second_s = max((end_s for end_s, lane in ends_s if lane == "second process"), default=0.0)
    most_s = max(1.5 * report.ready_s, min(12.0 * report.ready_s, second_s))
    window_s = max(0.01, 1.04 * min(max(report.ready_s, last_s), most_s))
    power = 10.0 ** math.floor(math.log10(window_s / _MOST_TICKS))
    step_s = next(step * power for step in (1, 2, 5, 10) if step * power * _MOST_TICKS >= window_s)
    ticks_s = [number * step_s for number in range(_MOST_TICKS) if number * step_s < window_s]
    drawn = [span for span in report.spans if span.start_s < window_s]
    bars = {lane: [list(_bars(row, window_s)) for row in rows[:_MOST_ROWS]] for lane, rows in lanes_of(drawn).items()}
    return {
        "lanes": bars,
        "ticks": [(100 * time_s / window_s, f"{time_s:g} s" if time_s else "0") for time_s in ticks_s],
        "ready": 100 * report.ready_s / window_s,
        "kinds": {bar.kind for rows in bars.values() for row in rows for bar in row if bar.span.seconds >= 0.001},
        "later": len(report.spans) - len(drawn),
    }


def kind_of(span: Span) -> str:
    """What a span's colour stands for: one of `MEANINGS`."""
    what = span.name.rpartition(": ")[2]
    return _KINDS.get(f"{span.lane} {what}") or _KINDS.get(span.lane, "other")


def _bars(row: Sequence[Span], window_s: float) -> Iterator[Bar]:
    """The spans of one row."""
    ends_s = [*(span.start_s for span in row[1:]), window_s]
    for span, end_s in zip(row, ends_s, strict=True):
        left = min(100 * span.start_s / window_s, 99.8)
        width = max(0.2, min(100 * span.seconds / window_s, 100 - left))
        yield Bar(span, kind_of(span), left, width, 100 * end_s / window_s - left)
