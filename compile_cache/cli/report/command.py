"""The command `report`: from reports and a store to a file."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from compile_cache.cli import options as opt
from compile_cache.cli import terminal as out
from compile_cache.cli.report.page import page_of
from compile_cache.cli.report.reading import FoundReports, find_reports
from compile_cache.cli.report.stored import Content, read_content
from compile_cache.errors import CompileCacheError
from compile_cache.files import replacing
from compile_cache.settings import Settings


def write_report(paths: Sequence[Path], store: str | None, output: Path) -> None:
    """Write the page, and print what is on it.

    Raises:
        CompileCacheError: a report cannot be read, the store cannot be listed, or there is nothing to show.
        OSError: the file cannot be written.
    """
    found = find_reports(paths)
    content = _content(store, found)
    if not found.reports and (content is None or not content.versions):
        where = f"{content.location} has no versions" if content else "there is no store"
        raise CompileCacheError(f"there is nothing to show: {where}. Give boot reports: files, or folders")
    page = page_of(found, content, time.time())
    if output.exists() and not output.is_file() and not output.is_dir():
        raise CompileCacheError(f"{output} is not a regular file: give the page's file, such as report.html")
    if output.suffix == ".json":
        raise CompileCacheError(f"{output} may be a report: give the page another name, such as report.html")
    if output.is_dir():
        raise CompileCacheError(f"{output} is a folder: give the page's file, such as {output / 'report.html'}")
    with replacing(output) as file:
        file.write(page.encode())
    if found.others:
        out.print_note(f"files that end with .json and are no boot reports: {found.others}")
    has = [out.count_text(len(found.reports), "boot")]
    if content is not None:
        has.append(f"{out.count_text(len(content.versions), 'version')} in {content.location}")
    out.print_line(f"wrote {output}: {', '.join(has)}")


def _content(store: str | None, found: FoundReports) -> Content | None:
    """What the store has; None if COMPILE_CACHE_STORE is off and `store` is None."""
    settings = Settings.from_env(os.environ)
    if store is None and settings.store == "off" and not settings.layers:
        return None
    settings = opt.read_settings(store)
    reading = opt.open_reading(settings)
    content = read_content(reading, [stored.report for stored in found.reports])
    opt.warn_of_problems(reading)
    return content
