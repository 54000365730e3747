"""A module class and its instances: routes each call to the code that serves it.

A call that known code fits is served by it at once. Any other call gets its case, whose state says what happens: see
`State`. New code serves once it was compared with eager on each instance, and from the next prediction on.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.background.order import Making
from compile_cache.errors import NotHandedOver, UnseenCallError, first_line
from compile_cache.inductor.border import Failure, attempt
from compile_cache.inductor.counters import count_precompiled, read_counts
from compile_cache.inductor.spec import why_eager, with_plain_strides
from compile_cache.inductor.traced import call_region
from compile_cache.serving.comparison import Comparison
from compile_cache.serving.kinds import Case, Code, Kinds, State
from compile_cache.serving.moment import Moment
from compile_cache.serving.report import RegionReport
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.inductor.artifacts import CachedRecord
    from compile_cache.inductor.precompiled import Precompiled
    from compile_cache.serving.making import Maker
    from compile_cache.serving.orders import Orders
    from compile_cache.serving.stored import Stored

log = logging.getLogger("compile_cache")


class Region:
    """A module class and its instances.

    `report` says how calls are served, and why. `served` counts calls by step. `waited_s` is the time that requests
    waited for the compiler, in seconds. `watched` is set during the warm-up. After `deadline_s`, a time of
    `time.monotonic`, this process compiles nothing more.

    `cold` and `unseen` are the policies for a new call: `cold` in the warm-up (`background` or `block`), `unseen` after
    READY (also `eager` or `error`).
    """

    def __init__(
        self,
        report: RegionReport,
        stored: Stored,
        maker: Callable[[Region], Maker],
        orders: Callable[[], Orders | None],
        moment: Moment,
        may_trace: Callable[[float], bool],
        cold: str,
        unseen: str,
    ) -> None:
        self.report = report
        self.kinds = Kinds()
        self.watched = False
        self.shares_weights = False
        self.deadline_s = math.inf
        self.served: Counter[str] = Counter()
        self.waited_s = 0.0
        # The files of code that failed.
        self.withheld: set[str] = set()
        self.stored, self._orders, self._moment = stored, orders, moment
        self._new_maker, self._may_trace = maker, may_trace
        self._maker: Maker | None = None
        self._cold, self._unseen = cold, unseen
        # For each instance, the cases whose code serves it, the latest first.
        self._serving: dict[nn.Module, tuple[Case, ...]] = {}
        self._unused = ""

    @property
    def proved(self) -> set[str]:
        """The paths of the functions that were compared on every instance that called them."""
        return {case.code.path for case in self.kinds if case.code and case.passed and case.has_passed}

    def adopt(self, module: nn.Module) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`."""
        self._serving.setdefault(module, ())
        self.report.instances = len(self._serving)
        module._compiled_call_impl = functools.partial(self._call, module)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_plain_strides(args, kwargs)
        for case in self._serving[module]:
            code = case.code
            try:
                is_fit = code is not None and code.step == "precompiled" and code.fits(module, args, kwargs)
            except Exception as error:
                log.info("precompiled.not_compared artifact=%s error=%r", code and code.path, error)
                continue
            if is_fit:
                return self._serve(case, module, args, kwargs)
        return self._route(module, args, kwargs)

    def _route(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call that no serving function fits, as the state of its case says."""
        if reason := why_eager(module):
            self.report.demote(reason)
            return self._serve_eager(module, args, kwargs)
        self._moment.pass_by()
        case, gone = self.kinds.case(module, args, kwargs)
        for other in gone:
            self._stop(other)
        if case is None:
            return self._serve_eager(module, args, kwargs)
        if case.state is State.NEW:
            return self._serve_new(case, module, args, kwargs)
        if case.state in (State.PRECOMPILED, State.CACHED, State.ARRIVED):
            return self._serve_by_code(case, module, args, kwargs)
        if case.state is State.EAGER:
            self.report.take_step("eager")
            self.report.explain(case.reason)
        return self._serve_eager(module, args, kwargs)

    def _serve_by_code(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call whose code is known: by it, if it was compared on this instance and is taken; else eager."""
        code = case.code
        assert code is not None
        if misfit := code.misfit(module, args, kwargs):
            if module is case.ordered_by and not case.passed:
                self._give_up(case, f"code of the second process does not fit in this process: {misfit}")
                return self._serve_eager(module, args, kwargs)
            self.kinds.leave(case, module)
            return self._route(module, args, kwargs)
        if case.is_to_compare(module):
            return self._compare(case, module, args, kwargs)
        if case.state is State.ARRIVED:
            return self._serve_eager(module, args, kwargs)
        if case not in self._serving[module]:
            if not case.is_proved:  # it passed in this prediction
                return self._serve_eager(module, args, kwargs)
            self._serving[module] = (case, *self._serving[module])
        return self._serve(case, module, args, kwargs)

    def _serve(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        code = case.code
        if code is None:  # dropped by another thread
            return self._serve_eager(module, args, kwargs)
        self.kinds.note_use(case)
        self.served[code.step] += 1
        try:
            return code(module, args, kwargs)
        except AssertionError as error:  # generated code asserts the strides it was compiled for
            self._drop(case, f"AssertionError: {first_line(error)}")
            raise

    def _serve_eager(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.served["eager"] += 1
        return call_region(module, args, kwargs)

    def _serve_new(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call of a new case: by code of an earlier boot, else as the policy says."""
        found = self.stored.look(module, args, kwargs)
        if not isinstance(found, str):
            case.is_proved = self.stored.is_proved(found)
            self._arrive(case, found)
            if case.is_proved and not self.watched:
                case.passed.add(module)
                self._take(case)
            count_precompiled("loaded")
            self.report.loaded += 1
            return self._route(module, args, kwargs)
        policy = self._policy()
        record = self.stored.cached(module, args, kwargs) if self.watched and policy != "block" else None
        if record is not None and self._may_trace(record.seconds):
            log.info("compile.trace region=%s call=%s seconds=%.1f", self.report.name, case.spec, record.seconds)
            return self._make(case, module, args, kwargs, record)
        if policy == "block":
            answer = self._make(case, module, args, kwargs)
            if found and self.report.settled == "cached":
                self.report.explain(f"not precompiled: {found}")
            return answer
        if record is not None:
            self._give_up(case, f"{record.reason}; its graphs take {record.seconds:.0f} s to trace in the setup")
            return self._serve_eager(module, args, kwargs)
        if policy == "background":
            return self._order(case, module, args, kwargs)
        if policy == "error":
            raise UnseenCallError(
                f"{self.report.name} was called with {case.spec}, for which nothing is compiled. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN to background or eager."
            )
        self._give_up(case, "nothing is compiled for it, and COMPILE_CACHE_UNSEEN=eager")
        return self._serve_eager(module, args, kwargs)

    def _policy(self) -> str:
        if not self.watched:
            return self._unseen
        return "background" if time.monotonic() > self.deadline_s else self._cold

    def _compare(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call eager, and run the new code on its shadow. Whatever keeps the comparison from its end proves
        nothing: another call makes it again."""
        if self._moment.begun < case.not_before or _is_capturing():
            return self._serve_eager(module, args, kwargs)
        started = time.perf_counter()
        comparison = self._comparison(case, module, args, kwargs)
        if comparison is None:
            return self._serve_eager(module, args, kwargs)
        self.served["eager"] += 1
        answer = comparison.eager()
        if not (comparison.drew and self._moment.open > 1):
            self._judge(case, module, comparison)
        self.report.compile_s += time.perf_counter() - started
        note("regions", f"{self.report.name}: compare", started)
        return answer

    def _comparison(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Comparison | None:
        try:
            return Comparison(module, args, kwargs)
        except NotHandedOver as error:
            self._give_up(case, f"it cannot be compared with eager: {error}")
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._put_off(case, error)
        return None

    def _judge(self, case: Case, module: nn.Module, comparison: Comparison) -> None:
        """Compare the code with eager's answer. Once it has passed on all instances, it serves from the next prediction
        on."""
        code = case.code
        if code is None:
            return
        try:
            check, peak_bytes = comparison.check(code)
        except (MemoryError, torch.OutOfMemoryError) as error:
            self._put_off(case, error)
            return
        except Exception as error:
            log.info("region.failed region=%s error=%r", self.report.name, error, exc_info=error)
            self._drop(case, f"{type(error).__name__}: {first_line(error)}")
            return
        self.report.note_error(check.error, check.tolerance)
        if not check.passed:
            self._drop(case, check.difference)
            return
        self.report.note_peaks(peak_bytes, comparison.eager_peak_bytes)
        case.passed.add(module)
        if case.has_passed:
            self.stored.prove(code.path)
            self._moment.note(functools.partial(self._take, case))

    def _put_off(self, case: Case, error: BaseException) -> None:
        reason = f"not compared with eager: {type(error).__name__}: {first_line(error)}"
        if not case.put_off(self._moment.begun):
            self._give_up(case, reason)
        log.info("region.not_compared region=%s call=%s reason=%s", self.report.name, case.spec, reason)

    def _take(self, case: Case) -> None:
        """Let code that has passed serve. Called between two predictions."""
        code = case.code
        if code is None or case.state is State.EAGER or not case.has_passed:
            return
        case.state = State.PRECOMPILED if code.step == "precompiled" else State.CACHED
        if code.step == "precompiled":
            self.report.take_step("precompiled")
        for module in case.passed:
            self._serving[module] = (case, *(other for other in self._serving[module] if other is not case))

    def _order(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call eager, and order its code from the second process."""
        orders = self._orders()
        if orders is None or orders.is_full:
            self._give_up(case, "nothing may be compiled ahead of time" if orders is None else "too many calls wait")
            return self._serve_eager(module, args, kwargs)
        case = case if self.watched else self.kinds.opened(case, module, args, kwargs)
        case.state, case.ordered_by = State.ORDERED, module
        call = attempt(orders.pack, module, args, kwargs, self.shares_weights)
        if isinstance(call, Failure):
            self._give_up(case, f"cannot be compiled in a second process: {call.reason}")
            return self._serve_eager(module, args, kwargs)
        try:
            answer = self._serve_eager(module, args, kwargs)
        except BaseException:  # a cancelled request raises one
            case.state = State.NEW
            raise
        receive = functools.partial(self._receive, case)
        ordered = attempt(orders.order, f"{self.report.name} {case.spec}", call, case.dynamic, receive)
        if isinstance(ordered, Failure):
            self._give_up(case, f"cannot be compiled in a second process: {ordered.reason}")
        self.report.wait_for(self.kinds.waiting)
        return answer

    def _receive(self, case: Case, making: Making, function: Precompiled | None) -> None:
        """Take the second process's answer. Another thread calls this."""
        if function is None:
            self._give_up(case, making.reason)
        else:
            count_precompiled("made")
            self.report.made += 1
            self.report.precompile_s += making.seconds
            if making.speed is not None:
                self.report.note_speed(making.speed.compiled_ms, making.speed.eager_ms)
            self._moment.note(functools.partial(self._arrive, case, function))
        self.report.wait_for(self.kinds.waiting)

    def _arrive(self, case: Case, code: Code) -> None:
        case.code = code
        case.state = State.ARRIVED
        self.report.wait_for(self.kinds.waiting)

    def _make(self, case: Case, module: nn.Module, args: Any, kwargs: Any, record: CachedRecord | None = None) -> Any:
        """Serve a call eager, and make its code in this process, out of stored files if there is a record of them."""
        comparison = self._comparison(case, module, args, kwargs)
        if comparison is None:
            return self._serve_eager(module, args, kwargs)
        self.served["eager"] += 1
        answer = comparison.eager()
        before, started = read_counts(), time.perf_counter()
        if self._maker is None:
            self._maker = self._new_maker(self)
        with comparison.undisturbed():
            made = (self._maker.look_up if record else self._maker.make)(comparison.pristine)
        if isinstance(made, str):
            self.withheld |= self._maker.withheld
            self._give_up(case, made)
        else:
            self._arrive(case, made)
            self._judge(case, module, comparison)
        self._moment.pass_by()
        if not self.watched and read_counts().graphs > before.graphs:
            self.waited_s += time.perf_counter() - started
            log.warning(
                "compile.on_request region=%s seconds=%.1f A request waited for the compiler. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN=background.",
                self.report.name,
                time.perf_counter() - started,
            )
        return answer

    def _drop(self, case: Case, reason: str) -> None:
        """Stop using code that failed, and make no other in its place. It is not published."""
        code, case.code = case.code, None
        if code is not None and code.path:
            log.warning("precompiled.rejected artifact=%s reason=%s", code.path, reason)
            self.withheld.add(code.path)
            self.stored.reject(code.path, reason)
            self.report.note_not_precompiled(reason)
        elif self._maker is not None:
            self.withheld |= self._maker.files
        self._stop(case)
        self._give_up(case, reason)

    def _give_up(self, case: Case, reason: str) -> None:
        """Serve a case's calls eager from now on."""
        case.state, case.reason = State.EAGER, reason
        self.report.explain(f"eager for {case.spec}: {reason}")
        self.report.take_step("eager")

    def _stop(self, case: Case) -> None:
        """Serve no call by this case."""
        for module, cases in self._serving.items():
            self._serving[module] = tuple(other for other in cases if other is not case)

    def conclude(self) -> None:
        """After the warm-up, report a region that nothing called."""
        if self._unused:
            self.report.reason = self.report.reason.replace(self._unused, "").strip("; ")
            self._unused = ""
        if not self.served:
            self._unused = _unused(next(iter(self._serving)))
            self.report.explain(self._unused)
            log.warning("nothing of %s is compiled: %s", self.report.name, self._unused)


def _is_capturing() -> bool:
    """Whether this thread's calls are being recorded as a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _unused(module: nn.Module) -> str:
    """The likely reason why nothing called a module, and the remedy."""
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
        f"nothing called it in the warm-up. A direct call of a method{called} is not compiled. "
        f"Compile the modules that it calls, for example boot.compile(model.{part})"
    )
