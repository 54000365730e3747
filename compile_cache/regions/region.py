"""A module class and its instances: serves each call, and checks new code against eager.

Precompiled functions serve the calls that they fit. Another call is served eager while the compiling process makes a
function for it, or `torch.compile` serves it in this process: the settings decide. A class whose compiled code computes
something else is served eager.

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

from compile_cache.aot.traced import call_region
from compile_cache.errors import UnseenCallError, first_line
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.check import measured
from compile_cache.regions.counters import count_precompiled, read_counts
from compile_cache.regions.inputs import check_against_eager, keep, kind_of_call, with_plain_strides
from compile_cache.regions.kinds import Kind, Turn
from compile_cache.regions.ladder import RegionReport
from compile_cache.regions.ordering import Ordering
from compile_cache.regions.stored import StoredFunctions
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.aot.artifacts import Found
    from compile_cache.regions.backlog import Backlog
    from compile_cache.regions.compiled_here import CompiledHere

log = logging.getLogger("compile_cache")

# Code that arrives after READY is compared with eager on every instance, each of which takes about two eager calls. So
# that one request does not pay for all of them, a class with many instances compares in one of so many calls.
_CALLS_PER_COMPARISON = 8
_MANY = 4


class Region:
    """A module class and its instances.

    `report` says how calls are served, and why. `served` counts calls by step. `waited_s` is the time that requests
    waited for the compiler, in seconds.

    `watched` is set during the warm-up, and during a swap, in which this process may not compile (`may_compile`). After
    `deadline_s`, a time of `time.monotonic`, this process compiles nothing more.

    `cold` and `unseen` are the policies for a call that no code fits: `cold` in the warm-up (`background` or `block`),
    `unseen` after READY (also `eager` or `error`).
    """

    def __init__(
        self,
        report: RegionReport,
        stored: StoredFunctions,
        compile_here: Callable[[RegionReport, StoredFunctions, set[tuple[nn.Module | None, str]]], CompiledHere],
        backlog: Callable[[], Backlog | None],
        cold: str,
        unseen: str,
    ) -> None:
        self.report = report
        self.stored = stored
        self.watched = False
        self.may_compile = True
        self.compares_every_instance = True
        self.deadline_s = math.inf
        self.served: Counter[str] = Counter()
        self.waited_s = 0.0
        self.cold, self.unseen = cold, unseen
        self.ordering = Ordering(report, stored, backlog)
        self._compile_here = compile_here
        self._here: CompiledHere | None = None
        self._comparisons = Comparisons(lambda: sum(dict(self.served).values()))
        self._calls = 0
        self._unused = ""

    @property
    def withheld(self) -> set[str]:
        """The files that failed and must not be published."""
        return self.stored.withheld | (self._here.withheld if self._here else set())

    @property
    def compared(self) -> set[str]:
        """The paths of the artifacts that were compared with eager, on every instance that has called them."""
        return self._comparisons.paths

    @property
    def here(self) -> CompiledHere:
        """The calls that `torch.compile` serves in this process. Imports torch's compiler."""
        if self._here is None:
            self._here = self._compile_here(self.report, self.stored, self._comparisons.pairs)
        self._here.watched = self.watched
        return self._here

    def adopt(self, module: nn.Module) -> None:
        """Serve calls of `module` from now on, by the same hook as `module.compile()`."""
        self.report.instances = self.stored.adopt(module)
        module._compiled_call_impl = functools.partial(self._call, module)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._here is not None and self._here.is_demoted:
            return self._serve_eager(module, args, kwargs)
        args, kwargs = with_plain_strides(args, kwargs)
        if self.watched:
            return self._watched_call(module, args, kwargs)
        if found := self.stored.fitting(module, args, kwargs):
            self.served["precompiled"] += 1
            self.ordering.kinds.note_served(found.path)
            try:
                return found.function(module, args, kwargs)
            except AssertionError as error:  # generated code asserts the strides it was compiled for
                self.stored.reject(found.path, f"AssertionError: {first_line(error)}")
                raise
        return self._serve_unseen(module, args, kwargs, self.unseen)

    def _watched_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call of the warm-up: look for a precompiled function, and check new code against eager."""
        self._note_use()
        if self.cold == "background" or time.monotonic() > self.deadline_s:
            if found := self.stored.fitting(module, args, kwargs):
                return self._serve_found(found, module, args, kwargs)
            return self._serve_unseen(module, args, kwargs, "background")
        looked = self.stored.fitting(module, args, kwargs) or self.stored.look(module, args, kwargs)
        if isinstance(looked, str):
            if self.unseen == "error":  # which is not for calls of the warm-up, even if their compile fails
                self.ordering.kind(kind_of_call(module, args, kwargs), args, kwargs).in_warm_up = True
            return self._serve_anew(module, args, kwargs, looked)
        return self._serve_found(looked, module, args, kwargs)

    def _serve_unseen(self, module: nn.Module, args: Any, kwargs: Any, policy: str) -> Any:
        """Serve a call that no known function fits: by code that has arrived since, else as `policy` says. Calls of the
        warm-up are exempt from `policy`: they are eager until their code arrives."""
        if policy == "block" and not (self.stored.is_open or len(self.ordering.kinds)):
            return self._compile_on_request(module, args, kwargs)
        key = kind_of_call(module, args, kwargs)
        kind = self.ordering.kind(key, args, kwargs)
        kind.in_warm_up |= self.watched and self.may_compile
        generation = self.ordering.generation  # read once: code may arrive while this call looks for it
        turn = kind.turn(module, generation)
        if turn is Turn.LOOK:
            may_wait = (kind.in_warm_up or policy == "background") and self._is_too_soon
            if may_wait and kind.later.get(module) == generation:
                return self._serve_eager(module, args, kwargs)
            found = self.stored.look(module, args, kwargs)
            if not isinstance(found, str):
                is_new = self.ordering.has_arrived(found.path)
                if may_wait and is_new and (module, found.path) not in self._comparisons.pairs:
                    kind.later[module] = generation
                    self._comparisons.put_off(module, found.path)
                    return self._serve_eager(module, args, kwargs)
                return self._serve_found(found, module, args, kwargs)
            kind.looked[module] = generation
            kind.misfit = found
            turn = kind.turn(module, generation)
        if policy == "block" and not (kind.in_warm_up or kind.refused):
            return self._compile_on_request(module, args, kwargs)
        if self._here is not None and self._here.knows(key):
            self.served["compiled"] += 1
            return self._here.serve_found(module, args, kwargs)
        if policy == "error" and not kind.in_warm_up:
            raise UnseenCallError(
                f"{self.report.name} was called with {kind.text}, for which nothing is compiled. Add this call to the "
                "warm-up, or set COMPILE_CACHE_UNSEEN to background or eager."
            )
        if turn is Turn.ASK and policy == "background" and not self.ordering.kinds.is_covered(kind, generation):
            return self._serve_and_ask(kind, module, args, kwargs)
        if kind.refused:
            self.report.take_step("eager")
        return self._serve_eager(module, args, kwargs)

    @property
    def _is_too_soon(self) -> bool:
        """Whether this call should leave a comparison to a later one. In a swap, all code has to serve at once."""
        return not (self.watched or self.ordering.holds) and self._comparisons.is_too_soon(self.report.instances)

    def _serve_eager(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.served["eager"] += 1
        return call_region(module, args, kwargs)

    def _serve_and_ask(self, kind: Kind, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call eager, and order its code from the second process. In the warm-up, this process compiles a call
        that no other process can build."""
        call = self.ordering.pack(kind, module, args, kwargs)
        if call is None and kind.refused:
            if self.watched and self.may_compile:
                return self._serve_anew(module, args, kwargs, kind.refused)
            self.report.take_step("eager")
        self.served["eager"] += 1
        try:
            output = call_region(module, args, kwargs)
        except BaseException:  # a cancelled request raises one
            if call is not None:
                kind.take_back(module)
            raise
        if call is not None:
            self.ordering.order(kind, call, may_vary=not kind.in_warm_up)
        return output

    def _compile_on_request(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        before, started = read_counts(), time.perf_counter()
        self.served["compiled"] += 1
        try:
            return self.here.serve(module, args, kwargs)
        finally:
            if read_counts().graphs > before.graphs:
                self.waited_s += time.perf_counter() - started
                log.warning(
                    "compile.on_request region=%s seconds=%.1f A request waited for the compiler. Add this call to "
                    "the warm-up, or set COMPILE_CACHE_UNSEEN=background.",
                    self.report.name,
                    time.perf_counter() - started,
                )

    def _serve_anew(self, module: nn.Module, args: Any, kwargs: Any, why_not_precompiled: str) -> Any:
        """Serve a call for which no artifact exists, or only wrong ones."""
        if not (self.watched and self.may_compile):
            return self._serve_eager(module, args, kwargs)
        self.served["compiled"] += 1
        return self.here.serve_watched(module, args, kwargs, why_not_precompiled)

    def _serve_found(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Serve a call by an artifact that fits it. Compare it with eager first, if nobody has. Only a comparison that
        ended and passed lets the artifact serve; another call makes it again."""
        started = time.perf_counter()
        is_new = self.ordering.has_arrived(found.path)  # no other boot has compared a new artifact
        mark = found.path if is_new else "precompiled"
        pairs = self._comparisons.pairs
        is_first = (None, found.path) not in pairs
        if is_first or ((is_new or self.compares_every_instance) and (module, mark) not in pairs):
            if reason := self._objection(found, module, args, kwargs):
                self.stored.drop(found.path)
                return self._serve_anew(module, args, kwargs, reason)
            self._comparisons.note((None, found.path), (module, mark))
            if is_first:
                count_precompiled("loaded")
                self.report.loaded += 1
            self.report.compile_s += time.perf_counter() - started
            note("regions", f"{self.report.name}: compare", started)
        self.stored.remember(module, found)
        self.served["precompiled"] += 1
        output = found.function(module, args, kwargs)
        self.report.take_step("precompiled")
        return output

    def _note_use(self) -> None:
        if self._unused:
            self.report.reason = self.report.reason.replace(self._unused, "").strip("; ")
            self._unused = ""
        self._calls += 1

    def _objection(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> str:
        """Why an artifact may not serve this call; empty if it computes the same as eager on copies of the inputs. An
        artifact that differs or fails is rejected. Where memory runs out, nothing is known of it."""
        tried, kept = keep(self.report, module, args, kwargs), keep(self.report, module, args, kwargs)
        if tried is None or kept is None:
            return "its inputs cannot be copied, so it was not compared with eager"
        answer = attempt(measured, found.function, module, tried.args, tried.kwargs)
        if isinstance(answer, Failure):
            is_exhausted = isinstance(answer.error, torch.OutOfMemoryError)
            return answer.reason if is_exhausted else self._reject(found, module, args, kwargs, answer.reason)
        check = check_against_eager(self.report, answer, kept)
        if check is None:
            return "eager failed, so it was not compared"
        return "" if check.passed else self._reject(found, module, args, kwargs, f"it {check.difference}")

    def _reject(self, found: Found, module: nn.Module, args: Any, kwargs: Any, reason: str) -> str:
        """Stop using an artifact, and order no other one for this kind of call. If this process compiles the call now,
        its own result decides: one wrong artifact does not mean that the code is wrong. Returns `reason`."""
        self.stored.reject(found.path, reason)
        if not (self.watched and self.may_compile and self.cold == "block"):
            self.ordering.give_up(self.ordering.kind(kind_of_call(module, args, kwargs), args, kwargs), reason)
        return reason

    def has_arrived(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether code has arrived for such a call, but does not serve yet."""
        args, kwargs = with_plain_strides(args, kwargs)
        return self.ordering.is_due(module, args, kwargs) and self.stored.fitting(module, args, kwargs) is None

    def conclude(self) -> None:
        """After the warm-up, report a region that nothing called, or for which torch compiled nothing."""
        if not self._calls and not self._unused:
            self._unused = _unused(self.stored.instances()[0])
            self.report.explain(self._unused)
            log.warning("nothing of %s is compiled: %s", self.report.name, self._unused)
        here = self._here
        if here is not None and here.calls and not self.report.graphs and self.report.step == "unused":
            here.demote(
                "torch.compile made no graph: TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set, or an earlier boot "
                "in this process compiled the class"
            )


class Comparisons:
    """The comparisons of one region.

    `pairs`: an instance, and the artifact or the way that was compared with eager on it. The pair without an instance
    says that the code was compared at all. `calls` counts the region's calls so far.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self.pairs: set[tuple[nn.Module | None, str]] = set()
        self._put_off: set[tuple[nn.Module, str]] = set()
        self._calls = calls
        self._last = -math.inf

    @property
    def paths(self) -> set[str]:
        """The artifacts that were compared on every instance that has called them."""
        waiting = {path for module, path in list(self._put_off) if (module, path) not in self.pairs}
        return {path for module, path in list(self.pairs) if module is None} - waiting

    def note(self, *pairs: tuple[nn.Module | None, str]) -> None:
        """Note comparisons that this call makes."""
        self.pairs.update(pairs)
        self._last = self._calls()

    def put_off(self, module: nn.Module, path: str) -> None:
        """Note that an artifact waits for a later call of `module`."""
        self._put_off.add((module, path))

    def is_too_soon(self, instances: int) -> bool:
        """Whether this call should not compare, because another one did a few calls ago."""
        return instances >= _MANY and self._calls() < self._last + _CALLS_PER_COMPARISON


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
