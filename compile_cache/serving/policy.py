"""What a boot does with calls of new kinds: finds stored code, makes code, traces stored graphs, or orders code.

All regions share one `Policy`. This module imports torch, and is itself imported only when a boot has torch. It imports
no compiler before code is found, made or ordered.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from compile_cache.calls.spec import RECOMPILE_LIMIT, Call, CallSpec
from compile_cache.errors import ArtifactError, Failure, attempt, log
from compile_cache.inductor.function_file import SUFFIX, Mark, has_artifacts, marks_of, read_marks, write_mark
from compile_cache.serving.moment import LOCK, Moment
from compile_cache.serving.states import Case, Kinds, State
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.timeline import noted
from compile_cache.torch_threads import end_at_exit

if TYPE_CHECKING:
    from compile_cache.background.orders import Orders
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Answer
    from compile_cache.inductor.stored_functions import Artifacts, CachedRecord

# The most that a setup takes to trace graphs out of stored files. With the import of the compiler, which takes 3 s, it
# is 15 s.
_TRACING_S = 12.0
# Loading an artifact holds Python's lock for about 0.1 s, which a prediction would wait for. So it waits for a moment
# in which no region is called, between two predictions or while the GPU works, but not for long.
_GAP_S = 0.1
_LONGEST_WAIT_S = 2.0


class Policy:
    """What the regions of a boot share. `moment` says when new code is taken.

    torch's compiler is imported at once; if a second process compiles and nothing was restored, when the first artifact
    arrives.
    `artifacts` has the functions compiled ahead of time; None until then. If there can be none, it says why; it is
    empty if none is wanted.
    `kinds` has the kinds of calls of each region, in the order in which the program gave the regions.
    `late` has the functions that are loaded after READY, each with whether LATE cases wait for it; None from READY on.
    `compiles_until_s`: in a warm-up, this process may compile until that time of `time.monotonic`; None outside it.
    `tracing_s`: the seconds that the setup may still spend on tracing stored graphs.
    """

    def __init__(
        self, settings: Settings, directory: CacheDirectory, is_hit: bool, calls: Callable[[], int] = int
    ) -> None:
        self.settings = settings
        self.directory = directory
        stored = directory.scan()
        functions = [path for path in stored if path.endswith(SUFFIX)] if is_hit else []
        marks = read_marks(directory.path, stored) if functions else {}
        late = [path for path in sorted(functions) if path in marks and marks[path].is_late]
        late = late if settings.unseen == "background" else []
        self.late: dict[str, bool] | None = dict.fromkeys(late, False)
        self.kinds: list[Kinds] = []
        self._calls = calls
        self.moment = Moment()
        # What imports torch's compiler, or makes or compares code, now: torch compiles for one thread at a time.
        self.maker: object | None = None
        self.artifacts: Artifacts | str | None = None
        # Whether this is a process of one answer, and nothing of this version is stored.
        self._is_first_run = settings.setup_budget_s is None and not is_hit
        self.compiles_until_s: float | None = None
        self.tracing_s = _TRACING_S
        # The orders, or why there can be none; None until the first one.
        self._orders: Orders | str | None = None if settings.precompile else "nothing may be compiled ahead of time"
        if settings.cold_start == "block" or has_artifacts(stored):
            self.open(marks)

    @property
    def functions(self) -> Artifacts | None:
        """The functions compiled ahead of time; None if torch's compiler is not imported, or if there can be none."""
        return None if isinstance(self.artifacts, str) else self.artifacts

    @property
    def is_warming_up(self) -> bool:
        """Whether calls are the warm-up's."""
        return self.compiles_until_s is not None

    def for_new_kinds(self, is_late: bool = False) -> str:
        """What happens now with a call of a new kind: `background` or `block`; after READY also `eager` or `error`. A
        process of one answer that can compile ahead of time compiles what is needed after READY only if an earlier one
        has stored something."""
        until_s = self.compiles_until_s  # which another thread may set
        if until_s is None:
            return self.settings.unseen
        can_wait = is_late and self._is_first_run and self.functions is not None
        return "background" if can_wait or time.monotonic() > until_s else self.settings.cold_start

    def open(self, marks: Mapping[str, Mark] | None = None) -> None:
        """Import torch's compiler, once, and find artifacts from now on, with these `marks`. Meanwhile, any
        thread but the setup's is the `maker`."""
        if self.artifacts is not None:
            return
        self.artifacts = ""
        from compile_cache.inductor.toolchain import configure_torch, is_switched_off

        configure_torch()
        if not self.settings.precompile or is_switched_off():
            return
        try:  # they need private names of torch: if one is gone, the boot goes on without
            from compile_cache.inductor.stored_functions import Artifacts
        except (ImportError, AttributeError) as error:
            self.artifacts = f"torch {torch.__version__} lacks a name that precompiled regions need: {error}"
            log.warning("No precompiled regions in this boot: %s", self.artifacts)
        else:
            self.artifacts = Artifacts(self.settings, self.directory.path, marks)

    def begin_making(self, maker: object) -> bool:
        """Whether `maker` may make or compare code from now on, until it calls `end_making`: no other does. Call both
        in one `try`, because a cancel may come between any two instructions."""
        with LOCK:
            self.maker = self.maker or maker
            return self.maker is maker

    def end_making(self, maker: object) -> bool:
        """Let others make code, if it was this one's turn; whether it was."""
        with LOCK:
            was_its = self.maker is maker
            self.maker = None if was_its else self.maker
            return was_its

    def _open_alone(self) -> None:
        """`open` on another thread than the setup's."""
        thread = threading.current_thread()
        try:
            while not self.begin_making(thread):
                time.sleep(_GAP_S / 10)
            self.open()
        finally:
            self.end_making(thread)

    def configure(self) -> None:
        """Make torch's settings in this thread, if the compiler is imported."""
        if self.artifacts is not None:
            from compile_cache.inductor.toolchain import configure_torch

            configure_torch()

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

    def makes_late(self, case: Case, call: Call, owner: str) -> bool:
        """Make a claimed case LATE if functions are stored for such calls, none is loaded, and READY is to come.
        `owner` is that of such files: the class."""
        if (artifacts := self.functions) is None or self.settings.unseen != "background" or self.late is None:
            return False
        self.configure()
        paths = attempt(artifacts.unloaded, case.spec, call)
        with LOCK:
            if isinstance(paths, Failure) or not paths or self.late is None or not case.move(State.LATE):
                return False
            self.late |= dict.fromkeys(paths, True)
        self.directory.publishable.use(*paths, owner)  # the process may end before the next call
        return True

    def _load_late(self, late: dict[str, bool]) -> None:
        """Load what READY did not wait for, between two predictions: first the functions of LATE cases. All these cases
        are looked up again together, so that a predictor with recorded calls records once."""
        for path, is_waited_for in sorted(late.items(), key=lambda item: not item[1]):
            if not is_waited_for:
                self.look_again(*self.kinds)
            self._wait_for_gap(lambda: bool(late))
            if late and (artifacts := self.functions) is not None:  # else the process ends
                with noted("preload", "load after READY"):
                    attempt(artifacts.arrive, path)  # an error comes again, and is reported, where it is needed
        self.look_again(*self.kinds)

    def look_again(self, *kinds: Kinds) -> None:
        """Look LATE cases among these up again, from the next moment on. Calls load what is not loaded by then."""
        for case in self._late_cases(*kinds):
            self.moment.note(case, functools.partial(_reopen, case))

    def _late_cases(self, *kinds: Kinds) -> list[Case]:
        """The cases that wait for functions to be loaded after READY."""
        cases = itertools.chain(*kinds)
        return [case for case in cases if case.state is State.LATE and not self.moment.has(case)]

    def find(self, spec: CallSpec, call: Call, owner: str) -> Precompiled | str:
        """The function for this call; why there is none otherwise, empty if none is wanted."""
        if (artifacts := self.functions) is None:
            return ""
        self.configure()  # an artifact's name depends on these settings
        found = attempt(artifacts.find, spec, call)
        if isinstance(found, Failure):
            return found.reason
        if not isinstance(found, str):
            self.directory.publishable.use(found.path, owner)
        return found

    def mark(self, path: str, mark: Mark) -> None:
        """Note for later boots on which instances a function was compared, and whether they load it after READY."""
        marked = attempt(write_mark, self.directory.path, path, mark)
        # No owner's: a version that uses another's function has not compared it yet.
        if isinstance(marked, str):
            self.directory.publishable.hand_over([marked], marked)

    def reject(self, path: str, reason: str) -> None:
        """Use a record no more in this boot, and do not publish it."""
        for each in (path, *marks_of(self.directory.path, path)):
            self.directory.publishable.withdraw(each)
        if (artifacts := self.functions) is not None:
            artifacts.reject(path, reason)

    def record_to_trace(self, spec: CallSpec, call: Call, owner: str) -> CachedRecord | None:
        """In a warm-up, the record of stored graphs for calls like this; None if there is none."""
        if (artifacts := self.functions) is None or not self.is_warming_up:
            return None
        record = artifacts.cached(spec, call)
        if record is not None:
            self.directory.publishable.use(record.path, owner)
        return record

    def for_graphs(self) -> str:
        """What happens now with a call that no graph of its class fits: `block`: it gets one; `stored`: it may get one
        out of stored files; empty: it gets none."""
        if self.for_new_kinds() == "block":
            return "block"
        return "stored" if self.is_warming_up else ""

    def orders(self) -> Orders | str:
        """The calls for the second process; why there can be none otherwise."""
        if self._orders is None:
            from compile_cache.background.orders import Orders

            with LOCK:
                if self._orders is None:
                    self._orders = Orders(self.settings, self.directory)
                    if self.late is None:
                        self._orders.queue.released.set()
        return self._orders

    @property
    def is_full(self) -> bool:
        """Whether so many calls wait for the second process that no other can be ordered now."""
        return not isinstance(self._orders, str | None) and self._orders.queue.waiting >= RECOMPILE_LIMIT

    def take(self, name: str, answer: Answer) -> Answer:
        """The second process's answer for a call, with its files in the cache directory and its function loaded."""
        taken = attempt(self._taken, name, answer) if answer.files else answer
        if isinstance(taken, Failure):
            log.warning("background.not_taken call=%s error=%s", name, taken.reason)
            return replace(answer, path="", files=(), reason=f"its artifact cannot be used: {taken.reason}")
        return taken

    def _taken(self, name: str, answer: Answer) -> Answer:
        orders = self.orders()
        assert not isinstance(orders, str)  # it has answered
        self._wait_for_gap()
        if not answer.is_precompiled:  # the files of graphs
            orders.take(answer)
            return answer
        with noted("second process", f"{name}: load"):
            if self.functions is None:
                self._open_alone()
            orders.take(answer)
            if (artifacts := self.functions) is None:
                raise ArtifactError(str(self.artifacts or "torch.compile is switched off, or cannot be imported"))
            self.configure()  # the call may have been ordered before torch's compiler was imported
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

    def release(self) -> None:
        """Let the second process begin, and load what READY did not wait for. Called at READY.

        Raises:
            ImportError: this torch has other modules.
            RuntimeError: no thread can be started. In either case, calls load their functions.
        """
        with LOCK:
            late, self.late = self.late, None
            if not isinstance(self._orders, str | None):
                self._orders.queue.released.set()
        if late:
            try:
                _on_thread(functools.partial(self._load_late, late), late.clear)
            except BaseException:
                self.look_again(*self.kinds)
                raise

    @property
    def waiting(self) -> int:
        """How many kinds of calls are eager until the second process has answered, or their functions are loaded."""
        ordered = 0 if isinstance(self._orders, str | None) else self._orders.queue.waiting
        return ordered + len(self._late_cases(*self.kinds))

    def wait(self, timeout_s: float) -> bool:
        """Wait until none is `waiting`; False after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while self._late_cases(*self.kinds) and time.monotonic() < until_s:
            time.sleep(_GAP_S / 10)
        left_s = max(0.0, until_s - time.monotonic())
        # Calls that are ordered meanwhile are waited for too, those after that are not.
        is_answered = isinstance(self._orders, str | None) or self._orders.queue.wait(left_s)
        return is_answered and not self._late_cases(*self.kinds)

    def order_nothing(self, reason: str) -> None:
        """In a fork of this process: forget the second process, and what other threads hold. Calls of LATE cases load
        their functions."""
        self._orders = reason
        self.maker, self.late = None, None
        self.moment.forget_threads()
        self.look_again(*self.kinds)
        self.moment.pass_by()  # what has arrived is taken


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
