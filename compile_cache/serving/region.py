"""A module class and its instances: routes each call to the code that serves it.

A call that a taken function fits is served by it at once. Any other call gets its case, whose state says what happens:
see `State`. New code is taken once it was compared with eager on each instance, from the next prediction on.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.background.shadow import Shadow
from compile_cache.errors import (
    ArtifactError,
    CompileCacheError,
    Failure,
    NoGraph,
    NotHandedOver,
    UnseenCallError,
    attempt,
    first_line,
)
from compile_cache.inductor.call_spec import (
    RECOMPILE_LIMIT,
    CallSpec,
    call_region,
    reachable_sizes,
    serve_by,
    top_sizes,
    why_eager,
    with_plain_strides,
)
from compile_cache.inductor.counters import count_precompiled, read_counts
from compile_cache.serving.comparison import Comparison, generators_at
from compile_cache.serving.kinds import MOST_FUNCTIONS, Case, Code, Kinds, State
from compile_cache.serving.report import RegionReport
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.background.orders import Making
    from compile_cache.inductor.make import Graphs, Traced
    from compile_cache.inductor.precompiled import Precompiled
    from compile_cache.serving.compiler import Compiler

log = logging.getLogger("compile_cache")

_GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"
_TOO_MANY = "eager for the kinds of calls that were used least: more are not kept"
_UNUSED = "nothing called it in the warm-up. Give the modules whose forward is called to boot.compile()"
_INSIDE = "nothing called it in the warm-up, but another torch.compile compiled code. Take that away if it is around it"
# For one instance: by the sizes of a call, the cases whose code serves it, the latest first. None: of any sizes.
_Serving = dict[tuple[torch.Size, ...] | None, tuple[Case, ...]]


class Region:
    """A module class and its instances.

    `report` says how calls are served, and why. `served` counts calls by step. `waited_s` is the time that requests
    waited for the compiler, in seconds. `withheld` has the files of code that failed, which must not be published. The
    second process makes the code of regions in the order of their `rank`.
    """

    def __init__(self, report: RegionReport, compiler: Compiler, rank: int) -> None:
        self.report = report
        self._rank = rank
        self.kinds = Kinds()
        self.shares_weights = False
        self.served: Counter[str] = Counter()
        self.waited_s = 0.0
        self.withheld: set[str] = set()
        self._unused = ""
        self._compiler = compiler
        # The files that the graphs' compiles left in the cache directory.
        self._files: set[str] = set()
        self._serving: dict[nn.Module, _Serving] = {}
        # Why code did not fit the module that it was ordered with, which may have changed meanwhile. If the reason is
        # the same twice, and no other code of the kind has fitted, none will.
        self._misfits: set[tuple[CallSpec, str]] = set()
        # The first tensor's size of calls that made a tensor larger which they keep. Each such call has another kind,
        # so it is not even described.
        self._growing: set[tuple[torch.Size, ...]] = set()

    @property
    def proved(self) -> set[str]:
        """The paths of the functions that were compared on every instance that called them."""
        return {case.code.path for case in self.kinds if case.code and case.has_passed}

    @property
    def met(self) -> set[str]:
        """The paths of the functions that would fit a call that was made since they arrived."""
        return {case.code.path for case in self.kinds if case.code and case.called}

    def adopt(self, module: nn.Module) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`."""
        self._serving.setdefault(module, {})
        self.report.instances = len(self._serving)
        serve_by(module, functools.partial(self._call, module))

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_plain_strides(args, kwargs)
        serving = self._serving[module]
        sizes = top_sizes(args, kwargs)
        for key in (sizes, None):
            for case in serving.get(key, ()):
                if (code := case.code) is not None and _fits(code, module, args, kwargs):
                    return self._serve(case, code, module, args, kwargs)
        if sizes[:1] in self._growing:
            return self._serve_eager(module, args, kwargs)
        return self._route(module, args, kwargs)

    def _route(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call that no serving function fits, as the state of its case says."""
        if reason := why_eager(module):
            self.report.take_step("eager")
            self.report.explain(f"eager: {reason}")
            return self._serve_eager(module, args, kwargs)
        self._compiler.moment.pass_by()
        found = attempt(self.kinds.case, module, args, kwargs)
        case, gone = (None, []) if isinstance(found, Failure) else found
        for other in gone:
            other.state, other.reason = State.EAGER, _TOO_MANY
            self._stop(other)
        if case is None:
            self.report.take_step("eager")
            self.report.explain(found.reason if isinstance(found, Failure) else _TOO_MANY)
            return self._serve_eager(module, args, kwargs)
        if self.kinds.claim(case):
            try:
                return self._serve_new(case, module, args, kwargs)
            finally:
                if case.state is State.ORDERED and case.ordered_by is None:  # nothing was found, made or ordered
                    case.state = State.NEW
        if case.state in (State.PRECOMPILED, State.CACHED, State.ARRIVED):
            return self._serve_by_code(case, module, args, kwargs)
        if case.state is State.EAGER:
            self.report.take_step("eager")
            self.report.explain(case.reason)
        return self._serve_eager(module, args, kwargs)

    def _serve_by_code(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call whose code is known: by it, if it was compared on this instance and is taken; else eager."""
        code = case.code
        if code is None:  # dropped by another thread
            return self._serve_eager(module, args, kwargs)
        is_to_compare = case.is_to_compare(module)
        is_taken = case.state is not State.ARRIVED and (case.is_proved or self._is_serving(case, module))
        if not is_to_compare and not is_taken:
            self._take_soon(case)  # the last instance that had not passed may have left
            return self._serve_eager(module, args, kwargs)
        if misfit := code.misfit(module, args, kwargs):
            is_new = (case.spec, misfit) not in self._misfits
            self._misfits.add((case.spec, misfit))
            is_hopeless = module is case.ordered_by and not is_new
            if is_hopeless and not any(other.passed for other in self.kinds if other.spec == case.spec):
                self._give_up(case, f"code of the second process does not fit in this process: {misfit}")
                return self._serve_eager(module, args, kwargs)
            self.kinds.leave(case, module)
            return self._route(module, args, kwargs)
        if is_to_compare:
            return self._compare(case, module, args, kwargs)
        self._let_serve(case, module)
        return self._serve(case, code, module, args, kwargs)

    def _serve(self, case: Case, code: Code, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.kinds.note_use(case)
        self.served[code.step] += 1
        try:
            return code(module, args, kwargs)
        except NoGraph:
            self.served[code.step] -= 1
            if not self._compiler.is_compiling:  # which hides all graphs
                self.kinds.miss(case, module)
            return self._serve_eager(module, args, kwargs)
        except AssertionError as error:
            if code.step == "precompiled":  # generated code asserts the strides that it was compiled for
                self._drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _serve_eager(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.served["eager"] += 1
        return call_region(module, args, kwargs)

    def _serve_new(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call of a new case: by code of an earlier boot, else as the policy says."""
        compiler = self._compiler
        artifacts, found = compiler.artifacts, compiler.find(module, args, kwargs)
        if not isinstance(found, str):
            case.is_proved = compiler.is_hit and artifacts is not None and artifacts.is_compared(found.path)
            self._arrive(case, found)
            if case.is_proved and not compiler.is_warming_up:
                case.passed.add(module)
                self._take(case)
            count_precompiled("loaded")
            self.report.loaded += 1
            return self._route(module, args, kwargs)
        policy = compiler.policy()
        if policy == "block":
            answer = self._compare(case, module, args, kwargs, self._made)
            if found and self.report.settled == "cached":
                self.report.explain(f"not precompiled: {found}")
            return answer
        record = artifacts.cached(module, args, kwargs) if artifacts is not None and compiler.is_warming_up else None
        if record is not None and compiler.may_trace(record.seconds):
            log.info("compile.trace region=%s call=%s seconds=%.1f", self.report.name, case.spec, record.seconds)
            return self._compare(case, module, args, kwargs, self._traced)
        if record is not None:
            self._give_up(case, f"{record.reason}; its graphs take {record.seconds:.0f} s to trace in the setup")
        elif policy == "background":
            return self._order(case, module, args, kwargs)
        elif policy == "error":
            raise UnseenCallError(
                f"{self.report.name} was called with {case.spec}, for which nothing is compiled. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN to background or eager."
            )
        else:
            self._give_up(case, "nothing is compiled for it, and COMPILE_CACHE_UNSEEN=eager")
        return self._serve_eager(module, args, kwargs)

    def _compare(
        self, case: Case, module: nn.Module, args: Any, kwargs: Any, make: Callable[[Shadow], Code] | None = None
    ) -> Any:
        """Serve a call eager, and run its code on a copy. Code that is not there yet comes from `make`. If the
        comparison cannot end, nothing is concluded, and a later call repeats it."""
        compiler, started = self._compiler, time.perf_counter()
        # One thread at a time makes or compares code. It may wait for this call, so this call does not wait for it.
        if not compiler.making.acquire(blocking=False):
            return self._serve_eager(module, args, kwargs)
        before, noted = read_counts(), self.report.graphs
        try:
            sizes = reachable_sizes(module, args, kwargs) if make else []
            comparison = self._comparison(case, module, args, kwargs)
            if comparison is None:
                return self._serve_eager(module, args, kwargs)
            answer = self._reference(case, comparison)
            if make is not None and _grows(sizes, module, args, kwargs):
                self._note_growing(case, args, kwargs)
            elif make is not None:
                self._make(case, make, comparison.pristine)
            code = case.code
            # Of code that was just made, only the copy was asked.
            if code is not None and not (make and code.misfit(module, args, kwargs)):
                self._judge(case, code, module, comparison)
        finally:
            self.report.graphs = noted + read_counts().since(before).graphs
            compiler.making.release()
        seconds = time.perf_counter() - started
        if make is None:
            self.report.compile_s += seconds
            note("regions", f"{self.report.name}: compare", started)
        else:
            compiler.moment.pass_by()
        if not compiler.is_warming_up and read_counts().graphs > before.graphs:
            self.waited_s += seconds
            log.warning(
                "compile.on_request region=%s seconds=%.1f A request waited for the compiler. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN=background.",
                self.report.name,
                seconds,
            )
        return answer

    def _comparison(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Comparison | None:
        """A copy of the call to compare with. None if there can be none now; if there can never be one, the case is
        given up."""
        if self._compiler.moment.begun < case.not_before:
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return None
        try:
            return Comparison(module, args, kwargs)
        except NotHandedOver as error:
            self._give_up(case, f"it cannot be compared with eager: {error}")
        except Exception as error:  # no memory, or a mode of torch in which nothing can be copied
            self._put_off(case, error)
        return None

    def _reference(self, case: Case, comparison: Comparison) -> Any:
        """Eager's answer. If it finds no memory beside the copy, the comparison is put off, and the call fails."""
        self.served["eager"] += 1
        try:
            return comparison.eager()
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._put_off(case, error)
            raise

    def _judge(self, case: Case, code: Code, module: nn.Module, comparison: Comparison) -> None:
        """Compare the code with eager's answer. Full memory puts it off. Any other error counts as a difference; an
        error of graphs, as one of this instance alone."""
        try:
            if comparison.drew and self._compiler.moment.open > 1:
                raise ArtifactError("other predictions would see the generators of random numbers set back")
            check = comparison.check(code.try_out)
        except (MemoryError, torch.OutOfMemoryError, ArtifactError) as error:
            self._put_off(case, error)
        except NoGraph:
            self.kinds.miss(case, module)
        except Exception as error:
            log.info("region.failed region=%s error=%r", self.report.name, error, exc_info=error)
            if code.path:
                self._drop(case, Failure(error).reason)
            else:  # the graphs of the other instances are right
                self.report.explain(f"eager for an instance: {Failure(error).reason}")
                self.kinds.miss(case, module, MOST_FUNCTIONS)
        else:
            self.report.note_error(check.error, check.tolerance)
            if check.passed:
                case.passed.add(module)
                self._take_soon(case)
            else:
                self._drop(case, check.difference)

    def _take_soon(self, case: Case) -> None:
        """Mark code that has passed on all instances as compared, before it is published, and take it at the next
        moment."""
        code, artifacts = case.code, self._compiler.artifacts
        if case.has_passed and not all(self._is_serving(case, module) for module in tuple(case.passed)):
            if code is not None and code.path and artifacts is not None:
                attempt(artifacts.mark_compared, code.path)
            self._compiler.moment.note(case, functools.partial(self._take, case))

    def _put_off(self, case: Case, error: Exception) -> None:
        reason, moment = f"not compared with eager: {Failure(error).reason}", self._compiler.moment
        if case.put_off(moment.begun):
            # Predictors that replay recorded calls make no other call until there is something new.
            moment.note(case, lambda: moment.begun < case.not_before)
        else:
            self._give_up(case, reason)
        log.info("region.not_compared region=%s call=%s reason=%s", self.report.name, case.spec, reason)

    def _take(self, case: Case) -> None:
        """Let code that has passed serve. Called between two predictions, and for proved code at once."""
        code = case.code
        if code is None or case.state is State.EAGER or not case.has_passed:
            return
        case.state = State.PRECOMPILED if code.step == "precompiled" else State.CACHED
        if code.step == "precompiled":
            self.report.take_step("precompiled")
        for module in tuple(case.passed):
            self._let_serve(case, module)

    def _let_serve(self, case: Case, module: nn.Module) -> None:
        if not self._is_serving(case, module):
            serving = self._serving[module]
            serving[case.serves] = (case, *serving.get(case.serves, ()))

    def _is_serving(self, case: Case, module: nn.Module) -> bool:
        return case in self._serving[module].get(case.serves, ())

    def _stop(self, case: Case) -> None:
        """Serve no call by this case."""
        for serving in self._serving.values():
            if case in serving.get(case.serves, ()):
                serving[case.serves] = tuple(other for other in serving[case.serves] if other is not case)

    def _order(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call eager, and order its code from the second process."""
        orders = self._compiler.orders()
        if orders is None or orders.jobs.waiting >= RECOMPILE_LIMIT:
            self._give_up(case, "nothing may be compiled ahead of time" if orders is None else "too many calls wait")
            return self._serve_eager(module, args, kwargs)
        case = case if self._compiler.is_warming_up else self.kinds.opened(case, module, args, kwargs)
        case.order(module)
        sizes = reachable_sizes(module, args, kwargs)
        call = attempt(orders.pack, module, args, kwargs, self.shares_weights)
        if isinstance(call, Failure):
            self._give_up(case, f"cannot be compiled in a second process: {call.reason}")
            return self._serve_eager(module, args, kwargs)
        try:
            answer = self._serve_eager(module, args, kwargs)
        except BaseException:  # a cancelled request raises one
            case.state, case.ordered_by = State.NEW, None
            raise
        if _grows(sizes, module, args, kwargs):
            self._note_growing(case, args, kwargs)
            return answer
        receive = functools.partial(self._receive, case)
        name = f"{self.report.name} {case.spec}"
        ordered = attempt(orders.order, name, call, case.dynamic, receive, self._rank)
        if isinstance(ordered, Failure):
            self._give_up(case, f"cannot be compiled in a second process: {ordered.reason}")
        self.report.wait_for(self.kinds.waiting)
        return answer

    def _receive(self, case: Case, making: Making, function: Precompiled | None) -> None:
        """Take the second process's answer. Another thread calls this."""
        if function is None:
            self._give_up(case, making.reason)
        else:
            self.report.precompile_s += making.seconds
            self.report.note_made(making.speed)
            self._compiler.moment.note(case, functools.partial(self._arrive, case, function))

    def _arrive(self, case: Case, code: Code) -> None:
        case.arrive(code)
        self.report.wait_for(self.kinds.waiting)

    def _make(self, case: Case, make: Callable[[Shadow], Code], shadow: Shadow) -> None:
        """Make a call's code in this process."""
        started = time.perf_counter()
        self._compiler.new_files()  # those so far are not of this call
        with generators_at() if self._compiler.moment.open <= 1 else contextlib.nullcontext():
            code = attempt(make, shadow)
        if isinstance(code, Failure):
            self.withheld |= self._compiler.new_files()
            self._give_up(case, self._failure(code, time.perf_counter() - started))
        else:
            self._arrive(case, code)

    def _made(self, shadow: Shadow) -> Code:
        """Code for a call, from the one maker. Imports torch's compiler."""
        from compile_cache.inductor.make import make

        log.info("compile.begin region=%s", self.report.name)
        before, started = read_counts(), time.perf_counter()
        made = make(self._compiler.artifacts, self._graphs, shadow.copied)
        self._files |= self._compiler.new_files()
        self.report.note_traced(read_counts().since(before), made.traced, started)
        self.report.precompile_s += time.perf_counter() - started - made.traced.seconds
        if made.function is not None:
            self.report.note_made(made.speed)
        elif made.reason:
            self.report.note_not_precompiled(made.reason)
        return made.function or self._graph(made.traced)

    def _traced(self, shadow: Shadow) -> Code:
        """The graphs of a call, out of stored files.

        Raises:
            NoGraph: one is missing.
        """
        from compile_cache.inductor.make import out_of_stored_files, trace

        before, started = read_counts(), time.perf_counter()
        with out_of_stored_files():
            traced = trace(self._graphs, shadow.copied)
        self.report.note_traced(read_counts().since(before), traced, started)
        return self._graph(traced)

    @functools.cached_property
    def _graphs(self) -> Graphs:
        return self._compiler.graphs(self.report.name)

    def _graph(self, traced: Traced) -> Code:
        from compile_cache.inductor.make import Graph

        compiler = self._compiler
        return Graph(
            self._graphs, traced.is_whole, lambda: compiler.policy() == "block", lambda: compiler.is_warming_up
        )

    def _failure(self, failure: Failure, seconds: float) -> str:
        """Why nothing was made, after a line in the log."""
        from compile_cache.inductor.make import is_beyond_limit

        if is_beyond_limit(failure.error):
            return f"{RECOMPILE_LIMIT} shapes are compiled already; set COMPILE_CACHE_DYNAMIC=auto"
        log.warning(
            "compile.failed region=%s seconds=%.1f reason=%s The call is served eager, and each boot tries it again. "
            "To leave the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
            self.report.name,
            seconds,
            failure.reason,
            exc_info=None if isinstance(failure.error, CompileCacheError) else failure.error,
        )
        return failure.reason

    def _drop(self, case: Case, reason: str) -> None:
        """Stop using code that failed. It is not published, and no other is made in its place."""
        code, case.code = case.code, None
        if code is None:  # another thread was first
            return
        if code.path and self._compiler.artifacts is not None:
            log.warning("precompiled.rejected artifact=%s reason=%s", code.path, reason)
            self.withheld.add(code.path)
            self._compiler.artifacts.reject(code.path, reason)
            self.report.note_not_precompiled(reason)
        else:
            self.withheld |= self._files
            for other in self.kinds:  # torch may serve their calls by the same graph
                if other.code is not None and not other.code.path:
                    self._drop(other, reason)
        self._give_up(case, reason)
        self._compiler.moment.note(case, functools.partial(self._stop, case))  # tells predictors with recorded calls

    def _note_growing(self, case: Case, args: Any, kwargs: Any) -> None:
        """Give up calls that make a cache larger, and those like them."""
        self._growing.add(top_sizes(args, kwargs)[:1])
        self._give_up(case, _GROWS)

    def _give_up(self, case: Case, reason: str) -> None:
        """Serve a case's calls eager from now on."""
        case.state, case.reason = State.EAGER, reason
        self._stop(case)
        self.report.explain(reason, case.spec)
        self.report.take_step("eager")
        self.report.wait_for(self.kinds.waiting)

    def end_warm_up(self, has_other_graphs: bool) -> None:
        """After a round of the warm-up, report a region that nothing called. `has_other_graphs`: torch compiled or
        found graphs that are no region's."""
        if self.served or not self._unused:
            self.report.reason = self.report.reason.replace(self._unused, "").strip("; ")
        if not (self.served or self._unused):
            self._unused = _INSIDE if has_other_graphs else _UNUSED
            self.report.explain(self._unused)
            log.warning("nothing of %s is compiled: %s", self.report.name, self._unused)


def _grows(sizes: list[torch.Size], module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call that could reach tensors of these `sizes` has changed one, as a cache that grows."""
    now = reachable_sizes(module, args, kwargs)
    return len(now) == len(sizes) and now != sizes


def _fits(code: Code, module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether code compiled ahead of time fits a call of a module that it was compared on."""
    try:
        return code.step == "precompiled" and code.fits(module, args, kwargs)
    except Exception as error:  # a guard reads any object of the model's
        log.info("precompiled.not_checked artifact=%s error=%r", code.path, error)
        return False
