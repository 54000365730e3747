"""Makes code in this process: for policy `block`, and in a boot that fills a store.

This module imports torch's compiler. A region imports it only if it compiles in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.background.shadow import Shadow
from compile_cache.errors import ArtifactError, first_line
from compile_cache.inductor.artifacts import CachedRecord
from compile_cache.inductor.border import Failure, attempt
from compile_cache.inductor.counters import CompileCounts, are_counted, count_precompiled, read_counts, uncounted
from compile_cache.inductor.graphs import Graphs, Traced, is_beyond_limit, trace
from compile_cache.inductor.options import RECOMPILE_LIMIT
from compile_cache.inductor.speed import compare_speed
from compile_cache.inductor.torch_settings import configure_torch
from compile_cache.serving.kinds import Code
from compile_cache.serving.report import RegionReport
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.inductor.artifacts import Artifacts

log = logging.getLogger("compile_cache")


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph or graphs of `torch.compile` for some calls. It compiles only while `may_compile` says so."""

    graphs: Graphs
    is_whole: bool
    may_compile: Callable[[], bool]
    step: str = "compiled"
    path: str = ""

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """torch has the guards, and checks them in the call."""
        return True

    def misfit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Empty: a call that it does not fit is compiled in the warm-up, and is eager later."""
        return ""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call."""
        run = self.graphs.run if self.may_compile() else self.graphs.run_as_found
        return run(self.is_whole, module, args, kwargs)


@dataclass(frozen=True, slots=True)
class _Compiled:
    graph: Graph
    traced: Traced


class Maker:
    """Makes the code of one region. `files` has the files that its compiles left in the cache directory."""

    def __init__(
        self,
        graphs: Graphs,
        report: RegionReport,
        artifacts: Callable[[], Artifacts | None],
        new_files: Callable[[], set[str]],
        may_compile: Callable[[], bool],
    ) -> None:
        self._graphs = graphs
        self._report = report
        self._artifacts = artifacts
        self._new_files = new_files
        self._may_compile = may_compile
        self.files: set[str] = set()
        self.withheld: set[str] = set()

    def make(self, shadow: Shadow) -> Code | str:
        """Compile the call of `shadow`; else why it is served eager. It runs on copies.

        First under `torch.compile`, which fills Inductor's caches and records tuning, and then ahead of time. If torch
        refuses the second step, the graphs of the first serve.
        """
        log.info("compile.begin region=%s", self._report.name)
        graph = self._compiled(shadow)
        if isinstance(graph, str):
            return graph
        return self._ahead(shadow, graph) or graph.graph

    def look_up(self, shadow: Shadow) -> Code | str:
        """Trace the call of `shadow` out of stored files; why it is served eager, if one was missing."""
        before = read_counts()
        graph = self._compiled(shadow)
        if isinstance(graph, str):
            return graph
        is_missing = read_counts().misses > before.misses
        return "its stored graphs were not found, so they were compiled again" if is_missing else graph.graph

    def _compiled(self, shadow: Shadow) -> _Compiled | str:
        before, started = read_counts(), time.perf_counter()
        try:
            traced = trace(self._graphs, lambda: _parts(shadow.copy()))
        except Exception as error:
            return self._failed(error, time.perf_counter() - started)
        if not traced.is_whole:
            log.info("compile.graph_break region=%s error=%s", self._report.name, traced.broken_by)
            self._report.explain(f"with graph breaks: {traced.broken_by}")
        self._record(before, read_counts(), started)
        return _Compiled(Graph(self._graphs, traced.is_whole, self._may_compile), traced)

    def _failed(self, error: Exception, seconds: float) -> str:
        self.withheld |= self._new_files()
        if is_beyond_limit(error):
            return f"{RECOMPILE_LIMIT} shapes are compiled already; set COMPILE_CACHE_DYNAMIC=auto"
        log.warning(
            "compile.failed region=%s seconds=%.1f The call is served eager, and each boot tries it again. To leave "
            "the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
            self._report.name,
            seconds,
            exc_info=error,
        )
        return f"{type(error).__name__}: {first_line(error)}"

    def _record(self, before: CompileCounts, after: CompileCounts, started: float) -> None:
        is_found = after.misses == before.misses and after.hits > before.hits
        if after.misses > before.misses:
            self.files |= self._new_files()
        self._report.graphs += after.graphs - before.graphs
        self._report.compile_s += time.perf_counter() - started
        note("regions", f"{self._report.name}: {'look up' if is_found else 'compile'}", started)
        if after.graphs == before.graphs and are_counted():
            self._report.explain(
                "torch.compile made no graph: TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set, or an earlier boot "
                "in this process compiled the class"
            )
            self._report.take_step("eager")
        elif is_found:
            self._report.take_step("cached")
        else:
            self._report.take_step("cold")
            self._report.explain(_why_cold(before, after))

    def _ahead(self, shadow: Shadow, compiled: _Compiled) -> Code | None:
        """The call compiled ahead of time, loaded as another boot would load it. None if that is impossible: then later
        boots trace its graphs again."""
        if (artifacts := self._artifacts()) is None:
            return None
        started = time.perf_counter()
        configure_torch()
        with uncounted():
            made = attempt(_make_ahead, artifacts, shadow)
        self._report.precompile_s += time.perf_counter() - started
        note("regions", f"{self._report.name}: compile ahead", started)
        if isinstance(made, Failure):
            self._report.explain(f"cannot be precompiled: {made.reason}")
            self._report.note_not_precompiled(made.reason)
            record = CachedRecord(compiled.traced.is_whole, compiled.traced.seconds, made.reason)
            attempt(artifacts.write_cached, *_parts(shadow), record)
            return None
        self.files |= self._new_files()
        count_precompiled("made")
        self._report.made += 1
        speed = attempt(compare_speed, made, lambda: _parts(shadow.copy()))
        if not isinstance(speed, Failure):
            self._report.note_speed(speed.compiled_ms, speed.eager_ms)
        return made


def _parts(shadow: Shadow) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return shadow.module, shadow.args, shadow.kwargs


def _make_ahead(artifacts: Artifacts, shadow: Shadow) -> Code:
    """Raises `CompileCacheError` if the call cannot be compiled ahead of time."""
    made = artifacts.make(*_parts(shadow.copy()))
    if isinstance(made, str):
        raise ArtifactError(made)
    function = made.load()
    if misfit := function.misfit(*_parts(shadow.copy())):
        artifacts.reject(made.path, misfit)
        raise ArtifactError(f"it does not fit its own call: {misfit}")
    artifacts.take(made, function)
    return function


def _why_cold(before: CompileCounts, after: CompileCounts) -> str:
    if not are_counted():
        return "this torch has other counters, so it is unknown whether it found or compiled its graphs"
    return "lookups found nothing" if after.misses > before.misses else "torch looked nothing up: its caches are off"
