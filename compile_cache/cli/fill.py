"""`fill`: boot the project's predictor once, fill a store with what it compiles, and say what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compile_cache.cli import terminal as out
from compile_cache.cli.project import load_predictor, read_project, set_up
from compile_cache.errors import CompileCacheError
from compile_cache.lifecycle.fill import FilledBoot, Problem, all_problems, fill, prepare_environ
from compile_cache.serving.report import RegionReport
from compile_cache.settings import Settings
from compile_cache.storage.stores.base import open_stores
from compile_cache.storage.stores.local import write_index

_COLUMNS = ("region", "step", "kinds>", "graphs>", "made>", "loaded>", "error", "compiled>", "eager>", "seconds>")


def fill_store(
    model: str | None, predictor: str | None, store: str | None, to: Path | None, explain: bool, as_json: bool
) -> bool:
    """Fill `store`, the folder `to`, or the configured store, and print the answer. Returns whether nothing is missing.

    Raises:
        CompileCacheError: there is no predictor or no store, the setup failed, or the store cannot be read.
    """
    project = read_project(Path.cwd(), predictor)
    for name, value in project.variables.items():
        os.environ.setdefault(name, value)
    if model is not None:
        os.environ["MODEL"] = model
    if explain:
        os.environ.setdefault("TORCH_LOGS", "graph_breaks,recompiles")
    settings = prepare_environ(os.environ, str(to.absolute()) if to else store)
    boots = _run(project.predictor, settings)
    if to is not None and to.is_dir():
        write_index(to)
    problems = all_problems(boots, model, settings)
    location = open_stores(settings).reading.location
    if as_json:
        out.print_json(_document(project.predictor, location, boots, problems))
    else:
        _print_filled(project.predictor, location, boots)
        _print_end(location, boots, problems)
    return not problems


def _run(reference: str, settings: Settings) -> list[FilledBoot]:
    """Set the predictor up. Its output goes to stderr, because stdout is for the answer."""
    with contextlib.redirect_stdout(sys.stderr), _one_line(reference):
        predictor = load_predictor(reference, Path.cwd())
        return fill(lambda: set_up(predictor), settings)


@contextlib.contextmanager
def _one_line(reference: str) -> Iterator[None]:
    """The border to the predictor's own code: print its traceback, then one line as for all errors."""
    try:
        yield
    except CompileCacheError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise CompileCacheError(f"{reference} could not be set up, so nothing was published: {error!r}") from error


def _print_filled(predictor: str, location: str, boots: Sequence[FilledBoot]) -> None:
    out.print_line(f"predictor    {predictor}")
    out.print_line(f"store        {location}")
    for filled in boots:
        report = filled.report
        out.print_line(
            f"model        {report.model_name or 'not known'}, version {report.model_version or 'not known'}"
        )
        record = out.environment_text(filled.stored.environment)
        out.print_line(f"environment  {report.environment or 'not known'}: {record}")
        out.print_line()
        out.print_table(_COLUMNS, map(_row, report.regions))
        out.print_line()
        for region in report.regions:
            for reason in dict.fromkeys(filter(None, (region.reason, *region.not_precompiled))):
                out.print_line(f"{region.name}: {reason}")
        for warning in report.warnings:
            out.print_note(f"warning: {warning}")


def _row(region: RegionReport) -> tuple[str, ...]:
    return (
        f"{region.name} x{region.instances}",
        region.step + (" (slower than eager)" if region.is_slower else ""),
        str(region.made + region.loaded),
        str(region.graphs),
        str(region.made),
        str(region.loaded),
        "not checked" if region.relative_error is None else f"{region.relative_error:.1e}",
        _time_text(region.compiled_ms),
        _time_text(region.eager_ms),
        f"{region.compile_s + region.precompile_s:.1f}",
    )


def _time_text(time_ms: float | None) -> str:
    return "" if time_ms is None else f"{time_ms:.3f} ms"


def _print_end(location: str, boots: Sequence[FilledBoot], problems: Sequence[Problem]) -> None:
    """Print the problems on stderr, and the last line."""
    for problem in problems:
        out.print_note(f"missing: {problem}")
    artifacts = out.count_text(sum(filled.stored.artifacts for filled in boots), "artifact")
    size = out.size_text(sum(filled.stored.stored_bytes for filled in boots))
    filled = "filled" if not problems else f"not filled ({out.count_text(len(problems), 'problem')})"
    out.print_line(f"{filled}: {artifacts}, {size} in {location}{_devices(boots)}")


def _devices(boots: Sequence[FilledBoot]) -> str:
    """The machines that can use the artifacts, in words: a CPU's artifacts are of no use to a GPU."""
    records = [filled.stored.environment for filled in boots if filled.stored.environment]
    names = dict.fromkeys(record.gpu or f"CPUs only ({record.machine}), not for a GPU" for record in records)
    return f", for {' and for '.join(names)}" if names else ""


def _document(
    predictor: str,
    location: str,
    boots: Sequence[FilledBoot],
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """The answer as JSON."""
    known = [filled.stored.environment for filled in boots]
    return {
        "predictor": predictor,
        "store": location,
        "is_complete": not problems,
        "artifacts": sum(filled.stored.artifacts for filled in boots),
        "size_bytes": sum(filled.stored.stored_bytes for filled in boots),
        "problems": [asdict(problem) for problem in problems],
        "environments": [asdict(record) if record else None for record in known],
        "boots": [json.loads(filled.report.to_json()) for filled in boots],
    }
