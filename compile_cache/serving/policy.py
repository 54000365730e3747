"""What a boot does with calls of new kinds: finds stored code, makes code, traces stored graphs, or orders code.

`Policy` has what all regions share. `Source` is where one region's code comes from.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler before code is
found, made or ordered.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.calls.shadow import Shadow
from compile_cache.calls.spec import RECOMPILE_LIMIT
from compile_cache.errors import (
    ArtifactError,
    CompileCacheError,
    Failure,
    GraphNotStored,
    NotHandedOver,
    UnseenCallError,
    attempt,
)
from compile_cache.inductor.counters import count_precompiled, read_counts
from compile_cache.inductor.function_file import has_artifacts
from compile_cache.serving.comparison import generators_at
from compile_cache.serving.kinds import Case, Kinds, State
from compile_cache.serving.moment import Moment
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.timeline import noted

if TYPE_CHECKING:
    from compile_cache.background.orders import Orders
    from compile_cache.calls.spec import CallSpec
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Answer, Graphs, Traced
    from compile_cache.inductor.stored_functions import Artifacts, CachedRecord
    from compile_cache.serving.kinds import Code

log = logging.getLogger("compile_cache")

# The most that a setup takes to trace graphs out of stored files, the import of the compiler included.
_TRACING_S = 15.0
_COMPILER_S = 3.0
# Loading an artifact holds Python's lock for about 0.1 s, which a prediction would wait for. So it waits for a moment
# in which no region is called, between two predictions or while the GPU works, but not for long.
_GAP_S = 0.1
_LONGEST_WAIT_S = 2.0
GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"


class Policy:
    """What the regions of a boot share. `moment` says when new code is taken.

    `artifacts` is None until torch's compiler is imported, and if nothing may be compiled ahead of time. The compiler
    is imported at once; if a second process compiles and nothing was restored, when the first artifact arrives.
    `compiles_until_s`: in a warm-up, this process may compile until that time of `time.monotonic`; None outside it.
    `why_no_orders` says why nothing can be ordered from the second process; empty if it can.
    """

    def __init__(
        self, settings: Settings, directory: CacheDirectory, is_hit: bool, calls: Callable[[], int] = int
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._is_hit = is_hit
        self._calls = calls
        self.moment = Moment()
        # Held while this process makes or compares code: torch compiles for one thread at a time.
        self.making = threading.Lock()
        self.artifacts: Artifacts | None = None
        self.compiles_until_s: float | None = None
        self.why_no_orders = "" if settings.precompile else "nothing may be compiled ahead of time"
        self.why_not_precompiled = ""
        self._tracing_s = _TRACING_S
        self._orders: Orders | None = None
        self._is_released = False
        self._opening = threading.Lock()
        self._is_open = False
        self._seen = set(directory.scan())
        if settings.cold_start == "block" or has_artifacts(self._seen):
            self.open()

    @property
    def is_warming_up(self) -> bool:
        """Whether calls are the warm-up's."""
        return self.compiles_until_s is not None

    def for_new_kinds(self) -> str:
        """What happens now with a call of a new kind: `background` or `block`; after READY also `eager` or `error`."""
        if self.compiles_until_s is None:
            return self._settings.unseen
        return "background" if time.monotonic() > self.compiles_until_s else self._settings.cold_start

    def open(self) -> None:
        """Import torch's compiler, once, and find artifacts from now on."""
        with self._opening:
            if self._is_open:
                return
            self._is_open = True
            from compile_cache.inductor.switches import configure_torch, is_switched_off
            from compile_cache.inductor.toolchain import remember_toolchain

            configure_torch()
            remember_toolchain(self._directory.path)
            if self._settings.precompile and not is_switched_off():
                self._open_artifacts()

    def _open_artifacts(self) -> None:
        """Open the artifacts. They need private names of torch: if one is gone, the boot goes on without artifacts."""
        try:
            from compile_cache.inductor.stored_functions import Artifacts
        except (ImportError, AttributeError) as error:
            self.why_not_precompiled = f"torch {torch.__version__} lacks a name that precompiled regions need: {error}"
            log.warning("No precompiled regions in this boot: %s", self.why_not_precompiled)
        else:
            self.artifacts = Artifacts(self._settings, self._directory.path)

    def configure(self) -> None:
        """Make torch's settings in this thread, if the compiler is imported."""
        if self._is_open:
            from compile_cache.inductor.switches import configure_torch

            configure_torch()

    def find(self, spec: CallSpec, module: nn.Module, args: Any, kwargs: Any) -> Precompiled | str:
        """The function for this call; why there is none otherwise, empty if none is wanted."""
        if self.artifacts is None:
            return ""
        self.configure()  # an artifact's name depends on these settings
        found = attempt(self.artifacts.find, spec, module, args, kwargs)
        return found.reason if isinstance(found, Failure) else found

    def is_proved(self, path: str) -> bool:
        """Whether an earlier boot of this very version has compared a function on all instances."""
        return self._is_hit and self.artifacts is not None and self.artifacts.is_compared(path)

    def mark_compared(self, path: str) -> None:
        """Note for later boots that a function was compared on all instances."""
        if path and self.artifacts is not None:
            attempt(self.artifacts.mark_compared, path)

    def reject(self, path: str, reason: str) -> None:
        """Use a record no more in this boot."""
        if self.artifacts is not None:
            self.artifacts.reject(path, reason)

    def record_to_trace(self, spec: CallSpec, module: nn.Module, args: Any, kwargs: Any) -> CachedRecord | None:
        """In a warm-up, the record of stored graphs for calls like this; None if there is none."""
        if self.artifacts is None or not self.is_warming_up:
            return None
        return self.artifacts.cached(spec, module, args, kwargs)

    def may_trace(self, seconds: float) -> bool:
        """Whether the setup can still spend `seconds` on tracing stored graphs, the import of the compiler included."""
        return seconds + _COMPILER_S * (self._tracing_s == _TRACING_S) <= self._tracing_s

    def note_traced(self, seconds: float) -> None:
        """Take seconds from what the setup may spend on tracing."""
        self._tracing_s -= seconds + _COMPILER_S * (self._tracing_s == _TRACING_S)

    def graphs(self, name: str) -> Graphs:
        """A maker of graphs for one class. Imports torch's compiler."""
        self.open()
        from compile_cache.inductor.make import Graphs

        return Graphs(name, self._settings.mode, self._settings.dynamic)

    @property
    def may_add_graphs(self) -> bool:
        """Whether a call that no graph fits may get one: here, or out of stored files."""
        return self.is_warming_up or self.for_new_kinds() == "block"

    def tracing(self) -> contextlib.AbstractContextManager[None] | None:
        """The context in which a call that is compared may get graphs now; None if it may get none."""
        from compile_cache.inductor.make import out_of_stored_files

        if not self.may_add_graphs:
            return None
        return contextlib.nullcontext() if self.for_new_kinds() == "block" else out_of_stored_files()

    def new_files(self) -> set[str]:
        """The files of the cache directory that have appeared since the last call."""
        now = set(self._directory.scan())
        new, self._seen = now - self._seen, now
        return new

    def orders(self) -> Orders | None:
        """The calls for the second process; None if there can be none, and `why_no_orders`."""
        if self._orders is None and not self.why_no_orders:
            from compile_cache.background.orders import Orders

            with self._opening:
                if self._orders is None:
                    self._orders = Orders(self._settings, self._directory)
                    if self._is_released:
                        self._orders.queue.release()
        return self._orders

    def take(self, name: str, answer: Answer) -> Answer:
        """The second process's answer for a call, with its files in the cache directory and its function loaded."""
        taken = attempt(self._taken, name, answer) if answer.files else answer
        if isinstance(taken, Failure):
            log.warning("background.not_taken call=%s error=%s", name, taken.reason)
            return replace(answer, path="", files=(), reason=f"its artifact cannot be used: {taken.reason}")
        return taken

    def _taken(self, name: str, answer: Answer) -> Answer:
        orders = self.orders()
        if orders is None:
            raise ArtifactError(self.why_no_orders)
        self._wait_for_gap()
        if not answer.is_precompiled:  # the files of graphs
            orders.take(answer)
            return answer
        with noted("second process", f"{name}: load"):
            self.open()
            orders.take(answer)
            if self.artifacts is None:
                raise ArtifactError(self.why_not_precompiled or "torch.compile is switched off, or cannot be imported")
            self.configure()  # the call may have been ordered before torch's compiler was imported
            return replace(answer, function=self.artifacts.arrive(answer.path))

    def _wait_for_gap(self) -> None:
        """Wait until no region was called for a moment, or for 2 s."""
        calls = self._calls()
        for _ in range(round(_LONGEST_WAIT_S / _GAP_S)):
            time.sleep(_GAP_S)
            before, calls = calls, self._calls()
            if calls == before:
                return

    @property
    def arrived_s(self) -> dict[str, float]:
        """When the records that the second process has made so far arrived, by path."""
        return dict(self._orders.arrived_s) if self._orders else {}

    def release(self) -> None:
        """Let the second process begin. Called at READY."""
        with self._opening:
            self._is_released = True
            if self._orders is not None:
                self._orders.queue.release()

    @property
    def waiting(self) -> int:
        """How many calls the second process has not answered yet."""
        return self._orders.queue.waiting if self._orders else 0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the second process has answered every call; False after `timeout_s`."""
        return self._orders is None or self._orders.queue.wait(timeout_s)

    def order_nothing(self, reason: str) -> None:
        """In a fork of this process: forget the second process, and what other threads hold."""
        self.why_no_orders, self._orders = reason, None
        self.making, self._opening = threading.Lock(), threading.Lock()
        self.moment.forget_threads()


class Source:
    """Where the code of one region's kinds comes from.

    `withheld` has the files of code that failed, which must not be published. The second process makes the code of
    regions in the order of their `rank`; with `shares_weights`, it maps the same parameters.
    """

    def __init__(self, report: RegionReport, kinds: Kinds, policy: Policy, rank: int) -> None:
        self._report = report
        self._kinds = kinds
        self._policy = policy
        self._rank = rank
        self.shares_weights = False
        self.withheld: set[str] = set()
        # The files that the graphs' compiles left in the cache directory.
        self._files: set[str] = set()

    def maker(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Callable[[Shadow], Code] | None:
        """What the policy says for a claimed case: the case has code afterwards, or is EAGER, or the result makes its
        code. None with a case that is still claimed: it is to be ordered.

        Raises:
            UnseenCallError: the policy is `error`.
        """
        policy, found = self._policy, self._policy.find(case.spec, module, args, kwargs)
        if not isinstance(found, str):
            case.arrive(found, is_proved=policy.is_proved(found.path))
            count_precompiled("loaded")
            self._report.loaded += 1
            return None
        what = policy.for_new_kinds()
        if what == "block":
            return functools.partial(self._made, found)
        if record := policy.record_to_trace(case.spec, module, args, kwargs):
            if policy.may_trace(record.seconds):
                log.info("compile.trace region=%s call=%s seconds=%.1f", self._report.name, case.spec, record.seconds)
                return functools.partial(self._traced, record)
            self.give_up(case, f"{record.reason}; its graphs take {record.seconds:.0f} s to trace in the setup")
        elif what == "error":
            raise UnseenCallError(
                f"{self._report.name} was called with {case.spec}, for which nothing is compiled. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN to background or eager."
            )
        elif what == "eager":
            self.give_up(case, "nothing is compiled for it, and COMPILE_CACHE_UNSEEN=eager")
        elif not policy.is_warming_up:
            self._kinds.leave_sizes_open(case)
        return None

    def make(self, case: Case, maker: Callable[[Shadow], Code], shadow: Shadow) -> None:
        """Make a claimed case's code in this process."""
        started = time.perf_counter()
        self._policy.new_files()  # those so far are not of this call
        with generators_at(is_alone=self._policy.moment.stays_alone()):
            code = attempt(maker, shadow)
        if not isinstance(code, Failure):
            self._arrive(case, code)
        elif isinstance(code.error, GraphNotStored):
            self.order(case, attempt(self.pack, case, shadow.module, shadow.args, shadow.kwargs))
        else:
            self.withheld |= self._policy.new_files()
            self.give_up(case, self._failure(code, time.perf_counter() - started))

    def _made(self, why_not_found: str, shadow: Shadow) -> Code:
        """Code for a call, from the one maker. Imports torch's compiler."""
        from compile_cache.inductor.make import make

        log.info("compile.begin region=%s", self._report.name)
        before, started = read_counts(), time.perf_counter()
        made = make(self._policy.artifacts, self._graphs, shadow.copied)
        self._files |= self._policy.new_files()
        assert made.traced is not None  # in this process
        self._report.note_traced(read_counts().since(before), made.traced, started)
        self._report.precompile_s += time.perf_counter() - started - made.traced.seconds
        if made.function is not None:
            self._report.note_made(made)
        elif made.reason:
            self._report.note_not_precompiled(made.reason)
        if why_not_found and self._report.settled == "cached":
            self._report.explain(f"not precompiled: {why_not_found}")
        return made.function or self._graph(made.traced)

    def _traced(self, record: CachedRecord, shadow: Shadow) -> Code:
        """The graphs of a call, out of stored files.

        Raises:
            GraphNotStored: one is missing. Then the record does not hold in this boot.
        """
        from compile_cache.inductor.make import out_of_stored_files, trace

        before, started = read_counts(), time.perf_counter()
        self._policy.note_traced(record.seconds)
        try:
            with out_of_stored_files():
                traced = trace(self._graphs, shadow.copied)
        except GraphNotStored as error:
            self._policy.reject(record.path, str(error))
            raise
        self._report.note_traced(read_counts().since(before), traced, started)
        return self._graph(traced)

    @functools.cached_property
    def _graphs(self) -> Graphs:
        return self._policy.graphs(self._report.name)

    def _graph(self, traced: Traced) -> Code:
        from compile_cache.inductor.make import Graph

        return Graph(self._graphs, traced.is_whole, self._policy.tracing)

    def _failure(self, failure: Failure, seconds: float) -> str:
        """Why nothing was made, after a line in the log."""
        from compile_cache.inductor.make import is_beyond_limit

        if is_beyond_limit(failure.error):
            return f"{RECOMPILE_LIMIT} shapes are compiled already; set COMPILE_CACHE_DYNAMIC=auto"
        log.warning(
            "compile.failed region=%s seconds=%.1f reason=%s The call is served eager, and each boot tries it again. "
            "To leave the class eager, name it in COMPILE_CACHE_LEAVE_EAGER.",
            self._report.name,
            seconds,
            failure.reason,
            exc_info=None if isinstance(failure.error, CompileCacheError) else failure.error,
        )
        return failure.reason

    def pack(self, case: Case, module: nn.Module, args: Any, kwargs: Any) -> Callable[[], None]:
        """What orders a call, which is in bytes then. Raises NotHandedOver if it cannot be ordered."""
        orders = self._policy.orders()
        if orders is None or orders.queue.waiting >= RECOMPILE_LIMIT:
            raise NotHandedOver("too many calls wait" if orders is not None else self._policy.why_no_orders)
        name = f"{self._report.name} {case.spec}"
        order = orders.pack(name, (module, args, kwargs), case.spec.open, self._rank, self.shares_weights)
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
        self._report.wait_for(self._kinds.waiting)

    def _receive(self, case: Case, name: str, order: Future[Answer]) -> None:
        """Take the second process's answer. Another thread calls this."""
        if order.cancelled():
            return
        answer = self._policy.take(name, order.result())
        if answer.function is None:
            self.give_up(case, answer.reason)
            if case.spec.open:  # calls of its sizes are looked at again, each for code of its own
                self._policy.moment.note(case, lambda: None)
        else:
            self._report.precompile_s += answer.seconds
            self._report.note_made(answer)
            self._policy.moment.note(case, functools.partial(self._arrive, case, answer.function))

    def _arrive(self, case: Case, code: Code) -> None:
        case.arrive(code)
        self._report.wait_for(self._kinds.waiting)

    def give_up(self, case: Case, reason: str, state: State = State.EAGER) -> bool:
        """Serve a case's calls eager from now on. False if they are already."""
        is_new = case.move(state, reason)
        if is_new:
            self._report.explain(reason, case.spec)
            self._report.take_step("eager")
            self._report.wait_for(self._kinds.waiting)
        return is_new

    def drop(self, case: Case, reason: str) -> None:
        """Stop using code that failed. It is not published, and no other is made in its place."""
        code, is_new = case.code, self.give_up(case, reason)
        if code is None or not is_new:  # another thread was first
            return
        if code.path:
            log.warning("precompiled.rejected artifact=%s reason=%s", code.path, reason)
            self.withheld.add(code.path)
            self._policy.reject(code.path, reason)
            self._report.note_not_precompiled(reason)
        else:
            self.withheld |= self._files
            for other in self._kinds:  # torch may serve their calls by the same graph
                if other.code is not None and not other.code.path:
                    self.drop(other, reason)
        self._policy.moment.note(case, lambda: None)  # tells predictors with recorded calls

    def give_up_orders(self, reason: str) -> None:
        """Serve calls eager whose code nobody will bring."""
        for case in self._kinds:
            if case.state in (State.CLAIMED, State.ORDERED):
                self.give_up(case, reason)
