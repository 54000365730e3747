"""The page's sections about versions: their history, misses, and what the store has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from compile_cache.cli.report.history import VersionHistory
from compile_cache.cli.report.markup import tag
from compile_cache.cli.report.parts import Cell, badge, section, sentence, table, time_of
from compile_cache.cli.report.reading import StoredReport
from compile_cache.cli.report.stored import Content, key_of
from compile_cache.cli.terminal import age_text, count_text, environment_text, short, short_version, size_text
from compile_cache.key.cache_key import CacheKey

_MOST_MISSES = 50


def history_section(histories: Sequence[VersionHistory]) -> Element:
    """READY, hits and step times by version."""
    columns = (
        "model_",
        "version_",
        "environment_",
        "kind_",
        "boots>",
        "READY, median>",
        "least to most>",
        "hits>",
        "misses>",
    )
    rows = [_history_row(history) for history in histories]
    timed = [row for history in histories for row in _timed_rows(history)]
    parts = [table(columns, rows, "READY and hits by version")]
    if timed:
        parts.append(tag("h3", "Step times by version"))
        names = ("model_", "version_", "region_", "compiled>", "eager>", "speed>")
        parts.append(table(names, timed, "Step times by version"))
        parts.append(sentence("Time of one call on the device, as the newest boot that timed it reports.", faint=True))
    return section("history", "History by version", *parts)


def _key_cells(key: CacheKey | None) -> tuple[str, str, str]:
    if key is None:
        return "no key: not compiled", "", ""
    return key.model_name, short_version(key.model_version), short(key.environment)


def _history_row(history: VersionHistory) -> Sequence[Cell]:
    least_s, median_s, most_s = history.ready_s
    hits, misses = history.lookups
    spread = f"{least_s:.2f} to {most_s:.2f} s" if len(history.boots) > 1 else ""
    kind = tag("span", history.kind, class_=f"badge {history.kind}")
    figures = (str(len(history.boots)), f"{median_s:.2f} s", spread, str(hits), str(misses))
    return (*_key_cells(history.key), kind, *figures)


def _timed_rows(history: VersionHistory) -> Iterator[Sequence[Cell]]:
    model, version, _ = _key_cells(history.key)
    for region in history.timed:
        speed = tag("span", f"{region.speedup:.2f} x", class_="bad" if region.is_slower else "good")
        yield model, version, region.name, f"{region.compiled_ms:.3f} ms", f"{region.eager_ms:.3f} ms", speed


def misses_section(reports: Sequence[StoredReport], content: Content | None) -> Element:
    """Each boot that restored nothing, or not its own version, and why; and what it would find today."""
    missed = [stored for stored in reports if stored.report.restore.outcome not in ("hit", "off")]
    if not missed:
        return section("misses", "Misses", sentence("No boot of these reports has missed."))
    columns = ("started_", "model_", "version_", "restore", "why~", *(("today~",) if content else ()))
    rows = []
    for stored in missed[:_MOST_MISSES]:
        report, key = stored.report, key_of(stored.report)
        today = (content.today.get(key, "") if key else "",) if content else ()
        model, version, _ = _key_cells(key) if key else ("", "", "")
        rows.append((time_of(stored.time_s), model, version, badge(report), report.restore.reason, *today))
    parts = [table(columns, rows, "Misses")]
    if len(missed) > _MOST_MISSES:
        parts.append(sentence(f"Older misses that are not listed: {len(missed) - _MOST_MISSES}.", faint=True))
    return section("misses", "Misses", *parts)


def store_section(content: Content) -> Element:
    """The versions in a store, and the environments that they are for."""
    location = sentence("In ", tag("code", content.location), ".")
    problems = [sentence(tag("span", f"Left out: {problem}", class_="bad")) for problem in content.problems]
    if not content.versions:
        return section("store", "Store", location, *problems, sentence("Nothing is stored there."))
    columns = ("model_", "version_", "environment_", "packs>", "size>", "published_", "last used_")
    rows = [
        (
            *_key_cells(version.key),
            str(len(version.packs)),
            size_text(version.size_bytes),
            time_of(version.published_s),
            age_text(version.used_s),
        )
        for version in content.versions
    ]
    environments = [(short(digest), environment_text(record)) for digest, record in content.environments.items()]
    packs = count_text(sum(len(version.packs) for version in content.versions), "pack")
    size = size_text(sum(version.size_bytes for version in content.versions))
    total = f"{count_text(len(content.versions), 'version')}, {packs}, {size}."
    strangers = f" Objects that are not of compile_cache: {content.strangers}." if content.strangers else ""
    return section(
        "store",
        "Store",
        location,
        *problems,
        table(columns, rows, "Stored versions"),
        sentence(total + strangers),
        tag("h3", "Environments"),
        table(("environment_", "its record says~"), environments, "Environments"),
    )
