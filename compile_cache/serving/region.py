"""A module class and its instances: routes each call to the code that serves it, and compares that first.

A call that a function fits which has passed on this instance, or that is like one settled in this prediction, is served
at once. Any other call gets its case, whose state says what happens: see `State`. What has passed takes effect between
two predictions, and no instance waits for another.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.calls import first_calls
from compile_cache.calls.module_state import why_eager
from compile_cache.calls.overlaps import reachable_tensors
from compile_cache.calls.spec import RECOMPILE_LIMIT, growth, likeness, modes, top_sizes, with_plain_strides
from compile_cache.calls.torch_call import Args, Call, Kwargs, call_region, count_dispatch_modes, is_tracing, serve_by
from compile_cache.errors import CompileCacheError, Failure, NoGraph, attempt, first_line
from compile_cache.of_each import OfEach
from compile_cache.serving.comparison import Outcome, Unended, answer_and_compare
from compile_cache.serving.graphs import RegionGraphs, ServedByGraph
from compile_cache.serving.kinds import LEFT_OUT, PASSED, Case, State
from compile_cache.serving.moment import Known
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.supply import RegionSupply, Supply
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled

# Outside predictions, what lies in a module is looked at again after so many calls.
_CALLS_BETWEEN_LOOKS = 64
_GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"


class Region:
    """A module class and its instances. `served` counts the calls by step."""

    def __init__(self, report: RegionReport, owner: str, supply: Supply) -> None:
        self.supply = RegionSupply(report, owner, supply)
        self.report = report
        self._moment = supply.moment
        self._graphs = RegionGraphs(self.supply)
        # By instance, its place in the model: see `RegionSupply.mark`.
        self.places: OfEach[str] = OfEach()
        self.served: Counter[str] = Counter()

    def adopt(self, module: nn.Module, place: str) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`. Each boot of a version gives the
        same module the same `place`."""
        self.places.setdefault(module, place)
        self.report.instances = len(self.places)
        serve_by(module, self._call)

    def _call(self, of: weakref.ref[nn.Module], /, *args: Any, **kwargs: Any) -> Any:
        if (module := of()) is None:
            raise CompileCacheError("this module has the attributes of one that is gone: make it by copy.copy()")
        moment, like, found = self._moment, None, None
        if (known := moment.known.get(module)) is not None and not moment.holds(known):
            known = None
        if known and (found := known.get(growth(args, kwargs))) is None:
            found = known.get(like := _likeness(args, kwargs))
        if found is not None:
            if not found:
                self.served["eager"] += 1
                return call_region(module, args, kwargs)
            if found.fits(call := (module, *with_plain_strides(args, kwargs))):
                return self._serve_by_graph(found, call, like)
        if is_tracing():  # sizes are tensors then
            return self._route((module, args, kwargs), None)
        plain, named = with_plain_strides(args, kwargs)
        if known is not None and known.functions:
            for case in known.functions.get(top_sizes(plain, named), ()):
                function = case.function
                if case.state is State.HAS_CODE and function is not None and function.fits((module, plain, named)):
                    return self._serve(case, function, (module, plain, named))
        return self._route((module, plain, named), like or _likeness(args, kwargs))

    def _known(self, call: Call, case: Case | None) -> Known:
        """What is known about the calls of this module, which was just looked at, to be added to."""
        known: Known | None = self._moment.known.get(call[0])
        if known is None or known.calls_left < 0 or len(known) + len(known.functions) >= RECOMPILE_LIMIT:
            # To look again takes some microseconds for each part.
            parts = len(case.spec.structure) if case is not None else 0
            known = self._moment.known[call[0]] = Known(max(_CALLS_BETWEEN_LOOKS, parts))
        return known

    def _settle(self, call: Call, like: Hashable, case: Case | None = None, found: Any = ()) -> None:
        """Serve calls like this one by the model's own code, or by graphs that were `found`, as long as that is
        `known`."""
        is_growing = case is not None and case.state is State.GROWING
        for key in (like, growth(*call[1:]) if is_growing else None):
            if key is not None:
                self._known(call, case)[key] = found

    def _route(self, call: Call, like: Hashable) -> Any:
        """Serve a call that has no short way, as the state of its case says.

        A dispatch mode (`torch.export`, `make_fx`, FakeTensorMode, a counter) or `torch.jit.trace` would take what is
        tried on a copy for what the model computes.
        """
        if first_calls.are_taken() and count_dispatch_modes() == 1:
            with first_calls.paused():
                return self._route(call, like)
        if count_dispatch_modes() or is_tracing():
            self.report.explain("eager in a dispatch mode of torch, such as a counter or a trace")
            return self._serve_eager(call)
        if reason := why_eager(call[0]):
            return self._stay_eager(call, like, f"eager: {reason}")
        self._moment.pass_by()
        found = attempt(self.supply.kinds.case, call)
        if isinstance(found, Failure):
            self.report.note_eager(found.reason)
            return self._serve_eager(call)
        if isinstance(found, str):
            return self._stay_eager(call, like, found)
        case, function = found
        if function is not None and self._serves(case, call[0]):
            return self._serve_known(case, function, call)
        try:
            if case.claim(call):
                return self._serve_claimed(case, function, call, like)
        finally:
            case.give_back(call)
        if case.graphs and (graph := self._graphs.find(case, call)):
            if isinstance(graph, bool):
                return self._graphs.trace(case, None, call, self._serve_eager)
            self._settle(call, like, case, graph)
            return self._serve_by_graph(graph, call, like)
        return self._wait(case, call, like)

    def _stay_eager(self, call: Call, like: Hashable, reason: str) -> Any:
        """Serve calls like this one by the model's own code, as long as that is `known`."""
        self.report.note_eager(reason)
        self._settle(call, like)
        return self._serve_eager(call)

    def _wait(self, case: Case, call: Call, like: Hashable) -> Any:
        """Serve a call eager whose case has no function for it now."""
        # To look whether a call makes a tensor larger takes a millisecond, so one call of a prediction shows it.
        is_first = case.state is State.GROWING and (case not in self._moment.known or not self._moment.open)
        answer = self._serve_eager(call, case if is_first else None)
        if case.state not in (State.NEW, State.HAS_CODE):  # NEW again if it has not grown
            self._settle(call, like, case)
        return answer

    def _serves(self, case: Case, module: nn.Module) -> bool:
        """Whether the case's function has passed on this instance, and that has taken effect."""
        return case.state is State.HAS_CODE and case.serves(module) and not self._moment.has(case.subject(module))

    def _serve_known(self, case: Case, function: Precompiled, call: Call) -> Any:
        """Serve a call by this function, and ask it first about the next call of these sizes, as long as that is
        `known`."""
        functions, sizes = self._known(call, case).functions, top_sizes(*call[1:])
        others = [other for other in functions.get(sizes, ()) if other.state is State.HAS_CODE and other is not case]
        functions[sizes] = (case, *others)
        return self._serve(case, function, call)

    def _serve(self, case: Case, function: Precompiled, call: Call) -> Any:
        self.served["precompiled"] += 1
        try:
            return function(*call)
        except AssertionError as error:  # generated code asserts the strides that it was compiled for
            self.supply.drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _serve_by_graph(self, found: ServedByGraph, call: Call, like: Hashable) -> Any:
        try:
            answer = self._graphs.run(found, call)
        except NoGraph:
            self._settle(call, like)
            return self._serve_eager(call)
        self.served["graphs"] += 1
        return answer

    def _serve_claimed(self, case: Case, function: Precompiled | None, call: Call, like: Hashable) -> Any:
        """Serve a call of a case that it has claimed: by a stored function, or eager. A function that has not passed on
        this instance is compared. If none is stored, one is ordered."""
        supply, place = self.supply, self.places[call[0]]
        if case.state is State.NEW:
            function = supply.find(case, call)
            if function is not None and place in function.compared_on and not supply.boot.is_warming_up:
                self._let_serve(case, function, call[0])
                if self._serves(case, call[0]):
                    return self._serve_known(case, function, call)
        if case.state is State.HAS_CODE and function is not None:
            return self._compare(case, function, call)
        if case.state is State.NEW and (record := supply.record(case, call)) is not None:
            return self._graphs.trace(case, record, call, self._serve_eager)
        if case.state is not State.NEW:
            return self._wait(case, call, like)
        if supply.boot.is_full:  # the next prediction orders it
            self._settle(call, like)
            return self._serve_eager(call)
        order = attempt(supply.pack, case, call)
        answer = self._serve_eager(call, case)
        if case.state is State.NEW:
            supply.order(case, order)
        return answer

    def _serve_eager(self, call: Call, case: Case | None = None) -> Any:
        """Serve a call by the model's own code. That of a `case`, which is claimed or GROWING, shows whether such calls
        change the size of a tensor that they can reach, as of a cache that grows."""
        sizes = _sizes(call) if case is not None else []
        self.served["eager"] += 1
        with first_calls.resumed():
            answer = call_region(*call)
        if case is not None:
            now = _sizes(call)
            if len(now) == len(sizes) and now != sizes:
                self.supply.give_up(case, _GROWS, State.GROWING)
                self._moment.known[case] = Known()
            elif now == sizes and case.state is State.GROWING:
                case.move(State.NEW)
        return answer

    def _compare(self, case: Case, function: Precompiled, call: Call) -> Any:
        """Serve a call eager, and compare the function on a copy. Nothing is compared if the function has passed and
        serves from the next moment on, or if the comparison is tried again later: see `RegionSupply.put_off`."""
        started = time.perf_counter()
        if self._moment.has(case.subject(call[0])) or case.trials.get(call[0]) in (PASSED, LEFT_OUT):
            return self._serve_eager(call)
        conclude = partial(self._conclude, case, function, call[0])
        answer = answer_and_compare(call, partial(self._serve_eager, call), function, self._moment, conclude)
        self.report.compare_s += time.perf_counter() - started
        note("regions", f"{self.report.name}: compare", started)
        return answer

    def _conclude(self, case: Case, function: Precompiled, module: nn.Module, outcome: Outcome) -> None:
        if isinstance(outcome, Unended):
            self.supply.put_off(case, module, outcome)
        elif isinstance(outcome, Exception):
            self.supply.drop(case, Failure(outcome).reason)
        else:
            self.report.note_error(outcome.error, outcome.tolerance)
            if outcome.passed:
                self._let_serve(case, function, module)
            else:
                self.supply.drop(case, outcome.difference)

    def _let_serve(self, case: Case, function: Precompiled, module: nn.Module) -> None:
        """Note that the function may serve this instance, from the next moment on. If an earlier boot compared it on
        this instance, it serves all such instances at once, unless other predictions are open: they had eager's
        answers."""
        is_marked = self.places[module] in function.compared_on
        marked = [other for other in self.places if is_marked and self.places[other] in function.compared_on]
        take = partial(self.supply.confirm, case, marked)
        with self._moment.alone() if is_marked else contextlib.nullcontext(False) as takes_now:
            if takes_now:
                take()
            else:
                self._moment.defer(case.subject(module), take)
        case.trials[module] = PASSED  # after that was noted: until then, eager answers
        self._moment.at_end(case, lambda: self.supply.mark(case, self.places))
        self.report.wait_for(self.supply.kinds)


def _likeness(args: Args, kwargs: Kwargs) -> Hashable:
    """What calls that are settled alike have in common, as a key; None if that cannot be told."""
    try:
        hash(key := (likeness(args), tuple(kwargs), likeness(kwargs.values()), modes()))
    except Exception:  # of an object that is none of torch's own, or while torch traces sizes
        return None
    return key


def _sizes(call: Call) -> list[torch.Size]:
    return [tensor.shape for tensor in reachable_tensors(call)]
