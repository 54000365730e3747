"""A module class and its instances: routes each call to the code that serves it.

A call that a taken function fits, or that is like one settled in this prediction, is served at once. Any other call
gets its case, whose state says what happens: see `State`. New code is taken once it was compared with eager on each
instance, from the next prediction on.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.calls.shadow import Shadow
from compile_cache.calls.spec import (
    GLOBAL_HOOKS,
    RECOMPILE_LIMIT,
    Parts,
    call_region,
    likeness,
    modes,
    overlaps_of,
    reachable_sizes,
    serve_by,
    top_sizes,
    why_eager,
    with_plain_strides,
)
from compile_cache.errors import (
    ArtifactError,
    CompileCacheError,
    Failure,
    GraphNotStored,
    NoGraph,
    NotHandedOver,
    UnseenCallError,
    attempt,
    first_line,
)
from compile_cache.inductor.counters import count_precompiled, read_counts
from compile_cache.serving.comparison import Comparison, generators_at
from compile_cache.serving.kinds import GROWS, Case, Kinds, Standing, State
from compile_cache.serving.moment import LOCK
from compile_cache.serving.region_report import RegionReport
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.background.orders import Making
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Graphs, Traced
    from compile_cache.inductor.stored_functions import CachedRecord
    from compile_cache.serving.compiler import Compiler
    from compile_cache.serving.kinds import Code

log = logging.getLogger("compile_cache")

_UNUSED = "nothing called it in the warm-up. Give the modules whose forward is called to boot.compile()"
_INSIDE = "nothing called it in the warm-up, but another torch.compile compiled code. Take that away if it is around it"
# Outside predictions, what lies in a module is looked at again after so many calls.
_CALLS_BETWEEN_LOOKS = 64


@dataclass(slots=True)
class _Instance:
    """The short ways of one module.

    - `functions`: the cases whose functions served calls, by the calls' `top_sizes`, the latest first
    - `settled`: the cases of calls that were settled, by their `likeness`; None where the module itself is why they are
      eager. They hold while the moment's number stays `begun`, and outside predictions for the `left` next calls
    - `parts`: those of the module, once graphs served it
    """

    functions: dict[tuple[torch.Size, ...], tuple[Case, ...]] = field(default_factory=dict)
    settled: dict[Any, Case | None] = field(default_factory=dict)
    begun: int = 0
    left: int = -1
    parts: Parts | None = None


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
        self._instances: dict[nn.Module, _Instance] = {}

    @property
    def proved(self) -> set[str]:
        """The paths of the functions that were compared on every instance that called them."""
        return {case.code.path for case in self.kinds if case.code and case.has_passed}

    @property
    def met(self) -> set[str]:
        """The paths of the functions of which a comparison has begun."""
        return {case.code.path for case in self.kinds if case.code and (case.serves_any or case.tries)}

    def adopt(self, module: nn.Module) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`."""
        self._instances.setdefault(module, _Instance())
        self.report.instances = len(self._instances)
        serve_by(module, functools.partial(self._call, module))

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        instance = self._instances[module]
        known = instance.settled  # which another thread may replace
        like = _likeness(args, kwargs) if known else None
        if like in known and self._holds(instance):
            settled = known[like]
            if settled is None or settled.state in (State.EAGER, State.ORDERED):
                return self._serve_eager(module, args, kwargs)
            if settled.state is State.CACHED and (code := settled.code) and not any(GLOBAL_HOOKS):
                plain, named = with_plain_strides(args, kwargs)
                parts = instance.parts
                # torch's graphs ignore hooks that were added later, and inputs that overlap.
                if parts and parts.are_unhooked() and overlaps_of(plain, named, parts) == settled.spec.overlaps:
                    return self._serve(settled, code, module, plain, named, like)
        plain, named = with_plain_strides(args, kwargs)
        for case in instance.functions.get(top_sizes(plain, named), ()) if instance.functions else ():
            if case.state is State.PRECOMPILED and (code := case.code) and _fits(code, module, plain, named):
                return self._serve(case, code, module, plain, named)
        return self._route(module, plain, named, like or _likeness(args, kwargs))

    def _holds(self, instance: _Instance) -> bool:
        """Whether what was settled for an instance still holds."""
        moment = self._compiler.moment
        if not moment.open:
            instance.left -= 1
        holds = instance.begun == moment.begun and instance.left >= 0
        if not holds:
            instance.settled = {}
        return holds

    def _settle(self, module: nn.Module, like: Any, case: Case | None) -> None:
        """Serve calls like this one alike, as long as it `_holds`."""
        instance, begun = self._instances[module], self._compiler.moment.begun
        if instance.begun != begun or instance.left < 0 or len(instance.settled) >= RECOMPILE_LIMIT:
            # To look again takes some microseconds for each part.
            looks = len(case.spec.structure) if case is not None else 0
            instance.settled, instance.begun, instance.left = {}, begun, max(_CALLS_BETWEEN_LOOKS, looks)
            instance.parts = None
        if like is not None:
            instance.settled[like] = case
        if case is not None and case.state is State.CACHED and instance.parts is None:
            instance.parts = Parts(module)

    def _route(self, module: nn.Module, args: Any, kwargs: Any, like: Any, by_graphs: bool = True) -> Any:
        """Serve a call that has no short way, as the state of its case says."""
        if reason := why_eager(module):
            self._explain_eager(f"eager: {reason}")
            self._settle(module, like, None)
            return self._serve_eager(module, args, kwargs)
        self._compiler.moment.pass_by()
        case = attempt(self.kinds.case, module, args, kwargs, by_graphs)
        if isinstance(case, Failure):
            self._explain_eager(case.reason)
            return self._serve_eager(module, args, kwargs)
        if case.move(State.CLAIMED):
            with _claimed(case):
                return self._serve_new(case, module, args, kwargs)
        state, code = case.state, case.code
        if code is not None and state in (State.ARRIVED, State.PRECOMPILED, State.CACHED):
            return self._serve_by_code(case, code, module, args, kwargs, like)
        if state is State.EAGER:
            self._explain_eager(case.reason)
        if state in (State.EAGER, State.ORDERED):
            self._settle(module, like, case)
        return self._serve_eager(module, args, kwargs)

    def _explain_eager(self, reason: str) -> None:
        self.report.take_step("eager")
        self.report.explain(reason)

    def _serve_by_code(
        self, case: Case, code: Code, module: nn.Module, args: Any, kwargs: Any, like: Any = None
    ) -> Any:
        """Serve a call that code fits: by it, if it was compared on this instance and is taken; else eager."""
        if case.is_to_compare(module):
            return self._compare(case, module, args, kwargs)
        if case.state is State.PRECOMPILED:
            functions, sizes = self._instances[module].functions, top_sizes(args, kwargs)
            if len(functions) >= RECOMPILE_LIMIT:
                functions.clear()
            others = [other for other in functions.get(sizes, ()) if other.state is State.PRECOMPILED]
            functions[sizes] = (case, *(other for other in others if other is not case))
        elif case.state is State.CACHED:
            self._settle(module, like, case)
        else:  # taken at the next moment, or given up meanwhile
            return self._serve_eager(module, args, kwargs)
        return self._serve(case, code, module, args, kwargs, like)

    def _serve(self, case: Case, code: Code, module: nn.Module, args: Any, kwargs: Any, like: Any = None) -> Any:
        self.served[code.step] += 1
        try:
            return code(module, args, kwargs)
        except NoGraph:
            self.served[code.step] -= 1
            if not self._compiler.is_compiling:  # which hides all graphs
                if not (self._compiler.is_warming_up or self._compiler.policy() == "block"):  # they may fit again
                    return self._route(module, args, kwargs, like, by_graphs=False)
                self._miss(case, module)
            return self._serve_eager(module, args, kwargs)
        except AssertionError as error:
            if code.step == "precompiled":  # generated code asserts the strides that it was compiled for
                self._drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _miss(self, case: Case, module: nn.Module) -> None:
        """Note that no graph fits a call of `module`. Its next call gets another case."""
        with LOCK:
            case.standings[module] = Standing.DOES_NOT_FIT
        self._instances[module].settled = {}  # another thread may be reading the other one

    def _serve_eager(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.served["eager"] += 1
        return call_region(module, args, kwargs)

    def _serve_new(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call of a case that this thread has claimed: by code of an earlier boot, else as the policy says."""
        compiler = self._compiler
        artifacts, found = compiler.artifacts, compiler.find(case.spec, module, args, kwargs)
        if not isinstance(found, str):
            return self._serve_found(case, found, module, args, kwargs)
        policy = compiler.policy()
        if policy == "block":
            answer = self._compare(case, module, args, kwargs, self._made)
            if found and self.report.settled == "cached":
                self.report.explain(f"not precompiled: {found}")
            return answer
        record = None
        if artifacts is not None and compiler.is_warming_up:
            record = artifacts.cached(case.spec, module, args, kwargs)
        if record is not None and compiler.may_trace(record.seconds):
            log.info("compile.trace region=%s call=%s seconds=%.1f", self.report.name, case.spec, record.seconds)
            return self._compare(case, module, args, kwargs, functools.partial(self._traced, record))
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

    def _serve_found(self, case: Case, code: Precompiled, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call by code of an earlier boot. If that boot compared it on all instances, it serves at once after
        READY, and in the warm-up once it was compared again on one."""
        compiler = self._compiler
        case.arrive(code, is_proved=compiler.is_proved(code.path))
        if case.is_proved and not compiler.is_warming_up:
            self._pass(case, module)
        count_precompiled("loaded")
        self.report.loaded += 1
        return self._serve_by_code(case, code, module, args, kwargs)

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
                self._note_growing(case)
            elif make is not None:
                self._make(case, make, comparison.pristine)
            code = case.code
            # Of code that was just made, only the copy was asked.
            if (
                code is None
                or (make and code.misfit(module, args, kwargs))
                or self._judge(case, code, module, comparison)
            ):
                case.tries -= 1
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
        case.tries += 1  # until it ends
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
        except Exception:  # the model's own
            case.tries -= 1
            raise

    def _judge(self, case: Case, code: Code, module: nn.Module, comparison: Comparison) -> bool:
        """Compare the code with eager's answer. False if full memory puts it off. Any other error counts as a
        difference; an error of graphs, as one of this instance alone."""
        try:
            with self._compiler.moment.alone() if comparison.drew else contextlib.nullcontext(True) as is_alone:
                if not is_alone:
                    raise ArtifactError("other predictions would see the generators of random numbers set back")
                check = comparison.check(code.try_out)
        except (MemoryError, torch.OutOfMemoryError, ArtifactError) as error:
            self._put_off(case, error)
            return False
        except NoGraph:
            self._miss(case, module)
        except NotHandedOver as error:  # it says what the call changes
            self._give_up(case, str(error))
        except Exception as error:
            log.info("region.failed region=%s error=%r", self.report.name, error, exc_info=error)
            if code.path:
                self._drop(case, Failure(error).reason)
            else:  # the graphs of the other instances are right
                self.report.explain(f"eager for an instance: {Failure(error).reason}")
                self._miss(case, module)
        else:
            self.report.note_error(check.error, check.tolerance)
            if check.passed:
                self._pass(case, module)
            else:
                self._drop(case, check.difference)
        return True

    def _pass(self, case: Case, module: nn.Module) -> None:
        """Note that the code may serve this instance. It is taken at the next moment; proved code is taken at once."""
        with LOCK:
            case.standings[module] = Standing.SERVES
        if case.is_proved:
            self._take(case)
        else:
            self._mark_compared(case)
            self._compiler.moment.note(case, functools.partial(self._take, case))

    def _mark_compared(self, case: Case) -> None:
        """If the code has passed on all instances, note it for later boots, before the code is published."""
        code, artifacts = case.code, self._compiler.artifacts
        if case.has_passed and code is not None and code.path and artifacts is not None:
            attempt(artifacts.mark_compared, code.path)

    def _put_off(self, case: Case, error: Exception) -> None:
        reason, moment = f"not compared with eager: {Failure(error).reason}", self._compiler.moment
        if case.put_off(moment.begun):
            # Predictors that replay recorded calls make no other call until there is something new.
            moment.note((case, "again"), lambda: moment.begun < case.not_before)
        else:
            self._give_up(case, reason)
        log.info("region.not_compared region=%s call=%s reason=%s", self.report.name, case.spec, reason)

    def _take(self, case: Case) -> bool:
        """Let code that has passed serve; True if it is too early. Called between two predictions, and for proved code
        at once."""
        if not case.has_passed:
            return case.state is State.ARRIVED
        self._mark_compared(case)
        if case.code is not None and case.code.step != "precompiled":
            case.move(State.CACHED)
        elif case.move(State.PRECOMPILED):
            self.report.take_step("precompiled")
        return False

    def _order(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call eager, and order its code from the second process."""
        claimed, case = case, case if self._compiler.is_warming_up else self.kinds.opened(case)
        with _claimed(case) if case is not claimed else contextlib.nullcontext():
            sizes, order = reachable_sizes(module, args, kwargs), attempt(self._pack, case, module, args, kwargs)
            answer = self._serve_eager(module, args, kwargs)
            if _grows(sizes, module, args, kwargs):
                self._note_growing(case)
            else:
                self._submit(case, order)
        return answer

    def _pack(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
        """What orders a call, which is in bytes then. Raises NotHandedOver if it cannot be ordered."""
        orders = self._compiler.orders()
        if orders is None or orders.jobs.waiting >= RECOMPILE_LIMIT:
            raise NotHandedOver("too many calls wait" if orders is not None else self._compiler.why_no_orders)
        call, name = orders.pack(module, args, kwargs, self.shares_weights), f"{self.report.name} {case.spec}"
        receive = functools.partial(self._receive, case)
        return functools.partial(orders.order, name, call, case.dynamic, receive, self._rank)

    def _submit(self, case: Case, order: Callable[[], None] | Failure) -> None:
        """Order the code of a claimed case, whose call was served eager."""
        failed = order if isinstance(order, Failure) else attempt(order)
        if failed is not None:
            self._give_up(case, f"cannot be compiled in a second process: {failed.reason}")
        case.move(State.ORDERED)  # unless the answer was faster
        self.report.wait_for(self.kinds.waiting)

    def _receive(self, case: Case, making: Making, function: Precompiled | None) -> None:
        """Take the second process's answer. Another thread calls this."""
        if function is None:
            self._give_up(case, making.reason)
            if case.dynamic:  # calls of its sizes are looked at again, each for code of its own
                self._compiler.moment.note(case, lambda: None)
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
        with generators_at(is_alone=self._compiler.moment.stays_alone()):
            code = attempt(make, shadow)
        if not isinstance(code, Failure):
            self._arrive(case, code)
        elif isinstance(code.error, GraphNotStored):
            self._submit(case, attempt(self._pack, case, shadow.module, shadow.args, shadow.kwargs))
        else:
            self.withheld |= self._compiler.new_files()
            self._give_up(case, self._failure(code, time.perf_counter() - started))

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

    def _traced(self, record: CachedRecord, shadow: Shadow) -> Code:
        """The graphs of a call, out of stored files.

        Raises:
            GraphNotStored: one is missing. Then the record does not hold in this boot.
        """
        from compile_cache.inductor.make import out_of_stored_files, trace

        before, started = read_counts(), time.perf_counter()
        self._compiler.note_traced(record.seconds)
        try:
            with out_of_stored_files():
                traced = trace(self._graphs, shadow.copied)
        except GraphNotStored as error:
            self._compiler.reject(record.path, str(error))
            raise
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
        code, is_new = case.code, self._give_up(case, reason)
        if code is None or not is_new:  # another thread was first
            return
        if code.path:
            log.warning("precompiled.rejected artifact=%s reason=%s", code.path, reason)
            self.withheld.add(code.path)
            self._compiler.reject(code.path, reason)
            self.report.note_not_precompiled(reason)
        else:
            self.withheld |= self._files
            for other in self.kinds:  # torch may serve their calls by the same graph
                if other.code is not None and not other.code.path:
                    self._drop(other, reason)
        self._compiler.moment.note(case, lambda: None)  # tells predictors with recorded calls

    def _note_growing(self, case: Case) -> None:
        """Give up calls that make a cache larger, and those like them."""
        self.kinds.note_growing(case)
        self._give_up(case, GROWS)

    def _give_up(self, case: Case, reason: str) -> bool:
        """Serve a case's calls eager from now on. False if they are already."""
        is_new = case.move(State.EAGER, reason)
        if is_new:
            self.report.explain(reason, case.spec)
            self.report.take_step("eager")
            self.report.wait_for(self.kinds.waiting)
        return is_new

    def give_up_orders(self, reason: str) -> None:
        """Serve calls eager whose code nobody will bring."""
        for case in self.kinds:
            if case.state in (State.CLAIMED, State.ORDERED):
                self._give_up(case, reason)

    def end_warm_up(self, has_other_graphs: bool) -> None:
        """After a round of the warm-up, report a region that nothing called. `has_other_graphs`: torch compiled or
        found graphs that are no region's."""
        if self.served or not self._unused:
            self.report.reason = self.report.reason.replace(self._unused, "").strip("; ")
        if not (self.served or self._unused):
            self._unused = _INSIDE if has_other_graphs else _UNUSED
            self.report.explain(self._unused)
            log.warning("nothing of %s is compiled: %s", self.report.name, self._unused)


def _likeness(args: Any, kwargs: Any) -> Any:
    """What calls that are settled alike have in common; None if that cannot be told."""
    try:
        return likeness(args), tuple(kwargs), likeness(kwargs.values()), modes()
    except Exception:  # of a tensor that is none of torch's own
        return None


def _grows(sizes: list[torch.Size], module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call that could reach tensors of these `sizes` has changed one, as a cache that grows."""
    now = reachable_sizes(module, args, kwargs)
    return len(now) == len(sizes) and now != sizes


def _fits(code: Code, module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether code compiled ahead of time fits a call of a module that it was compared on."""
    try:
        return code.fits(module, args, kwargs)
    except Exception as error:  # a guard reads any object of the model's
        log.info("precompiled.not_checked artifact=%s error=%r", code.path, error)
        return False


@contextlib.contextmanager
def _claimed(case: Case) -> Iterator[None]:
    """Make a claimed case NEW again, if nothing was found, made or ordered in the context."""
    try:
        yield
    finally:
        case.move(State.NEW)
