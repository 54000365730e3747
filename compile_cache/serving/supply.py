"""Where functions come from: the store, or the second process, which answers orders. And what is stored of them.

`Supply` is a boot's: all regions share it. `RegionSupply` is one region's. This module imports torch, and is itself
imported only when a boot has torch. It imports no compiler before a function is found, made or ordered.
"""

from __future__ import annotations

import contextvars
import functools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.background.orders import OrderQueue, Orders
from compile_cache.calls.spec import RECOMPILE_LIMIT
from compile_cache.calls.torch_call import Call
from compile_cache.errors import ArtifactError, Failure, NotHandedOver, attempt, log
from compile_cache.inductor.function_file import (
    SUFFIX,
    UNPROVED_S,
    Mark,
    has_artifacts,
    marks_of,
    read_marks,
    write_mark,
)
from compile_cache.serving.comparison import Unended
from compile_cache.serving.kinds import LEFT_OUT, PASSED, Case, Kinds, State
from compile_cache.serving.moment import LOCK, Moment
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.timeline import noted
from compile_cache.torch_threads import end_at_exit

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Answer
    from compile_cache.inductor.stored_functions import Artifacts, GraphsRecord

# The most that a setup takes to trace graphs out of stored files. With the import of the compiler, which takes 3 s, it
# is 15 s.
_TRACING_S = 12.0
# Loading an artifact holds Python's lock for about 0.1 s, which a prediction would wait for. So it waits for a moment
# in which no region is called, between two predictions or while the GPU works, but not for long.
_GAP_S = 0.1
_LONGEST_WAIT_S = 2.0
# A comparison that did not end is tried again after so many moments, and then after so many more.
_TRIES_AFTER = (1, 10, 100)


