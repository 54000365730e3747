"""A module class and its instances: routes each call to the code that serves it, and compares that first.

A call that a taken function fits, or that is like one settled in this prediction, is served at once. Any other call
gets its case, whose state says what happens: see `State`. New code is taken between two predictions, once it was
compared with eager on an instance, and no other is waited for.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import nn

from compile_cache.calls.overlaps import reachable_tensors
from compile_cache.calls.spec import (
    GLOBAL_HOOKS,
    RECOMPILE_LIMIT,
    Args,
    Call,
    Kwargs,
    Parts,
    call_region,
    count_dispatch_modes,
    growth,
    is_tracing,
    likeness,
    modes,
    serve_by,
    top_sizes,
    why_eager,
    with_plain_strides,
)
from compile_cache.errors import (
    ArtifactError,
    CompileCacheError,
    Failure,
    NoGraph,
    NotHandedOver,
    attempt,
    first_line,
    log,
)
from compile_cache.inductor.counters import read_counts
from compile_cache.of_each import OfEach
from compile_cache.serving.comparison import Comparison
from compile_cache.serving.moment import LOCK, Known
from compile_cache.serving.policy import Policy
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.source import Maker, Source
from compile_cache.serving.states import WITH_CODE, Case, Code, Standing, State
from compile_cache.timeline import note

# Outside predictions, what lies in a module is looked at again after so many calls.
_CALLS_BETWEEN_LOOKS = 64
_GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"


class Region:
    """A module class and its instances.

    `served` counts the calls by step. `waited_s` is the time that requests waited for the compiler.
    """

    def __init__(self, report: RegionReport, owner: str, policy: Policy) -> None:
        self.source = Source(report, owner, policy)
        self._moment = policy.moment
        # By instance, its place in the model: see `Source.mark`.
        self.places: OfEach[str] = OfEach()
        self.served: Counter[str] = Counter()
        self.waited_s = 0.0

    @property
    def report(self) -> RegionReport:
        """How calls are served, and why."""
        return self.source.report

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
            case, parts, overlapping = found
            if case.state is State.TAKEN and (code := case.code) and not any(GLOBAL_HOOKS):
                plain, named = with_plain_strides(args, kwargs)
                # torch's graphs ignore hooks that were added later, and inputs that overlap.
                if parts.are_unhooked_still() and parts.overlaps(plain, named) == overlapping:
                    return self._serve(case, code, (module, plain, named), like)
        if is_tracing():  # sizes are tensors then
            return self._route((module, args, kwargs), None)
        plain, named = with_plain_strides(args, kwargs)
        if known is not None and known.functions:
            for case in known.functions.get(top_sizes(plain, named), ()):
                if case.state is State.TAKEN and (code := case.code) and code.fits((module, plain, named)):
                    return self._serve(case, code, (module, plain, named))
        return self._route((module, plain, named), like or _likeness(args, kwargs))

    def _known(self, call: Call, case: Case | None) -> Known:
        """What is known about the calls of this module, which was just looked at, to be added to."""
        known: Known | None = self._moment.known.get(call[0])
        if known is None or known.calls_left < 0 or len(known) + len(known.functions) >= RECOMPILE_LIMIT:
            # To look again takes some microseconds for each part.
            parts = len(case.spec.structure) if case is not None else 0
            known = self._moment.known[call[0]] = Known(max(_CALLS_BETWEEN_LOOKS, parts))
        return known

    def _settle(self, call: Call, like: Any, case: Case | None) -> None:
        """Serve calls like this one alike, as long as that is `known`: by the graphs of a case, or by the module's own
        code."""
        state = case.state if case is not None else State.EAGER
        # New code may have arrived since the caller looked: a function, which checks no guards when it is called, or
        # graphs that are not compared on this instance.
        serves = case is not None and not case.path and case.standings.get(call[0]) is Standing.SERVES
        known = self._known(call, case)
        for key in (like, growth(*call[1:]) if state is State.GROWING else None):
            if key is not None and state in (State.EAGER, State.GROWING, State.ORDERED, State.LATE):
                known[key] = ()
            elif key is not None and state is State.TAKEN and serves:
                parts = Parts(call[0])
                known[key] = case, parts, parts.overlaps(*call[1:])

    def _route(self, call: Call, like: Any) -> Any:
        """Serve a call that has no short way, as the state of its case says.

        A dispatch mode (`torch.export`, `make_fx`, FakeTensorMode, a counter) or `torch.jit.trace` would take what is
        tried on a copy for what the model computes.
        """
        if count_dispatch_modes() or is_tracing():
            self.report.explain("eager in a dispatch mode of torch, such as a counter or a trace")
            return self._serve_eager(call)
        if reason := why_eager(call[0]):
            return self._stay_eager(call, like, f"eager: {reason}")
        self._moment.pass_by()
        found = attempt(self.source.kinds.case, call)
        if isinstance(found, Failure):
            self.report.note_eager(found.reason)
            return self._serve_eager(call)
        if isinstance(found, str):
            return self._stay_eager(call, like, found)
        case, code = found
        try:
            if case.claim(call):
                return self._serve_new(case, call, like)
        finally:
            case.give_back(call)
        return self._serve_known(case, code, call, like)

    def _stay_eager(self, call: Call, like: Any, reason: str) -> Any:
        """Serve calls like this one by the model's own code, as long as that is `known`."""
        self.report.note_eager(reason)
        self._settle(call, like, None)
        return self._serve_eager(call)

    def _serve_known(self, case: Case, code: Code | None, call: Call, like: Any) -> Any:
        """Serve a call of a case that is not new, by `code` if it may serve: that fits the call."""
        state = case.state
        if state in WITH_CODE and code is not None and case.is_to_compare(call[0]):
            return self._compare(case, call)
        if state in WITH_CODE and (code is None or case.standings.get(call[0]) is not Standing.SERVES):
            return self._serve_eager(call)  # without `code`, it has arrived since, and may not fit
        if code is not None and state is State.TAKEN:
            if code.path:
                self._remember(case, call)
            else:
                self._settle(call, like, case)
            return self._serve(case, code, call, like)
        # To look whether a call makes a tensor larger takes a millisecond, so one call of a prediction shows it.
        is_first = state is State.GROWING and (case not in self._moment.known or not self._moment.open)
        answer = self._serve_eager(call, case if is_first else None)
        self._settle(call, like, case)  # unless it has not grown
        return answer

    def _remember(self, case: Case, call: Call) -> None:
        """Ask this function first about the next call of these sizes, as long as that is `known`."""
        functions, sizes = self._known(call, case).functions, top_sizes(*call[1:])
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
            if not self.source.policy.maker:  # a thread that traces hides all graphs
                if self.source.policy.for_graphs():
                    case.miss(call[0])
                    self._moment.known.pop(call[0], None)
                else:  # it may fit again
                    self._settle(call, like, None)
            return self._serve_eager(call)
        except AssertionError as error:
            if code.path:  # generated code asserts the strides that it was compiled for
                self.source.drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _serve_new(self, case: Case, call: Call, like: Any) -> Any:
        """Serve a call of a case that this thread has claimed: by code of an earlier boot, else as the policy says."""
        maker = self.source.maker(case, call)
        if maker is not None:
            return self._compare(case, call, maker)
        if self.places[call[0]] in case.compared_on and not self.source.policy.is_warming_up:
            self._let_serve(case, call[0])
        if case.state is not State.CLAIMED:
            return self._serve_known(case, case.code, call, like)
        if self.source.policy.is_full:  # the next prediction orders it
            self._settle(call, like, None)
            return self._serve_eager(call)
        order = attempt(self.source.pack, case, call)
        answer = self._serve_eager(call, case)
        if case.state is State.CLAIMED:
            self.source.order(case, order)
        return answer

    def _compare(self, case: Case, call: Call, maker: Maker | None = None) -> Any:
        """Serve a call eager, and try the case's code on a copy. A claimed case gets its code from `maker`. If the
        trial does not end, nothing is concluded, and a later call repeats it: see `Source.put_off`."""
        policy, report, started = self.source.policy, self.report, time.perf_counter()
        comparison = None
        before, noted = read_counts(), report.graphs
        try:
            # One call at a time makes or compares code. It may wait for this call, so this call does not wait for it.
            if policy.begin_making(call):
                if maker or case.state in WITH_CODE:  # another thread may have given it up
                    comparison = self._begun(case, call)
                answer = self._answer(case, comparison, call, maker) if comparison else None
        finally:
            if policy.end_making(call):
                report.graphs = noted + read_counts().since(before).graphs
        if comparison is None:
            return self._serve_eager(call)
        seconds = time.perf_counter() - started
        if maker is None:
            report.compile_s += seconds
            note("regions", f"{report.name}: compare", started)
        else:
            policy.moment.pass_by()
        if not policy.is_warming_up and read_counts().graphs > before.graphs:
            self.waited_s += seconds
            log.warning(
                "compile.on_request region=%s seconds=%.1f A request waited for the compiler. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN=background.",
                report.name,
                seconds,
            )
        return answer

    def _serve_eager(self, call: Call, case: Case | None = None) -> Any:
        """Serve a call by the model's own code. That of a `case`, which is claimed or GROWING, shows whether such calls
        change the size of a tensor that they can reach, as of a cache that grows."""
        sizes = _sizes(call) if case is not None else []
        self.served["eager"] += 1
        answer = call_region(*call)
        if case is not None:
            now = _sizes(call)
            if len(now) == len(sizes) and now != sizes:
                self.source.give_up(case, _GROWS, State.GROWING)
                self._moment.known[case] = Known()
            elif now == sizes and case.state is State.GROWING:
                case.move(State.NEW)
        return answer

    def _begun(self, case: Case, call: Call) -> Comparison | None:
        """A copy of the call to compare with. None if there can be none now; if there can never be one, the instance
        is left out."""
        if self._moment.has((case, "again")):  # one did not end
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return None
        try:
            return Comparison(call)
        except NotHandedOver as error:
            self.source.leave_out(case, call[0], f"it cannot be compared with eager: {error}")
        except Exception as error:  # no memory, or a mode of torch in which nothing can be copied
            self.source.put_off(case, call[0], error)
        return None

    def _answer(self, case: Case, comparison: Comparison, call: Call, maker: Maker | None) -> Any:
        stays_alone = self._moment.stays_alone()
        try:
            answer = self._serve_eager(call, case if maker else None)
        except BaseException as error:
            is_of_model = isinstance(error, Exception) and not isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not is_of_model:  # a cancel, or no memory beside the copy
                self.source.put_off(case, call[0], error)
            raise
        expected = attempt(comparison.expect, answer)
        if isinstance(expected, Failure):
            self.source.put_off(case, call[0], expected.error)
            return answer
        if maker is not None and case.state is State.CLAIMED:
            self.source.make(case, maker, comparison.pristine)
        code = case.code
        # Of code that was just made, only the copy was asked whether it fits.
        if code is not None and not (maker and code.misfit(call)):
            self._judge(case, code, call[0], comparison, stays_alone)
        return answer

    def _judge(
        self, case: Case, code: Code, module: nn.Module, comparison: Comparison, stays_alone: Callable[[], bool]
    ) -> None:
        """Compare the code with eager's answer. Full memory puts it off, and so do other predictions if the call draws
        random numbers, or if there is a difference. An error of graphs is one of this instance alone; any other error
        counts as a difference."""
        try:
            with self._moment.alone() if comparison.generators else contextlib.nullcontext():
                if comparison.generators and not stays_alone():
                    raise ArtifactError("other predictions would see the generators of random numbers set back")
                check = comparison.check(code.try_out)
        except (MemoryError, torch.OutOfMemoryError, ArtifactError) as error:
            self.source.put_off(case, module, error)
        except NoGraph:
            case.miss(module)
        except Exception as error:
            log.info("region.failed region=%s error=%r", self.report.name, error, exc_info=error)
            if code.path:
                self.source.drop(case, Failure(error).reason)
            else:  # the graphs of the other instances are right
                self.report.explain(f"eager for an instance: {Failure(error).reason}")
                case.miss(module)
        else:
            self.report.note_error(check.error, check.tolerance)
            if check.passed:
                self._let_serve(case, module)
            elif stays_alone():
                self.source.drop(case, check.difference)
            else:  # a call of another prediction may have written into the same module
                reason = f"while other predictions were open, {check.difference}"
                self.source.put_off(case, module, ArtifactError(reason))

    def _let_serve(self, case: Case, module: nn.Module) -> None:
        """Note that the code may serve this instance. It is taken at the next moment. If an earlier boot compared it on
        this instance, it is taken at once, for all such instances, unless other predictions are open: they had eager's
        answers."""
        is_proved = self.places[module] in case.compared_on
        with LOCK:
            case.unended = 0
            if is_proved:
                case.serve([other for other in self.places if self.places[other] in case.compared_on])
            else:
                case.standings[module] = Standing.PASSED
        self.report.wait_for(self.source.kinds)
        moment = self._moment
        with moment.alone() if is_proved else contextlib.nullcontext(False) as takes_now:
            if takes_now:
                self.source.take(case)
            else:
                moment.note(case, lambda: self.source.take(case))
        moment.note_ending(case, lambda: self.source.mark(case, self.places))


def _likeness(args: Args, kwargs: Kwargs) -> Hashable:
    """What calls that are settled alike have in common, as a key; None if that cannot be told."""
    try:
        hash(key := (likeness(args), tuple(kwargs), likeness(kwargs.values()), modes()))
    except Exception:  # of an object that is none of torch's own, or while torch traces sizes
        return None
    return key


def _sizes(call: Call) -> list[torch.Size]:
    return [tensor.shape for tensor in reachable_tensors(call)]
