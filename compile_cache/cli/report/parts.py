"""Pieces that several sections of the page have: tables, figures, times and badges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from xml.etree.ElementTree import Element

from compile_cache.cli.report.markup import append, tag
from compile_cache.cli.terminal import count_text
from compile_cache.lifecycle.report import BootReport

Cell = Element | str


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str) -> Element:
    """A table in a box that scrolls by itself, without the columns that are empty. A column's name ends with `>` for
    numbers, `_` for texts that do not wrap, `~` for long ones and `=` for gauges; `caption` is for screen
    readers."""
    rows = list(rows)
    filled = [number for number in range(len(columns)) if any(row[number] != "" for row in rows)]
    classes = {">": "number", "_": "fixed", "~": "long", "=": "gauges"}
    kinds = [classes.get(columns[number][-1:]) for number in filled]
    names = [columns[number].rstrip(">_~=") for number in filled]
    head = tag("tr", *(tag("th", name, scope="col", class_=kind) for name, kind in zip(names, kinds, strict=True)))
    body = tag("tbody")
    for row in rows:
        cells = zip((row[number] for number in filled), kinds, strict=True)
        body.append(tag("tr", *(tag("td", cell, class_=kind) for cell, kind in cells)))
    shown = tag("table", tag("thead", head), body, aria_label=caption)
    return tag("div", shown, class_="scroll", role="region", aria_label=caption, tabindex="0")


def figures(values: Sequence[tuple[str, Cell]]) -> Element:
    """The main figures, large, with their names."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in values), class_="figures")


def lines(items: Sequence[Cell]) -> Element | None:
    """A list; None if it is empty."""
    return tag("ul", *(tag("li", item) for item in items), class_="plain") if items else None


def sentence(*parts: Cell, faint: bool = False) -> Element:
    """A paragraph."""
    paragraph = tag("p", class_="faint" if faint else None)
    for part in parts:
        append(paragraph, part)
    return paragraph


def section(name: str, title: str, *parts: Element | None) -> Element:
    """A section with its heading; `name` is its anchor."""
    return tag("section", tag("h2", title, id=f"{name}-title"), *parts, id=name, aria_labelledby=f"{name}-title")


def time_of(time_s: float) -> Cell:
    """A time, in seconds since 1970, to the second. Reports and stores may have impossible ones."""
    try:
        at = datetime.fromtimestamp(time_s, UTC)
    except (ValueError, OverflowError, OSError):
        return "an impossible time"
    return tag("time", at.strftime("%Y-%m-%d %H:%M:%S UTC"), datetime=at.strftime("%Y-%m-%dT%H:%M:%SZ"))


def kind_of_boot(report: BootReport) -> str:
    """`eager`: nothing is to be compiled; `warm`: nothing had to be; `cold`: something was, or is being compiled."""
    if report.scope == "off" or not report.regions:
        return "eager"
    return "warm" if report.fully_cached else "cold"


def verdict(report: BootReport) -> str:
    """The result of a boot, in a sentence."""
    if report.scope == "off":
        return "Compiling was off."
    if not report.regions:
        return "Nothing was given to compile."
    if report.fully_precompiled:
        return "All regions were loaded from the store. Nothing was traced or compiled."
    if report.fully_cached:
        return "All graphs came from the cache. Nothing was compiled."
    waiting = sum(region.waiting for region in report.regions)
    if waiting:
        return f"When this was reported, {waiting} kinds of calls were served eager: a second process compiles them."
    made = sum(region.made for region in report.regions)
    compiled = f"{count_text(made, 'function')} compiled, also for the next boot" if made else "the regions say why"
    return f"Not everything came from the cache: {compiled}."


def badge(report: BootReport) -> Element:
    """The restore's outcome."""
    return tag("span", report.restore.outcome, class_=f"badge {kind_of_boot(report)}")
