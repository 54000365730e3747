"""`explain`: what a boot on this machine would find, or the report of a boot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from compile_cache.cli import terminal as out
from compile_cache.cli.report import read_report
from compile_cache.lifecycle.report import BootReport
from compile_cache.settings import Settings
from compile_cache.storage.explain import Explanation
from compile_cache.storage.stores.base import ObjectStore

_MOST_VERSIONS = 5


def print_explanation(settings: Settings, store: ObjectStore, found: Explanation, as_json: bool) -> None:
    """Print the answer of `explain MODEL`."""
    if as_json:
        out.print_json({"store": store.location, **asdict(found)})
        return
    out.print_line(f"model        {found.key.model_name}")
    out.print_line(f"version      {found.key.model_version}")
    if found.assumes_no_sources:
        out.print_line(
            "sources      none given: if the predictor names sources, give them with --source, because they change "
            "the version"
        )
    out.print_line(f"environment  {found.key.environment}: {out.environment_text(found.environment)}")
    out.print_line(f"store        {store.location}")
    if versions := [out.short_version(version) for version in found.stored_versions]:
        more = f" and {len(versions) - _MOST_VERSIONS} more" if len(versions) > _MOST_VERSIONS else ""
        out.print_line(f"stored       for this environment: {', '.join(versions[:_MOST_VERSIONS])}{more}")
    for refused in found.refused:
        out.print_line(f"refused      {refused.name}: {refused.reason}")
    usable = f"{out.count_text(found.packs, 'pack')}, {out.size_text(found.stored_bytes)}"
    said = {"hit": usable, "seeded": f"from version {found.seeded_from}, {usable}; {found.reason}"}
    out.print_line(f"{found.outcome}: {said.get(found.outcome, found.reason)}")
    if not settings.enabled:
        out.print_note("warning: COMPILE_CACHE_SCOPE=off, so a boot restores nothing")


def print_report(path: Path, as_json: bool) -> None:
    """Print the answer of `explain --report`.

    Raises:
        CompileCacheError: the file cannot be read, or is no report of this version of compile_cache.
    """
    report = read_report(path)
    if as_json:
        out.print_json(json.loads(path.read_bytes()))
        return
    for line in _report_lines(report):
        out.print_line(line)


def _report_lines(report: BootReport) -> list[str]:
    return [
        f"model {report.model_name}, version {report.model_version}, environment {report.environment}",
        *report.lines(),
        *(f"not published: {failure}" for failure in report.publish.failures),
        "nothing was compiled anew" if report.fully_cached else "not all of it came from the cache",
    ]
