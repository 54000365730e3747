"""Reading boot reports: from JSON to `BootReport`, with every field's type checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from compile_cache.errors import CompileCacheError
from compile_cache.lifecycle.report import BootReport

MOST_REPORTS = 500
_LARGEST_BYTES = 16 << 20
_LARGEST_NUMBER = 1e15
# The figures that a report derives from its others, and the fields that every report has.
_DERIVED = ("compile_s", "fully_cached", "fully_precompiled")
_NEEDED = ("restore", "regions", "phases", "ready_s")


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report and its file. `time_s` is when the boot started, in seconds since 1970; for a
    report that does not say so, when the file was written."""

    path: Path
    report: BootReport
    time_s: float


@dataclass(frozen=True, slots=True)
class FoundReports:
    """The reports, the newest first; how many JSON files in folders are no reports; and how many older reports were
    left out."""

    reports: Sequence[StoredReport]
    others: int = 0
    left_out: int = 0


def find_reports(paths: Sequence[Path]) -> FoundReports:
    """The reports among `paths`: files, and folders with `*.json` at any depth. The newest 500 are kept.

    Raises:
        CompileCacheError: a file is not readable or no boot report; or a folder has none.
    """
    found: dict[Path, StoredReport] = {}
    others = 0
    for path in paths:
        if not path.is_dir():
            found[path.resolve()] = _stored(path, read_report(path))
            continue
        files = [file for file in sorted(path.rglob("*.json")) if file.is_file()]
        reports = {file: record for file in files if _is_meant_as_report(record := _read_json(file, strict=False))}
        if not reports:
            raise CompileCacheError(
                f"{path} has no boot report: {len(files)} files end with .json. A boot writes its report to the file "
                "that COMPILE_CACHE_REPORT names"
            )
        others += len(files) - len(reports)
        for file, record in reports.items():
            found[file.resolve()] = _stored(file, _report_of(record, file))
    newest = sorted(found.values(), key=lambda stored: (-stored.time_s, str(stored.path)))
    return FoundReports(newest[:MOST_REPORTS], others, max(0, len(newest) - MOST_REPORTS))


def read_report(path: Path) -> BootReport:
    """The report in a file.

    Raises:
        CompileCacheError: the file cannot be read, or is no report of this version of compile_cache.
    """
    return _report_of(_read_json(path), path)


def _stored(path: Path, report: BootReport) -> StoredReport:
    return StoredReport(path, report, report.started_s or path.stat().st_mtime)


def _read_json(path: Path, strict: bool = True) -> Any:
    """The file's JSON. If not `strict`, None for a file that has none."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"it is larger than {_LARGEST_BYTES >> 20} MiB")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CompileCacheError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if strict:
            raise _no_report(path, f"it is not JSON: {error}") from error
        return None


def _is_meant_as_report(record: Any) -> bool:
    return isinstance(record, dict) and {"restore", "ready_s"} <= record.keys()


def _report_of(record: Any, path: Path) -> BootReport:
    if not isinstance(record, dict):
        raise _no_report(path, "it is not a JSON object")
    if missing := [name for name in _NEEDED if name not in record]:
        raise _no_report(path, f"it lacks {', '.join(missing)}")
    values = {name: value for name, value in record.items() if name not in _DERIVED}
    try:
        report: BootReport = _value(BootReport, values, "")
    except (ValueError, TypeError) as error:
        raise _no_report(path, str(error)) from error
    return report


def _no_report(path: Path, reason: str) -> CompileCacheError:
    return CompileCacheError(
        f"{path} is no boot report of this version of compile_cache: {reason}. Give a file that a "
        "boot has written, or use the version of compile-cache that wrote it"
    )


def _value(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`. Raises ValueError that names `where`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        return _value(next(one for one in arguments if one is not NoneType), value, where)
    if is_dataclass(kind) and isinstance(value, dict):
        make: Any = kind
        return make(**dict(_fields(kind, value, where)))
    if origin is list and isinstance(value, list):
        return [_value(arguments[0], one, f"{where}[{number}]") for number, one in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {name: _value(arguments[1], one, f"{where}.{name}") for name, one in value.items()}
    if kind is float and where.endswith(".relative_error") and value == "Infinity":
        return math.inf  # JSON has no infinity: a report writes it as text
    if kind is float and type(value) in (int, float) and abs(value) < _LARGEST_NUMBER:  # not infinite, not NaN
        return float(value)
    if kind is int and type(value) is int and abs(value) < _LARGEST_NUMBER:
        return value
    if kind in (bool, str) and type(value) is kind:
        return value
    raise ValueError(f"{where.lstrip('.') or 'it'} has a wrong type or size")


def _fields(kind: Any, record: dict[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind)
    if unknown := sorted(record.keys() - {field.name for field in fields(kind)}):
        raise ValueError(f"{where.lstrip('.') or 'it'} has the unknown field {unknown[0]}")
    for name, value in record.items():
        yield name, _value(hints[name], value, f"{where}.{name}")
