"""Where the code of a region's kinds comes from: an earlier boot, this process, or the second process.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextvars
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.calls.shadow import Shadow
from compile_cache.calls.spec import RECOMPILE_LIMIT, Call
from compile_cache.errors import (
    CompileCacheError,
    Failure,
    GraphNotStored,
    NotHandedOver,
    UnseenCallError,
    attempt,
    log,
)
from compile_cache.inductor.counters import count_precompiled
from compile_cache.inductor.function_file import UNPROVED_S, Mark, has_artifacts
from compile_cache.serving.comparison import generators_at
from compile_cache.serving.policy import Policy
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.states import WITH_CODE, Case, Code, Kinds, State

if TYPE_CHECKING:
    from compile_cache.inductor.make import Answer, Graphs, Traced
    from compile_cache.inductor.stored_functions import CachedRecord

# A comparison that did not end is tried again after so many moments, and then after so many more.
_TRIES_AFTER = (1, 10, 100)
# Makes code for a call in this process, from a copy of the call.
Maker = Callable[[Shadow], Code]


class Source:
    """Where the code of one region's kinds comes from, when it serves, and when its files may be published.

    The second process makes code for the warm-up's calls first, in the order of their regions. It maps the same
    parameters if the region `shares_weights`: if all its modules may.
    """

    def __init__(self, report: RegionReport, owner: str, policy: Policy) -> None:
        self.report = report
        # The class, as the owner of files: see `Publishable`. The report has its name for people.
        self.owner = owner
        self.policy = policy
        self.kinds = Kinds()
        policy.kinds.append(self.kinds)
        self.shares_weights = True
        # Whether all its modules are needed after READY alone.
        self.is_late = True
        # The owners of the files of graphs: the class, and records.
        self._owners = {owner}

    def maker(self, case: Case, call: Call) -> Maker | None:
        """What makes the code of a claimed case in this process, as the policy says; None if nothing does. Then the
        case's state says what is next: it has code, is EAGER or LATE, or is still CLAIMED, and is to be ordered.

        Raises:
            UnseenCallError: the policy is `error`.
        """
        policy = self.policy
        if self.is_late and policy.makes_late(case, call, self.owner):
            self.report.take_step("late")
            return None
        found = policy.find(case.spec, call, self.owner)
        if not isinstance(found, str):
            case.arrive(found)
            count_precompiled("loaded")
            self.report.loaded += 1
            return None
        what = policy.for_new_kinds(self.is_late)
        if what == "block":
            return functools.partial(self._made, found)
        if record := policy.record_to_trace(case.spec, call, self.owner):
            if record.seconds <= policy.tracing_s:
                log.info("compile.trace region=%s call=%s seconds=%.1f", self.report.name, case.spec, record.seconds)
                return functools.partial(self._traced, record)
            self.give_up(case, f"{record.reason}; its graphs take {record.seconds:.0f} s to trace in the setup")
        elif what == "error":
            raise UnseenCallError(
                f"{self.report.name} was called with {case.spec}, for which nothing is compiled. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN to background or eager."
            )
        elif what == "eager":
            self.give_up(case, "nothing is compiled for it, and COMPILE_CACHE_UNSEEN=eager")
        elif not policy.is_warming_up:
            self.kinds.leave_sizes_open(case, call[0])
        return None

    def make(self, case: Case, maker: Maker, shadow: Shadow) -> None:
        """Make a claimed case's code in this process."""
        started = time.perf_counter()
        publishable = self.policy.directory.publishable
        others = publishable.appeared()
        with generators_at(is_alone=self.policy.moment.stays_alone()):
            code = attempt(maker, shadow)
        if not isinstance(code, Failure):
            self._arrive(case, code)
        elif isinstance(code.error, GraphNotStored):
            self.order(case, attempt(self.pack, case, shadow.call))
        else:
            publishable.withheld |= publishable.appeared() - others
            self.give_up(case, self._failure(code, time.perf_counter() - started))

    def _made(self, why_not_found: str, shadow: Shadow) -> Code:
        """Code for a call, from the one maker. Imports torch's compiler."""
        from compile_cache.inductor.make import make

        log.info("compile.begin region=%s", self.report.name)
        started, directory = time.perf_counter(), self.policy.directory
        others = directory.publishable.appeared()  # of no call, or still being written
        graphs = self._graphs  # with this, the compiler is imported, and there are artifacts
        made = make(self.policy.functions, graphs, shadow.copied)
        assert made.traced is not None  # in this process
        files = directory.finished(directory.publishable.appeared() - others)
        self._hand_over(files, made.path, made.traced.counts.hits > 0)
        if made.function is None and made.path:
            self._owners.add(made.path)
        if self.report.note_traced(made.traced, started) and why_not_found:
            self.report.explain(f"not precompiled: {why_not_found}")
        self.report.precompile_s += time.perf_counter() - started - made.traced.seconds
        if made.function is not None:
            self.report.note_made(made)
        elif made.reason:
            self.report.note_not_precompiled(made.reason)
        return made.function or self._graph(made.traced)

    def _traced(self, record: CachedRecord, shadow: Shadow) -> Code:
        """The graphs of a call, out of stored files.

        Raises:
            GraphNotStored: one is missing. Then the record does not hold in this boot.
        """
        from compile_cache.inductor.make import out_of_stored_files, trace

        started = time.perf_counter()
        self.policy.tracing_s -= record.seconds
        try:
            with out_of_stored_files():
                traced = trace(self._graphs, shadow.copied)
        except GraphNotStored as error:
            self.policy.reject(record.path, str(error))
            raise
        self.report.note_traced(traced, started)
        return self._graph(traced)

    @functools.cached_property
    def _graphs(self) -> Graphs:
        self.policy.open()
        from compile_cache.inductor.make import Graphs

        return Graphs(self.report.name, self.policy.settings.mode, self.policy.settings.dynamic)

    def _graph(self, traced: Traced) -> Code:
        from compile_cache.inductor.make import Graph

        return Graph(self._graphs, not traced.broken_by, self.policy.for_graphs)

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

    def pack(self, case: Case, call: Call) -> Callable[[], None]:
        """What orders a call, which is in bytes then. Raises NotHandedOver if it cannot be ordered."""
        orders = self.policy.orders()
        if isinstance(orders, str):
            raise NotHandedOver(orders)
        name = f"{self.report.name} {case.spec}"
        rank = (not self.policy.is_warming_up, self.policy.kinds.index(self.kinds))
        order = orders.pack(name, call, case.spec.open, rank, self.shares_weights)
        # torch 2.13 keeps settings in context variables. A function is loaded with the settings of this call.
        context = contextvars.copy_context()
        order.answer.add_done_callback(lambda answer: context.run(self._receive, case, name, answer))
        return functools.partial(orders.submit, order)

    def order(self, case: Case, order: Callable[[], None] | Failure) -> None:
        """Order the code of a claimed case, whose call was served eager."""
        failed = order if isinstance(order, Failure) else attempt(order)
        if failed is not None:
            self.give_up(case, f"cannot be compiled in a second process: {failed.reason}")
        case.move(State.ORDERED)  # unless the answer was faster
        self.report.wait_for(self.kinds)

    def _receive(self, case: Case, name: str, order: Future[Answer]) -> None:
        """Take the second process's answer. Another thread calls this."""
        if order.cancelled():
            return
        answer = self.policy.take(name, order.result())
        # No code of this boot is compared with graphs of the second process.
        wait_s = UNPROVED_S if answer.function is not None else 0.0
        self._hand_over(answer.files, answer.path, answer.has_found, wait_s)
        if answer.function is None:
            self.give_up(case, answer.reason)
            if case.spec.open:  # calls of its sizes are looked at again, each for code of its own
                self.policy.moment.note(case, lambda: None)
        else:
            self.report.precompile_s += answer.seconds
            self.report.note_made(answer)
            self.policy.moment.note(case, functools.partial(self._arrive, case, answer.function))

    def _hand_over(self, files: Iterable[str], record: str, has_found: bool, wait_s: float = UNPROVED_S) -> None:
        """Let what was made of a call be published, once its code was compared. `record` is empty if there is none. A
        record that was written and then did not fit its own call is not published. If it `has_found` graphs, those of
        another version are this one's too."""
        publishable = self.policy.directory.publishable
        others = {path for path in files if not has_artifacts([path])}
        publishable.hand_over([record] if record else [], record, wait_s)
        publishable.hand_over(others, self.owner, wait_s)
        if record and has_found:
            publishable.use(self.owner)

    def take(self, case: Case) -> None:
        """Let code serve the instances on which it has passed. Called between two predictions, and for proved code at
        once."""
        case.serve()
        if case.move(State.TAKEN) and case.path:
            self.report.take_step("precompiled")
        if case.state is State.TAKEN:
            for owner in (case.path, self.owner) if case.path else tuple(self._owners):  # one may be added
                self.policy.directory.publishable.release(owner)

    def mark(self, case: Case, places: Mapping[Any, str]) -> None:
        """Note for later boots on which instances, by their places, a function was compared: in all calls of theirs
        that it serves."""
        is_function = case.path and case.state in WITH_CODE  # which has not failed meanwhile
        alike = [other for other in self.kinds if other.path == case.path] if is_function else []
        passed = {places[module] for other in alike for module in other.instances(True)}
        passed -= {places[module] for other in alike for module in other.instances(False)}
        if passed and case.code is not None and not passed <= case.code.compared_on:
            self.policy.mark(case.path, Mark(frozenset(passed), self.is_late))

    def _arrive(self, case: Case, code: Code) -> None:
        case.arrive(code)
        self.report.wait_for(self.kinds)

    def put_off(self, case: Case, module: nn.Module, error: BaseException) -> None:
        """Conclude nothing from a comparison that did not end. A later call repeats it, or the instance is left out."""
        reason = f"not compared with eager: {Failure(error).reason}"
        if case.path:  # the files of graphs have other owners
            self.policy.directory.publishable.doubt(case.path)
        if case.unended == len(_TRIES_AFTER):
            self.leave_out(case, module, reason)
            case.unended = 0
        else:  # predictors that replay recorded calls make no other call until there is something new
            early = iter(range(1, _TRIES_AFTER[case.unended]))
            case.unended += 1
            self.policy.moment.note((case, "again"), lambda: case.state is not State.EAGER and bool(next(early, 0)))
        self.report.explain(reason, case.spec)
        self.report.wait_for(self.kinds)
        log.info("region.not_compared region=%s call=%s reason=%s", self.report.name, case.spec, reason)

    def leave_out(self, case: Case, module: nn.Module, reason: str) -> None:
        """Compare the code no more on this instance; give it up if it serves no other."""
        if case.serves_any:
            self.report.explain(f"eager for an instance: {reason}")
            case.miss(module)
        else:
            self.give_up(case, reason)

    def give_up(self, case: Case, reason: str, state: State = State.EAGER) -> bool:
        """Serve a case's calls eager from now on. False if they are already."""
        is_new = case.move(state)
        if is_new:
            self.report.note_eager(reason, case.spec)
            self.report.wait_for(self.kinds)
        return is_new

    def drop(self, case: Case, reason: str) -> None:
        """Stop using code that failed. It is not published, and no other is made in its place."""
        code, is_new = case.code, self.give_up(case, reason)
        if code is None or not is_new:  # another thread was first
            return
        if code.path:
            log.warning("precompiled.rejected artifact=%s reason=%s", code.path, reason)
            self.policy.reject(code.path, reason)
            self.report.note_not_precompiled(reason)
        else:
            for owner in tuple(self._owners):
                self.policy.directory.publishable.withdraw(owner)
        for other in self.kinds:  # the same function serves their calls, or torch may serve them by the same graph
            if other.code is not None and other.code.path == code.path:
                self.give_up(other, reason)
        self.policy.moment.note(case, lambda: None)  # tells predictors with recorded calls

    def give_up_orders(self, reason: str) -> None:
        """Serve calls eager whose code nobody will bring."""
        for case in self.kinds:
            if case.state in (State.CLAIMED, State.ORDERED):
                self.give_up(case, reason)
