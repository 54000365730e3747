"""`report`: reads the reports of boots, and writes them as a page and as a trace."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_cache.cli import options as opt
from compile_cache.cli import terminal as out
from compile_cache.errors import CompileCacheError, first_line
from compile_cache.files import replacing
from compile_cache.lifecycle.report import BootReport
from compile_cache.settings import Settings
from compile_cache.timeline import MOST_SPANS, Span

_MOST_REPORTS = 500
_LARGEST_NUMBER = 1e15
_NEEDED = {"restore", "regions", "phases", "ready_s"}
# In the order of a boot.
_LANES = ("setup", "regions", "preload", "restore", "publish", "second process")


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report and its file. `time_s` is when the boot started, in seconds since 1970; for a report that does not say
    so, when the file was written."""

    path: Path
    report: BootReport
    time_s: float


def write_report(paths: Sequence[Path], store: str | None, output: Path, trace: Path | None) -> None:
    """Write the page and the trace, and print what is on the page.

    Raises:
        CompileCacheError: a report cannot be read, the store cannot be listed, or there is nothing to show.
        OSError: a file cannot be written.
    """
    from compile_cache.cli.report_page import page_of

    found = find_reports(paths)
    reports, settings = found[:_MOST_REPORTS], Settings.from_env(os.environ)
    reading = None
    if store is not None or settings.store != "off" or settings.layers:
        reading = opt.open_reading(opt.read_settings(store))
    page = page_of(reports, reading, time.time())
    if reading is not None:
        opt.warn_of_problems(reading)
    for path, text in {output: page, trace: json.dumps(trace_of(reports))}.items():
        if path is not None:
            _write(path, text)
    if len(found) > _MOST_REPORTS:
        out.print_note(f"older reports that are left out: {len(found) - _MOST_REPORTS}")
    stored = f" and the versions in {reading.location}" if reading else ""
    out.print_line(f"wrote {output}: {out.count_text(len(reports), 'boot')}{stored}")


def _write(path: Path, text: str) -> None:
    """Write a file. It replaces neither a folder nor a device nor a boot's report."""
    if path.exists() and not path.is_file():
        raise CompileCacheError(f"{path} is {'a folder' if path.is_dir() else 'not a regular file'}: give a file")
    if path.exists() and _is_meant_as_report(path):
        raise CompileCacheError(f"{path} is a boot report: give another file")
    with replacing(path) as file:
        file.write(text.encode())


def find_reports(paths: Sequence[Path]) -> list[StoredReport]:
    """The reports among `paths`: files, and folders with `*.json` at any depth. The newest is first.

    Raises:
        CompileCacheError: a file is not readable or no boot report; or a folder has none.
    """
    found: dict[Path, StoredReport] = {}
    for path in paths:
        files = [path]
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*.json")) if file.is_file() and _is_meant_as_report(file)]
        if not files:
            remedy = "A boot writes its report to the file that COMPILE_CACHE_REPORT names"
            raise CompileCacheError(f"{path} has no boot report. {remedy}")
        for file in files:
            report = read_report(file)
            found[file.resolve()] = StoredReport(file, report, report.started_s or file.stat().st_mtime)
    return sorted(found.values(), key=lambda stored: (-stored.time_s, str(stored.path)))


def _is_meant_as_report(path: Path) -> bool:
    try:
        record = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and {"restore", "ready_s"} <= record.keys()


def read_report(path: Path) -> BootReport:
    """The report in a file.

    Raises:
        CompileCacheError: the file cannot be read, or is no report of this version of compile_cache.
    """
    import msgspec  # the other commands do not need it

    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        number: Any = {"parse_int": _integer, "parse_float": _number, "parse_constant": _number}
        record = json.loads(path.read_bytes(), object_hook=_with_infinity, **number)
        if isinstance(record, dict) and (missing := sorted(_NEEDED - record.keys())):
            raise ValueError(f"it lacks {', '.join(missing)}")
        return msgspec.convert(record, BootReport)
    except OSError as error:
        raise CompileCacheError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise CompileCacheError(
            f"{path} is no boot report of this version of compile_cache: {first_line(error)}. Give a file that a boot "
            "has written, or use the version of compile-cache that wrote it"
        ) from error


def _number(text: str) -> float:
    if not abs(number := float(text)) < _LARGEST_NUMBER:  # or NaN
        raise ValueError(f"no report has the number {text[:20]}")
    return number


def _integer(text: str) -> int:
    _number(text)
    return int(text)


def _with_infinity(record: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a report writes it as text."""
    return {**record, "relative_error": math.inf} if record.get("relative_error") == "Infinity" else record


def lanes_of(report: BootReport) -> dict[str, list[list[Span]]]:
    """The report's spans by lane, in rows in which no two overlap. Without spans, its phases stand one after the
    other."""
    spans = [Span(s.lane, s.name, max(0.0, s.start_s), max(0.0, s.seconds)) for s in report.spans[:MOST_SPANS]]
    if not spans:
        for name, seconds in report.phases.items():
            spans.append(Span("setup", name, spans[-1].start_s + spans[-1].seconds if spans else 0.0, seconds))
    lanes: dict[str, list[list[Span]]] = {lane: [] for lane in _LANES}
    for span in sorted(spans, key=lambda span: span.start_s):
        rows = lanes.setdefault(span.lane, [])
        row = next((row for row in rows if row[-1].start_s + row[-1].seconds <= span.start_s + 1e-6), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return {lane: rows for lane, rows in lanes.items() if rows}


def trace_of(reports: Sequence[StoredReport]) -> dict[str, Any]:
    """The boots in Chrome's trace event format: each boot is a process, which begins at 0, and each lane a thread."""
    events: list[dict[str, Any]] = []
    for boot, stored in enumerate(reports, start=1):
        report = stored.report
        title = f"{report.model_name or 'boot'}: {report.restore.outcome} ({stored.path})"
        events.append({"ph": "M", "pid": boot, "name": "process_name", "args": {"name": title}})
        rows = [(lane, row) for lane, rows in lanes_of(report).items() for row in rows]
        for thread, (lane, row) in enumerate(rows, start=1):
            place = {"pid": boot, "tid": thread}
            events.append({"ph": "M", **place, "name": "thread_name", "args": {"name": lane}})
            for span in row:
                times = {"ts": span.start_s * 1e6, "dur": span.seconds * 1e6}
                events.append({"ph": "X", **place, "cat": lane, "name": span.name, **times})
        events.append({"ph": "i", "pid": boot, "tid": 1, "s": "p", "name": "READY", "ts": report.ready_s * 1e6})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
