"""The page's sections about boots: one boot in full, and all boots in a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from compile_cache.cli.report.drawing import draw_boot, kinds_of, legend, seconds_text
from compile_cache.cli.report.lanes import lanes_of, later_than, window_s
from compile_cache.cli.report.markup import tag
from compile_cache.cli.report.parts import (
    Cell,
    badge,
    figures,
    kind_of_boot,
    lines,
    section,
    sentence,
    table,
    time_of,
    verdict,
)
from compile_cache.cli.report.reading import StoredReport
from compile_cache.cli.terminal import count_text, short, short_version, size_text
from compile_cache.lifecycle.report import BootReport
from compile_cache.regions.ladder import RegionReport

_MOST_IN_FULL = 20
_WIDE, _NARROW = 1000.0, 340.0
_COLUMNS = ("started_", "model_", "version_", "restore", "READY=", "compile or load>", "hits>", "misses>", "regions_")
_REGION_COLUMNS = (
    "region",
    "step",
    "why~",
    "loaded>",
    "made>",
    "compile or load>",
    "ahead>",
    "error>",
    "compiled>",
    "eager>",
    "speed>",
)


def newest_section(stored: StoredReport) -> Element:
    """The newest boot in full."""
    return section("newest", "Newest boot", tag("div", *_in_full(stored), class_="card", id=_anchor(0)))


def boots_section(reports: Sequence[StoredReport], left_out: int) -> Element:
    """All boots in a table, and below it the next ones in full, folded."""
    longest_s = max(stored.report.ready_s for stored in reports) or 1.0
    rows = [_row(stored, number, longest_s) for number, stored in enumerate(reports)]
    folded = [_folded(stored, number) for number, stored in enumerate(reports[:_MOST_IN_FULL]) if number]
    notes = [sentence("Hits are lookups that the cache answered, and functions that were loaded.", faint=True)]
    if len(reports) > _MOST_IN_FULL:
        notes.append(sentence(f"The newest {_MOST_IN_FULL} boots are shown in full.", faint=True))
    if left_out:
        notes.append(sentence(f"Older reports that are not on this page: {left_out}.", faint=True))
    return section("boots", "Boots", table(_COLUMNS, rows, "All boots"), *notes, *folded)


def _anchor(number: int) -> str:
    return f"boot-{number}"


def _row(stored: StoredReport, number: int, longest_s: float) -> Sequence[Cell]:
    report, counts = stored.report, stored.report.counts
    when = time_of(stored.time_s)
    width = f"width: {100 * report.ready_s / longest_s:.1f}%"
    gauge = tag("span", class_=f"gauge {kind_of_boot(report)}", style=width)
    return (
        tag("a", when, href=f"#{_anchor(number)}") if number < _MOST_IN_FULL else when,
        report.model_name or "",
        short_version(report.model_version),
        badge(report),
        tag("div", f"{report.ready_s:.2f} s", gauge),
        seconds_text(report.compile_s) if report.compile_s else "",
        str(counts.hits + counts.precompiled_loaded),
        str(counts.misses),
        ", ".join(f"{count} {step}" for step, count in Counter(region.step for region in report.regions).items()),
    )


def _folded(stored: StoredReport, number: int) -> Element:
    report = stored.report
    title = tag("h3", time_of(stored.time_s), f": {report.restore.outcome}, READY after {report.ready_s:.2f} s")
    # A link into the folded part opens it.
    return tag("details", tag("summary", title), tag("div", *_in_full(stored), id=_anchor(number)))


def _in_full(stored: StoredReport) -> list[Element]:
    report = stored.report
    parts: list[Element | None] = [
        _title(stored),
        sentence(verdict(report)),
        sentence(tag("code", str(stored.path)), faint=True),
        _figures(report),
        *_timeline(report),
    ]
    if report.regions:
        parts.append(table(_REGION_COLUMNS, [_region_row(region) for region in report.regions], "Regions"))
    parts += [part for heading, found in _notes(report) if found for part in (tag("h3", heading), lines(found))]
    return [part for part in parts if part is not None]


def _title(stored: StoredReport) -> Element:
    report = stored.report
    version = f", version {short_version(report.model_version)}" if report.model_version else ""
    environment = f", environment {short(report.environment)}" if report.environment else ""
    model = tag("strong", report.model_name or "Boot without a key")
    return sentence(model, f"{version}{environment}. Started ", time_of(stored.time_s), ".")


def _figures(report: BootReport) -> Element:
    restore, counts, publish = report.restore, report.counts, report.publish
    values: list[tuple[str, Cell]] = [
        ("READY", f"{report.ready_s:.2f} s"),
        ("since the process began", f"{report.process_s:.2f} s" if report.process_s else ""),
        ("restore", badge(report)),
        ("restored", size_text(restore.stored_bytes) if restore.files else ""),
        ("fetched in", seconds_text(restore.seconds) if restore.files else ""),
        ("waited for the restore", seconds_text(restore.waited_s) if restore.waited_s >= 0.001 else ""),
        ("compiling", seconds_text(report.compile_s) if counts.misses else ""),
        ("functions loaded", str(counts.precompiled_loaded) if report.regions else ""),
        ("hits, misses", f"{counts.hits}, {counts.misses}" if counts.hits + counts.misses else ""),
        ("published", size_text(publish.stored_bytes) if publish.packs else ""),
        ("device memory", size_text(report.device_peak_bytes) if report.device_peak_bytes else ""),
    ]
    return figures([(name, value) for name, value in values if value != ""])


def _timeline(report: BootReport) -> list[Element]:
    lanes = lanes_of(report)
    if not lanes:
        return []
    wide = tag("div", draw_boot(report, _WIDE), class_="wide")
    narrow = tag("div", draw_boot(report, _NARROW, is_narrow=True), class_="narrow")
    parts = [wide, narrow, legend(kinds_of(lanes))]
    if later := later_than(window_s(report, lanes), lanes):
        parts.append(sentence(f"Later work that is not drawn: {count_text(later, 'span')}.", faint=True))
    if not report.spans:
        parts.append(sentence("The report has no start times: its phases stand one after the other.", faint=True))
    return parts


def _region_row(region: RegionReport) -> Sequence[Cell]:
    kind = {"precompiled": "warm", "cached": "warm", "cold": "cold"}.get(region.step, "eager")
    waiting = f"{count_text(region.waiting, 'kind')} of calls waiting" if region.waiting else ""
    not_ahead = [f"not precompiled: {why}" for why in region.not_precompiled if why not in region.reason]
    speed: Cell = ""
    if region.speedup is not None:
        speed = tag("span", f"{region.speedup:.2f} x", class_="bad" if region.is_slower else "good")
    return (
        f"{region.name} x{region.instances}",
        tag("span", region.step, class_=f"badge {kind}"),
        "; ".join(filter(None, [region.reason, *not_ahead, waiting])),
        str(region.loaded),
        str(region.made),
        seconds_text(region.compile_s) if region.compile_s else "",
        seconds_text(region.precompile_s) if region.precompile_s else "",
        _error_text(region),
        f"{region.compiled_ms:.3f} ms" if region.compiled_ms is not None else "",
        f"{region.eager_ms:.3f} ms" if region.eager_ms is not None else "",
        speed,
    )


def _error_text(region: RegionReport) -> str:
    if region.relative_error is None:
        return ""
    return "infinite" if region.relative_error == math.inf else f"{region.relative_error:.1e}"


def _notes(report: BootReport) -> list[tuple[str, list[Cell]]]:
    """Problems of a boot, by heading."""
    restore = report.restore
    return [
        ("Why the restore was no hit", [restore.reason] if restore.reason and restore.outcome != "hit" else []),
        ("Layers left out", list(restore.problems)),
        ("Refused packs", [f"{pack.name}: {pack.reason}" for pack in restore.refused]),
        ("Not published", list(report.publish.failures)),
        ("Warnings", list(report.warnings)),
    ]
