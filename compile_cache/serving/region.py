"""A module class and its instances: routes each call to the code that serves it.

A call that a taken function fits, or that is like one settled in this prediction, is served at once. Any other call
gets its case, whose state says what happens: see `State`. New code is taken between two predictions, once it was
compared with eager on an instance, and no other is waited for.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from compile_cache.calls.spec import (
    GLOBAL_HOOKS,
    RECOMPILE_LIMIT,
    Parts,
    call_region,
    growth,
    likeness,
    modes,
    serve_by,
    top_sizes,
    why_eager,
    with_plain_strides,
)
from compile_cache.calls.tensors import Args, Call, Kwargs, overlaps_of
from compile_cache.errors import Failure, NoGraph, attempt, first_line
from compile_cache.serving.kinds import WITH_CODE, Case, Code, Standing, State
from compile_cache.serving.moment import Known
from compile_cache.serving.policy import Policy
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.source import Source
from compile_cache.serving.trial import Trials

# Outside predictions, what lies in a module is looked at again after so many calls.
_CALLS_BETWEEN_LOOKS = 64


class Region:
    """A module class and its instances. `report` says how calls are served, and why."""

    def __init__(self, report: RegionReport, policy: Policy, rank: int) -> None:
        self.report = report
        self.source = Source(report, policy, rank)
        self._moment = policy.moment
        # By module and by its calls' `top_sizes`, the cases whose functions served calls, the latest first.
        self._functions: dict[nn.Module, dict[tuple[torch.Size, ...], tuple[Case, ...]]] = {}
        self.trials = Trials(self.source, self._functions.keys())
        self.served = self.trials.served

    def adopt(self, module: nn.Module) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`."""
        self._functions.setdefault(module, {})
        self.report.instances = len(self._functions)
        serve_by(module, self._call)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        moment, like, found = self._moment, None, None
        if (known := moment.known.get(module)) and (found := known.get(growth(args, kwargs))) is None:
            found = known.get(like := _likeness(args, kwargs))
        if known and found is not None and moment.holds(known):
            if not found:
                self.served["eager"] += 1
                return call_region(module, args, kwargs)
            case, parts = found
            if case.state is State.TAKEN and (code := case.code) and not any(GLOBAL_HOOKS):
                plain, named = with_plain_strides(args, kwargs)
                # torch's graphs ignore hooks that were added later, and inputs that overlap.
                if parts.are_unhooked_still() and overlaps_of(plain, named, parts) == case.spec.overlaps:
                    return self._serve(case, code, (module, plain, named), like)
        plain, named = with_plain_strides(args, kwargs)
        if functions := self._functions[module]:
            for case in functions.get(top_sizes(plain, named), ()):
                if case.state is State.TAKEN and (code := case.code) and code.fits((module, plain, named)):
                    return self._serve(case, code, (module, plain, named))
        return self._route((module, plain, named), like or _likeness(args, kwargs))

    def _settle(self, call: Call, like: Any, case: Case | None) -> None:
        """Serve calls like this one alike, as long as that is `known`: by the graphs of a case, or by the module's own
        code."""
        moment, state = self._moment, case.state if case is not None else State.EAGER
        # New code may have arrived since the caller looked: a function, which checks no guards when it is called, or
        # graphs that are not compared on this instance.
        serves = case is not None and not case.path and case.standings.get(call[0]) is Standing.SERVES
        known = moment.known.setdefault(call[0], Known())
        if not 0 < len(known) < RECOMPILE_LIMIT:
            known.clear()
            # To look again takes some microseconds for each part.
            known.calls_left = max(_CALLS_BETWEEN_LOOKS, len(case.spec.structure) if case is not None else 0)
        for key in (like, growth(*call[1:]) if state is State.GROWING else None):
            if key is not None and state in (State.EAGER, State.GROWING, State.ORDERED, State.LATE):
                known[key] = ()
            elif key is not None and state is State.TAKEN and serves:
                known[key] = case, Parts(call[0])

    def _route(self, call: Call, like: Any) -> Any:
        """Serve a call that has no short way, as the state of its case says."""
        if reason := why_eager(call[0]):
            self.report.note_eager(f"eager: {reason}")
            self._settle(call, like, None)
            return self.trials.serve_eager(call)
        self._moment.pass_by()
        found = attempt(self.source.kinds.case, call)
        if isinstance(found, Failure):
            self.report.note_eager(found.reason)
            return self.trials.serve_eager(call)
        case, code = found
        if case.move(State.CLAIMED):
            try:
                return self._serve_new(case, call, like)
            finally:
                if case.state is State.CLAIMED:  # nothing was found, made or ordered
                    case.move(State.NEW)
        return self._serve_known(case, code, call, like)

    def _serve_known(self, case: Case, code: Code | None, call: Call, like: Any) -> Any:
        """Serve a call of a case that is not new, by `code` if it may serve: that fits the call."""
        state = case.state
        if state in WITH_CODE and code is not None and case.is_to_compare(call[0]):
            return self.trials.hold(case, call)
        if state in WITH_CODE and (code is None or case.standings.get(call[0]) is not Standing.SERVES):
            return self.trials.serve_eager(call)  # without `code`, it has arrived since, and may not fit
        if code is not None and state is State.TAKEN:
            if code.path:
                self._remember(case, call)
            else:
                self._settle(call, like, case)
            return self._serve(case, code, call, like)
        if state in (State.EAGER, State.GROWING):
            self.report.note_eager(case.reason)
        # To look whether a call makes a tensor larger takes a millisecond, so one call of a prediction shows it.
        is_first = state is State.GROWING and (case not in self._moment.known or not self._moment.open)
        answer = self.trials.serve_eager(call, case if is_first else None)
        self._settle(call, like, case)  # unless it has not grown
        return answer

    def _remember(self, case: Case, call: Call) -> None:
        """Ask this function first about the next call of these sizes."""
        functions, sizes = self._functions[call[0]], top_sizes(*call[1:])
        if len(functions) >= RECOMPILE_LIMIT:
            functions.clear()
        others = [other for other in functions.get(sizes, ()) if other.state is State.TAKEN]
        functions[sizes] = (case, *(other for other in others if other is not case))

    def _serve(self, case: Case, code: Code, call: Call, like: Any = None) -> Any:
        """Serve a call by code that was compared on this instance, and is taken."""
        step = "precompiled" if code.path else "compiled"
        self.served[step] += 1
        try:
            return code(*call)
        except NoGraph:
            self.served[step] -= 1
            if not self.source.policy.making.locked():  # a thread that traces hides all graphs
                if self.source.policy.for_graphs():
                    case.miss(call[0])
                    self._moment.known.pop(call[0], None)
                else:  # it may fit again
                    self._settle(call, like, None)
            return self.trials.serve_eager(call)
        except AssertionError as error:
            if code.path:  # generated code asserts the strides that it was compiled for
                self.source.drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _serve_new(self, case: Case, call: Call, like: Any) -> Any:
        """Serve a call of a case that this thread has claimed: by code of an earlier boot, else as the policy says."""
        maker = self.source.maker(case, call)
        if maker is not None:
            return self.trials.hold(case, call, maker)
        if case.has_proved_code and not self.source.policy.is_warming_up:
            self.trials.let_serve(case, call[0])
        if case.state is not State.CLAIMED:
            return self._serve_known(case, case.code, call, like)
        if self.source.policy.is_full:  # the next prediction orders it
            self._settle(call, like, None)
            return self.trials.serve_eager(call)
        order = attempt(self.source.pack, case, call)
        answer = self.trials.serve_eager(call, case)
        if case.state is State.CLAIMED:
            self.source.order(case, order)
        return answer


def _likeness(args: Args, kwargs: Kwargs) -> Hashable:
    """What calls that are settled alike have in common, as a key; None if that cannot be told."""
    try:
        hash(key := (likeness(args), tuple(kwargs), likeness(kwargs.values()), modes()))
    except Exception:  # of an object that is none of torch's own, or while torch traces sizes
        return None
    return key
