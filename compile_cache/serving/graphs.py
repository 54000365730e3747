"""What `torch.compile` itself serves: calls whose graphs are stored, because torch compiles no function of them.

A graph has no name, and cannot be asked what it fits: only the call shows it. So graphs are traced in the warm-up
alone, out of stored files, and compared there on each instance. Later, a call like one that was compared takes a graph
that exists; all other calls are eager. A class of which any function is stored is never served by graphs.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler before it traces.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.calls.module_state import GLOBAL_HOOKS, Parts
from compile_cache.calls.torch_call import Call
from compile_cache.errors import Failure, GraphNotStored, NoGraph, attempt, log
from compile_cache.serving.comparison import Check, Outcome, Unended, answer_and_compare
from compile_cache.serving.kinds import LEFT_OUT, SEVERAL_GRAPHS, WHOLE_GRAPH, Case, State

if TYPE_CHECKING:
    from compile_cache.inductor.make import Graphs
    from compile_cache.inductor.stored_functions import GraphsRecord
    from compile_cache.serving.supply import RegionSupply


class ServedByGraph:
    """A call that graphs serve, and what later ones like it in the same prediction must have: torch's graphs ignore
    hooks that were added later, and inputs that overlap."""

    def __init__(self, case: Case, is_whole: bool, call: Call) -> None:
        self._case, self.is_whole = case, is_whole
        self._parts = Parts(call[0])
        self._overlaps = self._parts.overlaps(*call[1:])

    def fits(self, call: Call) -> bool:
        """Whether graphs serve a later call of the same likeness too."""
        is_unhooked = bool(self._case.graphs) and not any(GLOBAL_HOOKS) and self._parts.are_unhooked()
        return is_unhooked and self._parts.overlaps(*call[1:]) == self._overlaps


class RegionGraphs:
    """The graphs of a region."""

    def __init__(self, supply: RegionSupply) -> None:
        self._supply = supply

    @cached_property
    def _graphs(self) -> Graphs:
        from compile_cache.inductor.make import Graphs

        settings = self._supply.boot.settings
        return Graphs(self._supply.report.name, settings.mode, bool(settings.dynamic))

    def trace(self, case: Case, record: GraphsRecord | None, call: Call, serve_eager: Callable[[Call], Any]) -> Any:
        """Serve a call of the warm-up eager, and compare its graphs on a copy. The first call of a case has a `record`.
        A later one may need graphs of its own, as where a number of the instance is a part of the code."""
        supply, report, boot = self._supply, self._supply.report, self._supply.boot
        if record is not None:
            report.note_not_precompiled(record.reason)
            boot.tracing_s -= record.seconds
            log.info("compile.trace region=%s call=%s seconds=%.1f", report.name, case.spec, record.seconds)
        order = attempt(supply.pack, case, call) if record is None else None
        whole: list[bool] = []
        conclude = partial(self._conclude, case, record, order, call[0], whole)
        trace = partial(self._trace, record is None, whole)
        return answer_and_compare(call, partial(serve_eager, call), trace, boot.moment, conclude)

    def _trace(self, takes_time: bool, whole: list[bool], *copy: Any) -> Any:
        """The answer of graphs that exist, or that are found in stored files. No record has said how long it takes if
        it `takes_time` of the setup's. `whole` gets whether the graph is.

        Raises:
            GraphNotStored: one is missing.
            Exception: the model's own, or the compiler's.
        """
        from compile_cache.inductor.make import out_of_stored_files, trace

        started = time.perf_counter()
        try:
            with out_of_stored_files():
                traced = trace(self._graphs, lambda: copy)
        finally:
            self._supply.boot.tracing_s -= (time.perf_counter() - started) * takes_time
        self._supply.report.note_traced(traced, started)
        whole.append(not traced.broken_by)
        return traced.answer

    def _conclude(
        self,
        case: Case,
        record: GraphsRecord | None,
        order: Any,
        module: nn.Module,
        whole: list[bool],
        outcome: Outcome,
    ) -> None:
        supply, report = self._supply, self._supply.report
        if isinstance(outcome, Check):
            report.note_error(outcome.error, outcome.tolerance)
        if isinstance(outcome, Check) and outcome.passed:
            if record is not None and case.move(State.EAGER):
                case.graphs = record.path
            supply.boot.moment.defer(case.subject(module), partial(report.lower_to, "graphs"))
            case.trials[module] = WHOLE_GRAPH if whole[0] else SEVERAL_GRAPHS
            for owner in (case.graphs, supply.owner):
                supply.boot.directory.ledger.release(owner)
        elif isinstance(outcome, Unended) and not outcome.is_final:  # a later call of the warm-up tries again
            report.explain(f"its graphs are not compared with eager: {Failure(outcome.error).reason}", case.spec)
        elif isinstance(outcome, GraphNotStored) and record is not None:  # the next such call is ordered
            supply.boot.reject(record.path, str(outcome))
        elif isinstance(outcome, GraphNotStored) and not case.trials.get(module) and not isinstance(order, Failure):
            case.trials[module] = 1
            supply.order(case, order)
        elif not isinstance(outcome, NoGraph) or isinstance(outcome, GraphNotStored):
            error = outcome.error if isinstance(outcome, Unended) else outcome
            reason = error.difference if isinstance(error, Check) else Failure(error).reason
            report.note_eager(f"its graphs: {reason}", case.spec)
            case.trials[module] = LEFT_OUT
            if isinstance(outcome, Check) or record is not None:
                path, case.graphs = record.path if record is not None else case.graphs, ""
                case.move(State.EAGER)
                supply.boot.reject(path, reason)
        report.wait_for(supply.kinds)

    def find(self, case: Case, call: Call) -> ServedByGraph | bool:
        """What serves a call of a case that graphs serve, if they were compared on this instance, and that has taken
        effect; else whether they are compared now: in the warm-up, unless those of its own are still ordered."""
        boot, trial = self._supply.boot, case.trials.get(call[0], 0)
        if boot.moment.has(case.subject(call[0])):
            return False
        if trial in (WHOLE_GRAPH, SEVERAL_GRAPHS):
            return ServedByGraph(case, trial == WHOLE_GRAPH, call)
        is_wanted = boot.is_warming_up and trial != LEFT_OUT and not (trial and boot.waiting)
        if is_wanted and boot.tracing_s <= 0:
            self._supply.report.note_eager("no time is left in the setup to trace its graphs", case.spec)
        return is_wanted and boot.tracing_s > 0

    def run(self, served: ServedByGraph, call: Call) -> Any:
        """The answer of a graph that exists, for a call like one that was compared on this instance.

        Raises:
            NoGraph: another thread traces, which hides all graphs; or a guard has failed, and may hold again.
        """
        return self._graphs.run(served.is_whole, call, compiles=False)
