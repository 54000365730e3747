"""Serves a module class by `torch.compile` in this process. New code is compared with eager, and compiled ahead of time
for the next boot.

This module imports torch's compiler. A region imports this module only if it compiles in this process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.aot.options import RECOMPILE_LIMIT
from compile_cache.aot.traced import call_region
from compile_cache.errors import ArtifactError, first_line
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.check import Answer, compare, measured
from compile_cache.regions.counters import CompileCounts, are_counted, count_precompiled, read_counts
from compile_cache.regions.graphs import Graphs, has_begun, is_beyond_limit, was_compiling
from compile_cache.regions.inputs import Kept, check_against_eager, keep, kind_of_call
from compile_cache.regions.ladder import RegionReport
from compile_cache.regions.speed import compare_speed
from compile_cache.regions.stored import StoredFunctions
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.aot.artifacts import Made

log = logging.getLogger("compile_cache")


class CompiledHere:
    """The calls of one class that `torch.compile` serves.

    `withheld` has the files that must not be published. `compared` has pairs: an instance, and the artifact or the way
    that was compared with eager on it.
    """

    def __init__(
        self,
        mode: str,
        dynamic: bool | None,
        report: RegionReport,
        stored: StoredFunctions,
        compared: set[tuple[nn.Module | None, str]],
        new_files: Callable[[], set[str]],
    ) -> None:
        self.report = report
        self.stored = stored
        self.watched = False
        self.withheld: set[str] = set()
        self.is_demoted = False
        self.calls = 0
        self._graphs = Graphs(report.name, mode, dynamic)
        self._compared = compared
        self._new_files = new_files
        self._files: set[str] = set()
        self._begun: set[Hashable] = set()

    def serve(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve an unwatched call, by a graph that exists or a new one."""
        started = time.perf_counter()
        try:
            return self._graphs(module, args, kwargs)
        except Exception as error:
            return self._fall_back(module, args, kwargs, None, error, started)

    def serve_found(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call by a graph that exists, else eager. This compiles nothing."""
        return self._graphs.as_found(module, args, kwargs)

    def knows(self, kind: Hashable) -> bool:
        """Whether calls of this kind were compiled here."""
        return self._graphs.knows(kind)

    def serve_watched(self, module: nn.Module, args: Any, kwargs: Any, why_not_precompiled: str) -> Any:
        """Serve a call by `torch.compile`. A new graph or instance is compared with eager on the same inputs.

        Afterwards the call is compiled ahead of time for the next boot. By then tuning's choice is on record, so the
        artifact has only the kernels that won.
        """
        if (kind := kind_of_call(module, args, kwargs)) not in self._begun:
            self._begun.add(kind)
            log.info("compile.begin region=%s", self.report.name)
        kept = keep(self.report, module, args, kwargs)
        before, started = read_counts(), time.perf_counter()
        try:
            answer = self._compiled(module, args, kwargs, kept)
        except Exception as error:
            return self._fall_back(module, args, kwargs, kept, error, started)
        after = read_counts()
        self.calls += 1
        self._graphs.note(module, args, kwargs)
        is_new = after.graphs > before.graphs or not are_counted()
        if is_new:
            self._record(before, after, time.perf_counter() - started)
            note("regions", f"{self.report.name}: {'compile' if after.misses > before.misses else 'look up'}", started)
            if why_not_precompiled and self.report.step == "cached":
                self.report.explain(f"not precompiled: {why_not_precompiled}")
        may_make = why_not_precompiled and not (kept and kept.is_used)
        made = self.stored.make(module, args, kwargs) if may_make else None
        if made:
            self._files |= self._new_files()
        if is_new or made or (module, "compiled") not in self._compared:
            return self._checked(answer, module, args, kwargs, kept, made)
        return answer.output

    def _compiled(self, module: nn.Module, args: Any, kwargs: Any, kept: Kept | None) -> Answer:
        try:
            return measured(self._graphs, module, args, kwargs)
        except Exception as error:
            if kept is None or not self._graphs.is_broken(error):
                raise
            kept.eager()  # This raises the model's own error, if Dynamo met one while tracing.
            self._break_up(module, args, kwargs, error)
        return measured(self._graphs, module, args, kwargs)

    def _checked(
        self, answer: Answer, module: nn.Module, args: Any, kwargs: Any, kept: Kept | None, made: Made | None
    ) -> Any:
        """The compiled answer if it equals eager's. Else eager's answer, and the inputs as eager leaves them."""
        unchanged = keep(self.report, module, kept.args, kept.kwargs) if made and kept else None
        check = check_against_eager(self.report, answer, kept) if kept else None
        self._compared.add((module, "compiled"))
        if made and (check is None or not check.passed or unchanged is None):
            self.stored.reject(
                made.path, "torch.compile's own code for this call differs from eager, or was not compared"
            )
        elif made and kept and unchanged:
            self._check_made(made, module, args, kwargs, unchanged, kept.eager())
        if kept is None or (check and check.passed):
            return answer.output
        if check is None:
            self.demote("eager failed, so compiled code was not compared with it")
            return answer.output
        self.demote(check.difference)
        return kept.give_back(kept.eager().output)

    def _check_made(
        self, made: Made, module: nn.Module, args: Any, kwargs: Any, unchanged: Kept, reference: Answer
    ) -> None:
        """Let an artifact serve, in this boot and in others, if it fits its own call and computes what eager computed
        from the same `unchanged` inputs. Else reject it."""

        def loaded() -> Any:
            function = made.load()
            if misfit := function.misfit(module, args, kwargs):
                raise ArtifactError(f"it does not fit its own call: {misfit}")
            tried = Kept(module, unchanged.args, unchanged.kwargs)
            check = compare(function(module, tried.args, tried.kwargs), reference.output)
            if not check.passed:
                raise ArtifactError(f"it {check.difference}")
            return function

        started = time.perf_counter()
        function = attempt(loaded)
        self.report.precompile_s += time.perf_counter() - started
        if isinstance(function, Failure):
            self.stored.reject(made.path, function.reason)
            return
        count_precompiled("made")
        self.report.made += 1
        self._compared |= {(None, made.path), (module, "precompiled")}
        self.stored.take(made, function)
        speed = attempt(compare_speed, function, module, unchanged.args, unchanged.kwargs)
        if not isinstance(speed, Failure):
            self.report.note_speed(speed.compiled_ms, speed.eager_ms)

    def _fall_back(
        self, module: nn.Module, args: Any, kwargs: Any, kept: Kept | None, error: Exception, started: float
    ) -> Any:
        """Serve a call that could not be compiled. Only here does a failure become a slower call.

        The model runs once, on unchanged inputs: on the inputs themselves if compiled code had not begun, else on the
        copies in `kept`.

        Raises:
            Exception: the model's own error; or `error`, if the inputs may have changed and there are no copies.
        """
        seconds = time.perf_counter() - started
        if not has_begun(error):
            output = call_region(module, args, kwargs)
        elif kept is None:
            if was_compiling(error):
                self._demote_call(module, args, kwargs, error, seconds)
            raise error
        else:
            output = kept.give_back(kept.eager().output)
        self._demote_call(module, args, kwargs, error, seconds)
        return output

    def _demote_call(self, module: nn.Module, args: Any, kwargs: Any, error: Exception, seconds: float) -> None:
        """Serve calls of this kind a step lower from now on. Other calls stay as they are."""
        if is_beyond_limit(error):
            self.report.explain(
                f"eager for further shapes: {RECOMPILE_LIMIT} are compiled already; set COMPILE_CACHE_DYNAMIC=auto"
            )
        elif self._graphs.is_broken(error):
            self._break_up(module, args, kwargs, error)
        else:
            log.warning(
                "compile.failed region=%s seconds=%.1f The call is served eager, and each boot tries it again. To "
                "leave the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
                self.report.name,
                seconds,
                exc_info=error,
            )
            self._graphs.give_up(module, args, kwargs)
            self.report.explain(f"eager for some calls: {type(error).__name__}: {first_line(error)}")
            if self.watched:
                self.withheld |= self._new_files()
                self.report.take_step("eager")

    def _break_up(self, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> None:
        log.info("compile.graph_break region=%s error=%s", self.report.name, first_line(error))
        self._graphs.break_up(module, args, kwargs)
        self.report.explain(f"with graph breaks: {first_line(error)}")

    def _record(self, before: CompileCounts, after: CompileCounts, seconds: float) -> None:
        if after.misses > before.misses:
            self._files |= self._new_files()
        self.report.graphs += after.graphs - before.graphs
        self.report.compile_s += seconds
        if after.misses == before.misses and after.hits > before.hits:
            self.report.take_step("cached")
        else:
            self.report.take_step("cold")
            self.report.explain(_why_cold(before, after))

    def demote(self, reason: str) -> None:
        """Serve every call eager from now on, and keep its compiled code out of the store."""
        self.is_demoted = True
        self.report.take_step("eager")
        self.report.reason = reason
        self.withheld |= self._files


def _why_cold(before: CompileCounts, after: CompileCounts) -> str:
    if not are_counted():
        return "this torch has other counters, so it is unknown whether it found or compiled its graphs"
    return "lookups found nothing" if after.misses > before.misses else "torch looked nothing up: its caches are off"
