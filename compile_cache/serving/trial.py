"""A trial: eager answers a call, and the case's code runs on a copy of it. What follows is decided here.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from compile_cache.calls.spec import call_region
from compile_cache.calls.tensors import Call, reachable_tensors
from compile_cache.errors import ArtifactError, Failure, NoGraph, NotHandedOver, log
from compile_cache.inductor.counters import read_counts
from compile_cache.serving.comparison import Comparison
from compile_cache.serving.kinds import WITH_CODE, Case, Code, Standing, State
from compile_cache.serving.moment import LOCK, Known
from compile_cache.serving.source import Maker, Source
from compile_cache.timeline import note

# A comparison that did not end is tried again when so many moments have come since the first try.
_TRIES_AT = (1, 11, 111)
_GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"


class Trials:
    """The trials of one region's code, and what passes them: code that serves, from the next moment on.

    `served` counts the region's calls by step. `waited_s` is the time that requests waited for the compiler.
    """

    def __init__(self, source: Source, instances: Iterable[nn.Module]) -> None:
        self._source = source
        self._instances = instances
        self.served: Counter[str] = Counter()
        self.waited_s = 0.0

    def hold(self, case: Case, call: Call, maker: Maker | None = None) -> Any:
        """Serve a call eager, and try the case's code on a copy. A claimed case gets its code from `maker`. If the
        trial does not end, nothing is concluded, and a later call repeats it: see `_TRIES_AT`."""
        policy, report, started = self._source.policy, self._source.report, time.perf_counter()
        comparison = None
        # One thread at a time makes or compares code. It may wait for this call, so this call does not wait for it.
        if policy.making.acquire(blocking=False):
            before, noted = read_counts(), report.graphs
            try:
                if maker or case.state in WITH_CODE:  # another thread may have given it up
                    comparison = self._begin(case, call)
                answer = self._hold(case, comparison, call, maker) if comparison else None
            finally:
                report.graphs = noted + read_counts().since(before).graphs
                policy.making.release()
        if comparison is None:
            return self.serve_eager(call)
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

    def serve_eager(self, call: Call, case: Case | None = None) -> Any:
        """Serve a call by the model's own code. That of a `case`, which is claimed or GROWING, shows whether such calls
        change the size of a tensor that they can reach, as of a cache that grows."""
        sizes = _sizes(call) if case is not None else []
        self.served["eager"] += 1
        answer = call_region(*call)
        if case is not None:
            now = _sizes(call)
            if len(now) == len(sizes) and now != sizes:
                self._source.give_up(case, _GROWS, State.GROWING)
                self._source.policy.moment.known[case] = Known()
            elif now == sizes and case.state is State.GROWING:
                case.move(State.NEW)
        return answer

    def _begin(self, case: Case, call: Call) -> Comparison | None:
        """A copy of the call to compare with. None if there can be none now; if there can never be one, the instance
        is left out."""
        if self._source.policy.moment.has((case, "again")):  # one did not end
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            return None
        try:
            return Comparison(call)
        except NotHandedOver as error:
            self._source.leave_out(case, call[0], f"it cannot be compared with eager: {error}")
        except Exception as error:  # no memory, or a mode of torch in which nothing can be copied
            self._put_off(case, call[0], error)
        return None

    def _hold(self, case: Case, comparison: Comparison, call: Call, maker: Maker | None) -> Any:
        stays_alone = self._source.policy.moment.stays_alone()
        try:
            answer = self.serve_eager(call, case if maker else None)
        except BaseException as error:
            is_of_model = isinstance(error, Exception) and not isinstance(error, MemoryError | torch.OutOfMemoryError)
            if not is_of_model:  # a cancel, or no memory beside the copy
                self._put_off(case, call[0], error)
            raise
        comparison.expect(answer)
        if maker is not None and case.state is State.CLAIMED:
            self._source.make(case, maker, comparison.pristine)
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
            with self._source.policy.moment.alone() if comparison.generators else contextlib.nullcontext():
                if comparison.generators and not stays_alone():
                    raise ArtifactError("other predictions would see the generators of random numbers set back")
                check = comparison.check(code.try_out)
        except (MemoryError, torch.OutOfMemoryError, ArtifactError) as error:
            self._put_off(case, module, error)
        except NoGraph:
            case.miss(module)
        except NotHandedOver as error:  # it says what the call changes
            self._source.give_up(case, str(error))
        except Exception as error:
            log.info("region.failed region=%s error=%r", self._source.report.name, error, exc_info=error)
            if code.path:
                self._source.drop(case, Failure(error).reason)
            else:  # the graphs of the other instances are right
                self._source.report.explain(f"eager for an instance: {Failure(error).reason}")
                case.miss(module)
        else:
            self._source.report.note_error(check.error, check.tolerance)
            if check.passed:
                self.let_serve(case, module)
            elif stays_alone():
                self._source.drop(case, check.difference)
            else:  # a call of another prediction may have written into the same module
                self._put_off(case, module, ArtifactError(f"while other predictions were open, {check.difference}"))

    def let_serve(self, case: Case, module: nn.Module) -> None:
        """Note that the code may serve this instance. It is taken at the next moment. Code that an earlier boot proved
        is taken at once, for all instances, unless other predictions are open: they had eager's answers."""
        with LOCK:
            case.unended = 0
            if is_proved := case.has_proved_code:
                case.serve(list(self._instances))  # another thread may add one
            else:
                case.standings[module] = Standing.PASSED
        moment = self._source.policy.moment
        with moment.alone() if is_proved else contextlib.nullcontext(False) as takes_now:
            if takes_now:
                self._take(case)
            else:
                moment.note(case, lambda: self._take(case))
        if not is_proved:
            moment.note_ending(case, lambda: self._source.mark(case))

    def _take(self, case: Case) -> bool:
        """Let code that has passed serve; True if it is too early. Called between two predictions, and for proved code
        at once."""
        if case.state is State.ARRIVED and not case.has_passed:
            return True
        case.serve()
        if case.move(State.TAKEN) and case.path:
            self._source.report.take_step("precompiled")
        if case.state is State.TAKEN:
            self._source.release(case)
        return False

    def _put_off(self, case: Case, module: nn.Module, error: BaseException) -> None:
        reason = f"not compared with eager: {Failure(error).reason}"
        if case.path:  # the files of graphs have other owners
            self._source.policy.outgoing.doubt(case.path)
        if case.unended == _TRIES_AT[-1]:
            self._source.leave_out(case, module, reason)
            case.unended = 0
        else:  # predictors that replay recorded calls make no other call until there is something new
            self._source.policy.moment.note((case, "again"), lambda: _waits(case))
        log.info("region.not_compared region=%s call=%s reason=%s", self._source.report.name, case.spec, reason)


def _sizes(call: Call) -> list[torch.Size]:
    return [tensor.shape for tensor in reachable_tensors(call)]


def _waits(case: Case) -> bool:
    """Whether, after one more moment, it is too early for another try."""
    case.unended += 1
    return case.state is not State.EAGER and case.unended not in _TRIES_AT
