"""Torch's notes on the compile of each region: graph breaks, recompiles and failures, with file and line.

This module imports torch. Only `compile-cache fill --explain` imports this module. It reads private names of torch: if
one is gone, the explanation says so and has less.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_MOST_COMPILES = 10_000  # torch itself keeps the last 64
# The name of a region's function: see graphs.py.
_REGION = re.compile(r"call_(?P<name>\w+?)(_in_parts)?")
# One failed guard in torch's record: "1/0: tensor 'x' size mismatch at index 0. expected 4, actual 8  # source …".
_GUARD = re.compile(r"^\d+/\d+: (?P<guard>.+?)(\s{2,}#.*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Finding:
    """A note on one compile.

    `what` is `graph break`, `recompiled` or `not compiled`. `reason` is torch's text. `place` is `file:line` in the
    model's code, empty for a recompile.
    """

    what: str
    reason: str
    place: str = ""


@dataclass(slots=True)
class Findings:
    """The findings of each region, in the order of the compiles. `missing` says what this torch does not tell."""

    of_region: dict[str, list[Finding]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def add(self, region: str, finding: Finding) -> None:
        """Add a finding, once."""
        found = self.of_region.setdefault(region, [])
        if finding not in found:
            found.append(finding)


@contextlib.contextmanager
def explained() -> Iterator[Findings]:
    """Have torch record each compile while the context lasts. At its end the findings are complete."""
    findings = Findings()
    breaks = _breaks(findings)
    begun = len(breaks)
    _keep_records(findings)
    try:
        yield findings
    finally:
        # torch._dynamo.reset() empties the list.
        _add_breaks(findings, breaks[begun if len(breaks) >= begun else 0 :])
        _add_compiles(findings)


def _breaks(findings: Findings) -> list[Any]:
    """torch's own, growing list of graph breaks."""
    try:
        from torch._dynamo.utils import graph_break_reasons
    except ImportError:
        findings.missing.append(f"torch {torch.__version__} does not list graph breaks")
        return []
    return graph_break_reasons


def _keep_records(findings: Findings) -> None:
    try:
        from torch._dynamo.utils import clear_compilation_metrics, set_compilation_metrics_limit
    except ImportError:
        findings.missing.append(f"torch {torch.__version__} does not list recompiles and failures")
        return
    clear_compilation_metrics()
    set_compilation_metrics_limit(_MOST_COMPILES)


def _add_breaks(findings: Findings, breaks: Sequence[Any]) -> None:
    """Add graph breaks. A break that names no region, in a function that torch resumes or calls by itself, belongs to
    the region before it."""
    region = ""
    for noted in breaks:
        stack: list[traceback.FrameSummary] = list(getattr(noted, "user_stack", None) or ())
        region = next((name for frame in stack if (name := _region(frame.name))), region)
        findings.add(region, Finding("graph break", _first_line(noted.reason), _place(stack)))


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else ""


def _add_compiles(findings: Findings) -> None:
    try:
        from torch._dynamo.utils import get_compilation_metrics
    except ImportError:  # `_keep_records` has noted this
        return
    region = ""
    for compiled in get_compilation_metrics():
        name = getattr(compiled, "co_name", None)
        region = _region(name or "") or region
        if not name:  # no frame of Dynamo, but a backward graph, for example
            continue
        for guard in _GUARD.finditer(getattr(compiled, "recompile_reason", None) or ""):
            findings.add(region, Finding("recompiled", guard["guard"].strip()))
        if getattr(compiled, "fail_type", None):
            _add_failure(findings, region, compiled)


def _add_failure(findings: Findings, region: str, compiled: Any) -> None:
    """Add a failure, unless it is a graph break: torch meets those again when it compiles the region in parts."""
    line = getattr(compiled, "fail_user_frame_lineno", None)
    place = f"{getattr(compiled, 'fail_user_frame_filename', '')}:{line}" if line else ""
    known = findings.of_region.get(region, ())
    if place and any(finding.place.startswith(f"{place} ") for finding in known):
        return
    reason = _first_line(getattr(compiled, "fail_reason", None) or "")
    findings.add(region, Finding("not compiled", f"{compiled.fail_type}: {reason}", place))


def _region(function: str) -> str:
    found = _REGION.fullmatch(function)
    return found["name"] if found else ""


def _first_line(text: str) -> str:
    return next(filter(None, map(str.strip, text.splitlines())), "torch gives no reason")
