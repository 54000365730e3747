"""One module class and its instances: how each call is served, and what is checked against eager.

Precompiled functions serve the calls that they fit; `torch.compile` serves the others; a call that cannot be compiled
is served eager, and so is a class that computes something else when it is compiled.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.aot.traced import call_region
from compile_cache.errors import ArtifactError
from compile_cache.regions.border import Failure, attempt, first_line
from compile_cache.regions.check import Answer, Check, compare, measured
from compile_cache.regions.counters import CompileCounts, are_counted, count_precompiled, read_counts
from compile_cache.regions.graphs import Graphs, has_begun, is_beyond_limit, was_compiling
from compile_cache.regions.inputs import Kept, with_plain_strides
from compile_cache.regions.ladder import RegionReport
from compile_cache.regions.speed import compare_speed
from compile_cache.regions.stored import StoredFunctions
from compile_cache.regions.torch_settings import RECOMPILE_LIMIT

if TYPE_CHECKING:
    from compile_cache.aot.artifacts import Artifacts, Found, Made

log = logging.getLogger("compile_cache")


class Region:
    """One module class, compiled, and its instances. `report` says how its calls are served, and why."""

    def __init__(
        self,
        module_class: type[nn.Module],
        mode: str,
        dynamic: bool | None,
        artifacts: Artifacts | None,
        new_files: Callable[[], set[str]],
    ) -> None:
        self.report = RegionReport(name=module_class.__name__, instances=0)
        self.watched = False
        self.compares_every_instance = True
        self.stored = StoredFunctions(artifacts, self.report)
        self._graphs = Graphs(module_class.__name__, mode, dynamic)
        self._new_files = new_files
        self._files: set[str] = set()
        self._withheld: set[str] = set()
        self._is_eager = False
        # Instances, each with the artifact or the way that was compared with eager on it.
        self._compared: set[tuple[nn.Module | None, str]] = set()
        self._calls = 0
        self._compiled_calls = 0
        self._unused = ""

    @property
    def withheld(self) -> set[str]:
        """The files that must not be published."""
        return self._withheld | self.stored.withheld

    def adopt(self, module: nn.Module) -> None:
        """Let calls of `module` come here, as `module.compile()` would let them go to the compiled code."""
        self.report.instances = self.stored.adopt(module)
        module._compiled_call_impl = functools.partial(self._call, module)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_eager:
            return call_region(module, args, kwargs)
        args, kwargs = with_plain_strides(args, kwargs)
        if self.watched:
            return self._watched_call(module, args, kwargs)
        if found := self.stored.fitting(module, args, kwargs):
            try:
                return found.function(module, args, kwargs)
            except AssertionError as error:  # generated code asserts the strides that it was compiled for
                self.stored.reject(found.path, f"AssertionError: {first_line(error)}")
                raise
        try:
            return self._graphs(module, args, kwargs)
        except Exception as error:
            return self._fall_back(module, args, kwargs, None, error)

    def _fall_back(self, module: nn.Module, args: Any, kwargs: Any, kept: Kept | None, error: Exception) -> Any:
        """Serve a call that was not compiled: the one place where a failure becomes a slower call.

        The model runs once, on inputs that nothing has changed: on the inputs themselves where compiled code had not
        begun, else on the copies that were `kept`.

        Raises:
            Exception: `error`, where the inputs may have changed and no copies were kept; or the model's own.
        """
        if not has_begun(error):
            output = call_region(module, args, kwargs)
        elif kept is None:
            if was_compiling(error):
                self._demote_call(module, args, kwargs, error)
            raise error
        else:
            output = kept.give_back(kept.eager().output)
        self._demote_call(module, args, kwargs, error)
        return output

    def _demote_call(self, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> None:
        """Serve calls of this kind a step lower from now on, and leave the others as they are."""
        if is_beyond_limit(error):
            self.report.explain(
                f"eager for further shapes: {RECOMPILE_LIMIT} are compiled; set COMPILE_CACHE_DYNAMIC=auto"
            )
        elif self._graphs.is_broken(error):
            self._break_up(module, args, kwargs, error)
        else:
            log.warning("compile.failed region=%s", self.report.name, exc_info=error)
            self._graphs.give_up(module, args, kwargs)
            self.report.explain(f"eager for some calls: {type(error).__name__}: {first_line(error)}")
            if self.watched:
                self._withheld |= self._new_files()
                self.report.take_step("eager")

    def _break_up(self, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> None:
        log.info("compile.graph_break region=%s error=%s", self.report.name, first_line(error))
        self._graphs.break_up(module, args, kwargs)
        self.report.explain(f"with graph breaks: {first_line(error)}")

    def _watched_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call that looks for a precompiled function, and is measured and checked where something is new."""
        self._note_use()
        started = time.perf_counter()
        found = self.stored.fitting(module, args, kwargs) or self.stored.find(module, args, kwargs)
        if isinstance(found, str):
            return self._serve_compiled(module, args, kwargs, found)
        if (None, found.path) not in self._compared:
            if reason := self._objection(found, module, args, kwargs):
                return self._serve_compiled(module, args, kwargs, reason)
            self._compared |= {(None, found.path), (module, "precompiled")}
            count_precompiled("loaded")
            self.report.loaded += 1
            self.report.compile_s += time.perf_counter() - started
        if self.compares_every_instance and (module, "precompiled") not in self._compared:
            return self._serve_another(found, module, args, kwargs)
        output = found.function(module, args, kwargs)
        self.report.take_step("precompiled")
        return output

    def _note_use(self) -> None:
        if self._unused:
            self.report.reason = self.report.reason.replace(self._unused, "").strip("; ")
            self._unused = ""
        self._calls += 1

    def _objection(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> str:
        """Why an artifact is not used after all, in words; empty if it computes, on copies, what eager does."""
        tried, kept = self._keep(module, args, kwargs), self._keep(module, args, kwargs)
        if tried is None or kept is None:
            return ""
        answer = attempt(measured, found.function, module, tried.args, tried.kwargs)
        if isinstance(answer, Failure):
            is_exhausted = isinstance(answer.error, torch.OutOfMemoryError)
            return answer.reason if is_exhausted else self.stored.reject(found.path, answer.reason)
        check = self._check(answer, kept)
        return "" if check is None or check.passed else self.stored.reject(found.path, f"it {check.difference}")

    def _serve_another(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve the first call of a module by an artifact that has proved right for others, and compare it as well."""
        kept = self._keep(module, args, kwargs)
        answer = attempt(measured, found.function, module, args, kwargs)
        if isinstance(answer, Failure):
            if kept is None or isinstance(answer.error, torch.OutOfMemoryError):
                raise answer.error
            kept.give_back(None)  # as they were: nothing has run on the copies
            return self._serve_compiled(module, args, kwargs, self.stored.reject(found.path, answer.reason))
        self._compared.add((module, "precompiled"))
        check = self._check(answer, kept) if kept else None
        if check is None or kept is None or check.passed:
            self.report.take_step("precompiled")
            return answer.output
        self.stored.reject(found.path, f"it {check.difference}")
        self.report.take_step("eager")
        return kept.give_back(kept.eager().output)

    def _serve_compiled(self, module: nn.Module, args: Any, kwargs: Any, why_not_precompiled: str) -> Any:
        """Serve a call by `torch.compile`. What is new, a graph or an instance, is compared with eager on the same,
        unchanged inputs; and the call is compiled ahead of time as well, for the next boot: after it has run, because
        then it is on record what tuning has chosen, and the artifact has the kernels that won, and no others."""
        kept = self._keep(module, args, kwargs)
        before, started = read_counts(), time.perf_counter()
        try:
            answer = self._compiled(module, args, kwargs, kept)
        except Exception as error:
            return self._fall_back(module, args, kwargs, kept, error)
        after = read_counts()
        self._compiled_calls += 1
        self._graphs.note(module, args, kwargs)
        is_new = after.graphs > before.graphs or not are_counted()
        if is_new:
            self._record(before, after, time.perf_counter() - started)
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
            kept.eager()  # Whose error is it? The model's own, which Dynamo met in tracing, is raised here.
            self._break_up(module, args, kwargs, error)
        return measured(self._graphs, module, args, kwargs)

    def _checked(
        self, answer: Answer, module: nn.Module, args: Any, kwargs: Any, kept: Kept | None, made: Made | None
    ) -> Any:
        """The compiled answer, if it is eager's; else eager's, and the inputs as eager leaves them."""
        unchanged = self._keep(module, kept.args, kept.kwargs) if made and kept else None
        check = self._check(answer, kept) if kept else None
        self._compared.add((module, "compiled"))
        if made and (check is None or not check.passed or unchanged is None):
            self.stored.reject(made.path, "torch.compile of the same code differs from eager, or was not compared")
        elif made and kept and unchanged:
            self._check_made(made, module, args, kwargs, unchanged, kept.eager())
        if check is None or kept is None or check.passed:
            return answer.output
        self._demote(check.difference)
        return kept.give_back(kept.eager().output)

    def _check_made(
        self, made: Made, module: nn.Module, args: Any, kwargs: Any, unchanged: Kept, reference: Answer
    ) -> None:
        """Let an artifact serve, here and in other boots, only after it has computed, from `unchanged` inputs, what
        eager did, and fits the call that it was made of."""

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
        self._time(function, module, unchanged)

    def _time(self, compiled: Callable[..., Any], module: nn.Module, unchanged: Kept) -> None:
        speed = attempt(compare_speed, compiled, module, unchanged)
        if not isinstance(speed, Failure):
            self.report.note_speed(speed.compiled_ms, speed.eager_ms)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> Kept | None:
        """Copies of the inputs; None where there can be none, which leaves the call unchecked."""
        kept = attempt(Kept, module, args, kwargs)
        if isinstance(kept, Failure):
            self.report.explain(f"not checked against eager: its inputs cannot be copied: {kept.reason}")
            return None
        return kept

    def _check(self, answer: Answer, kept: Kept) -> Check | None:
        """How far an answer is from eager's; None where that cannot be found out, mostly for want of memory."""
        check = attempt(lambda: compare(answer.output, kept.eager().output))
        if isinstance(check, Failure):
            self.report.explain(f"not checked against eager: {check.reason}")
            return None
        self.report.note_error(check.error, check.tolerance)
        self.report.note_peaks(answer.peak_bytes, kept.eager().peak_bytes)
        return check

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

    def _demote(self, reason: str) -> None:
        """Serve every call eager from now on, and withhold what was compiled from the store."""
        self._is_eager = True
        self.report.take_step("eager")
        self.report.reason = reason
        self._withheld |= self._files

    def conclude(self) -> None:
        """After the warm-up: say so where nothing called the region, or torch compiled nothing for its calls."""
        if not self._calls and not self._unused:
            self._unused = _unused(self.stored.any_instance())
            self.report.explain(self._unused)
            log.warning("nothing is compiled of %s: %s", self.report.name, self._unused)
        if self._compiled_calls and not self.report.graphs and self.report.step == "unused":
            self._demote(
                "torch.compile made no graph: TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set, "
                "or this process has compiled the class in an earlier boot"
            )


def _why_cold(before: CompileCounts, after: CompileCounts) -> str:
    if not are_counted():
        return "this torch has other counters: whether it found or compiled its graphs is not known"
    return "lookups found nothing" if after.misses > before.misses else "torch looked nothing up: its caches are off"


def _unused(module: nn.Module) -> str:
    """Why nothing may have called a module, and what to do about it."""
    methods = [
        name
        for kind in type(module).__mro__
        if kind.__module__.partition(".")[0] != "torch"
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_") and name != "forward"
    ]
    called = f", such as {', '.join(methods[:3])}," if methods else ""
    part = next((name for name, _ in module.named_children()), "part")
    return (
        f"nothing called it in the warm-up: a method{called} is not compiled when it is called by itself. "
        f"Compile the modules that it calls, for example boot.compile(model.{part})"
    )