class Supply:
    """What the regions of a boot share. `moment` says when what has passed takes effect.

    `artifacts` has the stored functions; None until torch's loader is imported. If there can be none, it says why; it
    is empty if none is wanted.
    `regions` are in the order in which the program gave them.
    `late` has the functions that are loaded after READY, each with whether cases wait for it; None from READY on.
    `is_warming_up`: whether calls are the warm-up's.
    `tracing_s`: the seconds that the setup may still spend on tracing stored graphs.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        is_hit: bool,
        calls: Callable[[], int] = int,
        orders: Orders | None = None,
    ) -> None:
        self.settings = settings
        self.directory = directory
        # The calls for the second process; why there can be none otherwise.
        self.orders: Orders | str = orders or Orders(settings, directory)
        stored = directory.scan()
        functions = [path for path in stored if path.endswith(SUFFIX)] if is_hit else []
        marks = read_marks(directory.path, stored) if functions else {}
        late = [path for path in sorted(functions) if path in marks and marks[path].is_late]
        late = late if settings.unseen == "background" else []
        self.late: dict[str, bool] | None = dict.fromkeys(late, False)
        # The cases that stored functions are loaded for.
        self._ordered: list[Case] = []
        self.regions: list[RegionSupply] = []
        self._calls = calls
        self.moment = Moment()
        self.artifacts: Artifacts | str | None = None
        # Whether this is a process of one answer, and nothing of this version is stored.
        self.is_first_run = settings.setup_budget_s is None and not is_hit
        self.is_warming_up = False
        self.tracing_s = _TRACING_S
        # In `block`, also for the program's own `torch.compile`, whose graphs depend on torch's settings.
        if settings.cold_start == "block" or has_artifacts(stored):
            self.open(marks)

    @property
    def functions(self) -> Artifacts | None:
        """The stored functions; None if torch's loader is not imported, or if there can be none."""
        return None if isinstance(self.artifacts, str) else self.artifacts

    def open(self, marks: Mapping[str, Mark] | None = None) -> None:
        """Import torch's loader, once, and find functions from now on, with these `marks`."""
        if self.artifacts is not None:
            return
        self.artifacts = ""
        from compile_cache.inductor.toolchain import configure_torch, is_switched_off

        configure_torch()
        if is_switched_off():
            return
        try:  # they need private names of torch: if one is gone, the boot goes on without
            from compile_cache.inductor.stored_functions import Artifacts
        except (ImportError, AttributeError) as error:
            self.artifacts = f"torch {torch.__version__} lacks a name that precompiled regions need: {error}"
            log.warning("No precompiled regions in this boot: %s", self.artifacts)
        else:
            self.artifacts = Artifacts(self.settings, self.directory.path, marks)

    def configure(self) -> None:
        """Make torch's settings in this thread, if there can be functions."""
        if self.functions is not None:
            from compile_cache.inductor.toolchain import configure_torch

            configure_torch()

    def reject(self, path: str, reason: str) -> None:
        """Use a record no more in this boot, and do not publish it."""
        for each in (path, *marks_of(self.directory.path, path)):
            self.directory.ledger.withdraw(each)
        if (artifacts := self.functions) is not None:
            artifacts.reject(path, reason)

    # What the store answers.

    def preload(self) -> threading.Thread | None:
        """Load the functions that READY waits for, on a thread; None if there are no artifacts.

        Raises:
            ImportError: this torch has other modules.
        """
        if (artifacts := self.functions) is None:
            return None
        late = self.late or ()

        def load() -> None:
            with noted("preload", "load"):
                attempt(artifacts.prefetch, late)  # an error comes again, and is reported, where it is needed

        return _on_thread(load, lambda: None)

    def will_load(self, case: Case, call: Call) -> list[str]:
        """The stored functions for such calls, if none is loaded, and READY is to come. The case waits for them."""
        if (artifacts := self.functions) is None or self.settings.unseen != "background" or self.late is None:
            return []
        self.configure()
        paths = attempt(artifacts.unloaded, case.spec, call)
        with LOCK:
            if isinstance(paths, Failure) or not paths or self.late is None or not case.move(State.ORDERED):
                return []
            self.late |= dict.fromkeys(paths, True)
            self._ordered.append(case)
        return paths

    def _load_late(self, late: dict[str, bool]) -> None:
        """Load what READY did not wait for, between two predictions: first what cases wait for. All these cases are
        looked up again together, so that a predictor with recorded calls records once."""
        for path, is_waited_for in sorted(late.items(), key=lambda item: not item[1]):
            if not is_waited_for:
                self.look_again()
            self._wait_for_gap(lambda: bool(late))
            if late and (artifacts := self.functions) is not None:  # else the process ends
                with noted("preload", "load after READY"):
                    attempt(artifacts.load, path)  # an error comes again, and is reported, where it is needed
        self.look_again()

    def look_again(self, kinds: Kinds | None = None) -> None:
        """Look up the cases again that the store answers, or those among these kinds, from the next moment on. Calls
        load what is not loaded by then."""
        with LOCK:
            answered = [case for case in self._ordered if kinds is None or case in kinds]
            self._ordered = [case for case in self._ordered if case not in answered]
            for case in answered:
                self.moment.defer(case, functools.partial(_reopen, case))

    # What the second process answers.

    @property
    def _queue(self) -> OrderQueue | None:
        return None if isinstance(self.orders, str) else self.orders.queue

    @property
    def is_full(self) -> bool:
        """Whether so many calls wait for the second process that no other can be ordered now."""
        return self._queue is not None and self._queue.waiting >= RECOMPILE_LIMIT

    def received(self, name: str, answer: Answer) -> Answer:
        """The second process's answer for a call, with its files in the cache directory and its function loaded."""
        received = attempt(self._received, name, answer) if answer.files else answer
        if isinstance(received, Failure):
            log.warning("background.not_taken call=%s error=%s", name, received.reason)
            return replace(answer, path="", files=(), reason=f"its artifact cannot be used: {received.reason}")
        return received

    def _received(self, name: str, answer: Answer) -> Answer:
        orders = self.orders
        assert not isinstance(orders, str)  # it has answered
        if self.late is None:
            self._wait_for_gap()
        if not answer.is_precompiled and self.late is None:  # the next boot traces its graphs
            orders.copy_in(answer)
            return answer
        with noted("second process", f"{name}: load"):
            self.open()
            orders.copy_in(answer)
            if not answer.is_precompiled:
                return answer
            if (artifacts := self.functions) is None:
                raise ArtifactError(str(self.artifacts or "torch.compile is switched off, or cannot be imported"))
            self.configure()  # the call may have been ordered before torch's loader was imported
            return replace(answer, function=artifacts.arrive(answer.path))

    def _wait_for_gap(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Wait until no region was called for a moment, or for 2 s, as long as that `is_wanted`."""
        calls = self._calls()
        for _ in range(round(_LONGEST_WAIT_S / _GAP_S)):
            if not is_wanted():
                return
            time.sleep(_GAP_S)
            before, calls = calls, self._calls()
            if calls == before:
                return

    # READY, and waits.

    def await_orders(self, until_s: float) -> bool:
        """In `block`, let the second process answer orders, as fast as it can, each of which begins before `until_s` of
        `time.monotonic`; the others are answered after READY. Returns whether it has answered one."""
        if self.settings.cold_start != "block" or self._queue is None or not (waiting := self._queue.waiting):
            return False
        torch.cuda.empty_cache()  # the second process needs that memory
        self._queue.finish(until_s)
        return bool(self._queue.waiting < waiting)

    def release(self) -> None:
        """Let the second process begin, and load what READY did not wait for. Called at READY.

        Raises:
            ImportError: this torch has other modules.
            RuntimeError: no thread can be started. In either case, calls load their functions.
        """
        with LOCK:
            late, self.late = self.late, None
        if self._queue is not None and self.settings.setup_budget_s is None and self.settings.unseen != "background":
            self._queue.close()  # the next process goes on
        elif self._queue is not None:
            self._queue.release()
        if late:
            try:
                _on_thread(functools.partial(self._load_late, late), late.clear)
            except BaseException:
                self.look_again()
                raise

    @property
    def waiting(self) -> int:
        """How many kinds of calls are eager until the second process has answered, or their functions are loaded."""
        return len(self._ordered) + (self._queue.waiting if self._queue is not None else 0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is `waiting`; False after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self._ordered and time.monotonic() < until_s:
            time.sleep(_GAP_S / 10)
        left_s = max(0.0, until_s - time.monotonic())
        # Calls that are ordered meanwhile are waited for too, those after that are not.
        is_answered = self._queue is None or self._queue.wait(left_s)
        return is_answered and not self._ordered

    def order_nothing(self, reason: str) -> None:
        """In a fork of this process: forget the second process, and what other threads hold. Calls that wait for stored
        functions load them."""
        self.orders = reason
        self.late = None
        self.moment.forget_threads()
        self.look_again()
        self.moment.pass_by()  # what has arrived is taken


class RegionSupply:
    """Brings the functions of one region's kinds, and says what of them may be published.

    The second process makes code for the warm-up's calls first, in the order of their regions. It maps the same
    parameters if the region `shares_weights`: if all its modules may.
    """

    def __init__(self, report: RegionReport, owner: str, boot: Supply) -> None:
        self.report = report
        # The class, as the owner of files: see `Ledger`. The report has its name for people.
        self.owner = owner
        self.boot = boot
        self.kinds = Kinds()
        boot.regions.append(self)
        self.shares_weights = True
        # Whether all its modules are needed after READY alone.
        self.is_late = True

    def find(self, case: Case, call: Call) -> Precompiled | None:
        """The stored function for a call of a claimed case, which it has then. Without one, the case is ORDERED if the
        store brings one after READY, EAGER if the settings say so, or else NEW, and to be ordered."""
        boot, ledger = self.boot, self.boot.directory.ledger
        if self.is_late and (paths := boot.will_load(case, call)):
            ledger.use(*paths, self.owner)  # the process may end before the next call
            self.report.lower_to("late")
            return None
        found: Precompiled | str = ""
        if (artifacts := boot.functions) is not None:
            boot.configure()  # an artifact's name depends on these settings
            looked = attempt(artifacts.find, case.spec, call)
            found = looked.reason if isinstance(looked, Failure) else looked
        if not isinstance(found, str):
            ledger.use(found.path, self.owner)
            case.arrive(found)
            self.report.loaded += 1
            return found
        if boot.is_warming_up:
            if self.is_late and boot.is_first_run and not all(region.is_late for region in boot.regions):
                self.give_up(case, "a process of one answer has what is needed first compiled first")
            return None
        if boot.settings.unseen == "eager":
            self.give_up(case, "nothing is compiled for it, and COMPILE_CACHE_UNSEEN=eager")
        else:
            self.kinds.leave_sizes_open(case, call[0])
        return None

    def record(self, case: Case, call: Call) -> GraphsRecord | None:
        """The record of stored graphs that may be traced now for a claimed case. If there is one that may not, the case
        is EAGER."""
        boot = self.boot
        if (artifacts := boot.functions) is None or (record := artifacts.graphs(case.spec, call)) is None:
            return None
        boot.directory.ledger.use(record.path, self.owner)
        if artifacts.has_functions(case.spec, call[0]):
            why = "functions serve other calls of its class"
        elif not boot.is_warming_up:
            why = "its graphs are traced in a warm-up alone"
        elif record.seconds > boot.tracing_s:
            why = f"its graphs take {record.seconds:.0f} s to trace in the setup"
        else:
            return record
        self.give_up(case, f"{record.reason}; {why}")
        return None

    def pack(self, case: Case, call: Call) -> Callable[[], None]:
        """What orders a call, which is in bytes then. Raises NotHandedOver if it cannot be ordered."""
        orders = self.boot.orders
        if isinstance(orders, str):
            raise NotHandedOver(orders)
        name = f"{self.report.name} {case.spec}"
        rank = (not self.boot.is_warming_up, self.boot.regions.index(self))
        order = orders.pack(name, call, case.spec.open, rank, self.shares_weights, case.graphs)
        # torch 2.13 keeps settings in context variables. A function is loaded with the settings of this call.
        context = contextvars.copy_context()
        order.answer.add_done_callback(lambda answer: context.run(self._receive, case, name, answer))
        return functools.partial(orders.submit, order)

    def order(self, case: Case, order: Callable[[], None] | Failure) -> None:
        """Order the function of a claimed case, whose call was served eager."""
        failed = order if isinstance(order, Failure) else attempt(order)
        if failed is not None:
            self.give_up(case, f"cannot be compiled in a second process: {failed.reason}")
        case.move(State.ORDERED)  # unless the answer was faster
        self.report.wait_for(self.kinds)

    def _receive(self, case: Case, name: str, order: Future[Answer]) -> None:
        """Take the second process's answer. Another thread calls this."""
        if order.cancelled():
            return
        answer = self.boot.received(name, order.result())
        self._hand_over(answer)
        if answer.function is not None:
            self.report.compile_s += answer.seconds
            self.report.note_made(answer)
            self.boot.moment.defer(case, functools.partial(self._arrive, case, answer.function))
        elif answer.path and self.boot.late is not None:  # the next round of the warm-up traces its graphs
            self.boot.moment.defer(case, functools.partial(_reopen, case))
        else:
            self.give_up(case, answer.reason)
            if case.spec.open:  # calls of its sizes are looked at again, each for code of its own
                self.boot.moment.defer(case, lambda: None)

    def _hand_over(self, answer: Answer) -> None:
        """Let what was made of a call be published, once it was compared; graphs at once if this boot compares none any
        more. If graphs were found, those of another version are this one's too."""
        ledger, record = self.boot.directory.ledger, [answer.path] if answer.path else []
        wait_s = UNPROVED_S if answer.function is not None or self.boot.late is not None else 0.0
        ledger.hand_over(record, answer.path, wait_s)
        ledger.hand_over({path for path in answer.files if not has_artifacts([path])}, self.owner, wait_s)
        if record and answer.has_found:
            ledger.use(self.owner)

    def _arrive(self, case: Case, function: Precompiled) -> None:
        case.arrive(function)
        self.report.wait_for(self.kinds)

    def confirm(self, case: Case, marked: Iterable[nn.Module]) -> None:
        """Let a function that has passed be published, and serve also the instances on which it is `marked`."""
        if case.state is not State.HAS_CODE or case.function is None:  # it has failed meanwhile
            return
        for module in marked:
            case.trials[module] = PASSED
        self.report.lower_to("precompiled")
        for owner in (case.function.path, self.owner):
            self.boot.directory.ledger.release(owner)

    def mark(self, case: Case, places: Mapping[Any, str]) -> None:
        """Note for later boots on which instances, by their places, a function was compared: in all calls of theirs
        that it serves."""
        function = case.function
        if function is None or case.state is not State.HAS_CODE:  # it has failed meanwhile
            return
        alike = [other for other in self.kinds if other.function is function]
        passed = {places[module] for other in alike for module in other.instances(True)}
        passed -= {places[module] for other in alike for module in other.instances(False)}
        if passed <= function.compared_on:
            return
        mark = Mark(frozenset(passed), self.is_late)
        marked = attempt(write_mark, self.boot.directory.path, function.path, mark)
        # No owner's: a version that uses another's function has not compared it yet.
        if isinstance(marked, str):
            self.boot.directory.ledger.hand_over([marked], marked)

    def put_off(self, case: Case, module: nn.Module, unended: Unended) -> None:
        """Conclude nothing from a comparison that did not end. A later call of the instance repeats it, a few times."""
        if case.serves(module):  # another thread has let it pass
            return
        reason = f"not compared with eager: {Failure(unended.error).reason}"
        if case.function is not None:
            self.boot.directory.ledger.doubt(case.function.path)
        tries = max(0, case.trials.get(module, 0))
        if unended.is_final or tries == len(_TRIES_AFTER):
            case.trials[module] = LEFT_OUT
            self.report.note_eager(reason, case.spec)
        else:  # predictors that replay recorded calls make no other call until there is something new
            early = iter([True] * (_TRIES_AFTER[tries] - 1))
            case.trials[module] = tries + 1
            self.boot.moment.defer(case.subject(module), lambda: case.state is State.HAS_CODE and next(early, False))
            self.report.explain(reason, case.spec)
        self.report.wait_for(self.kinds)
        log.info("region.not_compared region=%s call=%s reason=%s", self.report.name, case.spec, reason)

    def give_up(self, case: Case, reason: str, state: State = State.EAGER) -> bool:
        """Serve a case's calls eager from now on. False if they are already."""
        is_new = case.move(state)
        if is_new:
            self.report.note_eager(reason, case.spec)
            self.report.wait_for(self.kinds)
        return is_new

    def drop(self, case: Case, reason: str) -> None:
        """Stop using a function that failed. It is not published, and no other is made in its place."""
        function, is_new = case.function, self.give_up(case, reason)
        if function is None or not is_new:  # another thread was first
            return
        log.warning("precompiled.rejected artifact=%s reason=%s", function.path, reason)
        self.boot.reject(function.path, reason)
        self.report.note_not_precompiled(reason)
        for other in self.kinds:  # the same function serves their calls
            if other.function is not None and other.function.path == function.path:
                self.give_up(other, reason)
        self.boot.moment.defer(case, lambda: None)  # tells predictors with recorded calls

    def give_up_orders(self, reason: str) -> None:
        """Serve calls eager whose code nobody will bring."""
        for case in self.kinds:
            if case.state is State.ORDERED or (case.state is State.NEW and case.claimant):
                self.give_up(case, reason)
            case.claimant = None


def _reopen(case: Case) -> None:
    case.move(State.NEW)


def _on_thread(load: Callable[[], None], stop: Callable[[], None]) -> threading.Thread:
    """Import torch's loader on this thread, and call `load` on a new one, which is returned. The exit calls `stop`.

    torch's compiler is a cycle of imports. If two threads began with different modules of it, one of them would find a
    half-made module. So the new thread imports none of its modules.

    Raises:
        ImportError: this torch has other modules.
    """
    with noted("preload", "import torch's loader"):
        from compile_cache.inductor.lean_loading import import_loader

        import_loader()
    # torch 2.13 keeps settings in context variables. The thread gets its caller's.
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(load,), name="compile-cache-preload", daemon=True)
    end_at_exit(thread, stop)
    thread.start()
    return thread
