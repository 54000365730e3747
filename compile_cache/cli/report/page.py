"""The page: one document of HTML that needs nothing else, and no JavaScript."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from compile_cache.cli.report.boots import boots_section, newest_section
from compile_cache.cli.report.history import histories
from compile_cache.cli.report.markup import append, html_text, style, tag
from compile_cache.cli.report.parts import sentence, time_of
from compile_cache.cli.report.reading import FoundReports
from compile_cache.cli.report.sections import history_section, misses_section, store_section
from compile_cache.cli.report.sheet import SHEET
from compile_cache.cli.report.stored import Content
from compile_cache.cli.terminal import count_text

# Nothing may be loaded or run, whatever a report or a store says.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page_of(found: FoundReports, content: Content | None, now_s: float) -> str:
    """The page, of reports and of a store; at least one of them is there."""
    sections = list(_sections(found, content))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", _title(found, content)),
        style(SHEET),
    )
    links = [tag("li", tag("a", part.findtext("h2"), href=f"#{part.get('id')}")) for part in sections]
    header = tag("header", tag("h1", _title(found, content)), _scope(found, content, now_s))
    navigation = tag("nav", tag("ul", *links), aria_label="Sections")
    return html_text(tag("html", head, tag("body", tag("main", header, navigation, *sections)), lang="en"))


def _sections(found: FoundReports, content: Content | None) -> list[Element]:
    sections = []
    if found.reports:
        sections += [newest_section(found.reports[0]), boots_section(found.reports, found.left_out)]
    past = histories(found.reports)
    if past:
        sections.append(history_section(past))
    if found.reports:
        sections.append(misses_section(found.reports, content))
    if content is not None:
        sections.append(store_section(content))
    return sections


def _title(found: FoundReports, content: Content | None) -> str:
    names = {stored.report.model_name for stored in found.reports if stored.report.model_name}
    if not names and content is not None:
        names = {version.key.model_name for version in content.versions}
    return f"Boots of {next(iter(names))}" if len(names) == 1 else "Boots and compiled artifacts"


def _scope(found: FoundReports, content: Content | None, now_s: float) -> Element:
    parts = [count_text(len(found.reports), "boot report")]
    if content is not None:
        parts.append(f"the store {content.location}")
    line = sentence(f"From {' and '.join(parts)}, written ", time_of(now_s), ".", faint=True)
    if content is None:
        append(line, " No store was read.")
    return line
