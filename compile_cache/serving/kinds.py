"""The kinds of calls that met a region, and the state of each.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.calls.spec import RECOMPILE_LIMIT, CallSpec, numbers_of
from compile_cache.serving.moment import LOCK

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Graph

    # What serves calls: a function compiled ahead of time, or a graph of `torch.compile`.
    Code = Precompiled | Graph

# Functions for one kind of call of one instance. If more are needed, a number changes from call to call.
MOST_FUNCTIONS = 8
# After so many kinds that differ in one size only, a region asks for one function for all sizes.
_SIZES_BEFORE_DYNAMIC = 3
# A comparison that did not end is tried again after so many predictions.
_TRIES_AFTER = (1, 10, 100)
GROWS = "it makes a tensor larger that it keeps, so no code fits the next call. Give it a cache of fixed size"
_CHANGING = "a number or a flag changes from call to call, so no compiled code fits for long"
_TOO_MANY = f"eager for new kinds of calls: {RECOMPILE_LIMIT} are kept"


class State(enum.Enum):
    """How calls of a case are served. `MOVES` has the ways from one state to another.

    - NEW: nothing is known yet. The next call claims the case.
    - CLAIMED: one thread looks for stored code, makes code (`block`), or orders it (`background`). Eager answers.
    - ORDERED: the second process makes the code. Eager answers.
    - ARRIVED: eager answers, and the code runs on a copy and is compared, once for each instance.
    - PRECOMPILED: a function compiled ahead of time answers. An instance that is not compared yet is compared first.
    - CACHED: graphs of `torch.compile` answer, of stored files or made in this process. An instance that is not
      compared yet is compared first.
    - EAGER: the model's own code answers until the process ends. `Case.reason` says why.
    """

    NEW = "new"
    CLAIMED = "claimed"
    ORDERED = "ordered"
    ARRIVED = "arrived"
    PRECOMPILED = "precompiled"
    CACHED = "cached"
    EAGER = "eager"


# The states that may follow each state. A claim that ends without code makes the case NEW again.
MOVES: Mapping[State, frozenset[State]] = {
    State.NEW: frozenset({State.CLAIMED, State.EAGER}),
    State.CLAIMED: frozenset({State.NEW, State.ORDERED, State.ARRIVED, State.EAGER}),
    State.ORDERED: frozenset({State.ARRIVED, State.EAGER}),
    State.ARRIVED: frozenset({State.PRECOMPILED, State.CACHED, State.EAGER}),
    State.PRECOMPILED: frozenset({State.EAGER}),
    State.CACHED: frozenset({State.EAGER}),
    State.EAGER: frozenset(),
}


class Standing(enum.Enum):
    """What an instance has to do with a case that it has met.

    - TO_COMPARE: the code has to be compared on it.
    - SERVES: the code was compared on it, or need not be. Whether the code fits a call is checked in that call.
    - DOES_NOT_FIT: it waited for code that then did not fit it, or no graph fitted its call.
    """

    TO_COMPARE = "to compare"
    SERVES = "serves"
    DOES_NOT_FIT = "does not fit"


@dataclass(slots=True, eq=False)
class Case:
    """Calls of one kind that one function fits, or will be made for. They have one state.

    | field | meaning |
    | --- | --- |
    | `spec`, `numbers`, `first` | the first such call, and its module |
    | `state` | how its calls are served; `move` alone sets it |
    | `reason` | why its calls are eager; before that, why the code did not fit `first` |
    | `code` | what serves them, once it has arrived |
    | `standings` | the instances that made such calls, those that called last at the end |
    | `is_proved` | an earlier boot compared the code on all instances: in the warm-up one is enough, after READY none |
    | `dynamic` | the (tensor, dimension) pairs that may have other sizes than those of `spec` |
    | `tries`, `not_before` | comparisons that began and did not end, and the prediction that may begin the next one |
    """

    spec: CallSpec
    numbers: tuple[str, ...]
    first: nn.Module
    state: State = State.NEW
    reason: str = ""
    code: Code | None = None
    standings: dict[nn.Module, Standing] = field(default_factory=dict)
    is_proved: bool = False
    dynamic: tuple[tuple[int, int], ...] = ()
    tries: int = 0
    not_before: int = 0

    def move(self, state: State, reason: str = "") -> bool:
        """Go to `state`. False if `MOVES` has no such way, because another thread was first."""
        with LOCK:
            if state not in MOVES[self.state]:
                return False
            self.state, self.reason = state, reason
            return True

    def arrive(self, code: Code, is_proved: bool = False) -> None:
        """Take code that has to be compared, unless the case was given up."""
        with LOCK:
            if self.move(State.ARRIVED):
                self.code, self.is_proved = code, is_proved

    def meet(self, module: nn.Module) -> None:
        """Note a call of `module`. If another instance made none since the call of `module` before, it may be gone, and
        is not waited for."""
        with LOCK:
            if module in self.standings:
                for other in list(self.standings):
                    if other is module:
                        break
                    if self.standings[other] is Standing.TO_COMPARE:
                        del self.standings[other]
            standing = self.standings.pop(module, Standing.TO_COMPARE)
            fits_again = standing is Standing.DOES_NOT_FIT
            self.standings[module] = Standing.TO_COMPARE if fits_again else standing

    def leave(self, module: nn.Module, misfit: str) -> None:
        """Note that a function does not fit a call of `module`. An instance on which it was compared stays so: it may
        fit again, as after an adapter was taken out."""
        with LOCK:
            if not self._is_function:
                return
            if self.standings.get(module) is Standing.TO_COMPARE:
                self.standings[module] = Standing.DOES_NOT_FIT
            if self.state is State.ARRIVED and module is self.first:
                self.reason = misfit

    @property
    def _is_function(self) -> bool:
        """Whether its code is a function, which can be asked what it fits."""
        return self.code is not None and self.state is not State.EAGER and self.code.step == "precompiled"

    @property
    def serves_any(self) -> bool:
        """Whether the code was compared on an instance, and passed."""
        return Standing.SERVES in list(self.standings.values())

    @property
    def has_passed(self) -> bool:
        """Whether the code was compared on every instance that it has to be compared on."""
        return self.serves_any and (self.is_proved or Standing.TO_COMPARE not in list(self.standings.values()))

    def is_to_compare(self, module: nn.Module) -> bool:
        """Whether the code was not compared on this instance, and has to be."""
        return self.standings.get(module) is not Standing.SERVES and not (self.is_proved and self.serves_any)

    def put_off(self, prediction: int) -> bool:
        """Note that the comparison of this prediction does not end; False if there were too many."""
        if self.tries > len(_TRIES_AFTER):
            return False
        self.not_before = prediction + _TRIES_AFTER[self.tries - 1]
        return True

    def misfit(self, numbers: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why the case is not for this call of its kind; empty if it is. Code that is still to come may fit any."""
        if self.code is not None and self._is_function:
            return self.code.misfit(module, args, kwargs)
        is_open = self.state in (State.NEW, State.CLAIMED, State.ORDERED) or self.reason == GROWS
        is_same = self.numbers == numbers and self.standings.get(module) is not Standing.DOES_NOT_FIT
        return "" if is_open or is_same else "it is for other calls"

    def covers(self, spec: CallSpec, numbers: tuple[str, ...]) -> bool:
        """Whether this kind differs from its own in open sizes alone. Code for all sizes that could not be made, or
        failed, covers none."""
        if self.reason != GROWS and (self.state is State.EAGER or self.numbers != numbers):
            return False
        sizes = self.spec.sizes
        return _is_alike(sizes, spec.sizes) and _differing(sizes, spec.sizes) <= {*self.dynamic}


class Kinds:
    """The kinds of one region, at most 64. Calls of any other kind are eager."""

    def __init__(self) -> None:
        self._kinds: dict[CallSpec, list[Case]] = {}
        # By kind without sizes: the cases that leave sizes open.
        self._open: dict[CallSpec, list[Case]] = {}

    def __iter__(self) -> Iterator[Case]:
        """Every case."""
        with LOCK:
            return iter([case for kind in (*self._kinds.values(), *self._open.values()) for case in kind])

    @property
    def waiting(self) -> int:
        """How many cases are served eager until their code arrives."""
        return sum(case.state is State.ORDERED for case in self)

    def case(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], by_graphs: bool = True) -> Case:
        """The case of this call, made if it is new. Its code, if any, fits the call. Without `by_graphs`, it is none of
        `torch.compile`."""
        spec, numbers = CallSpec.of(module, args, kwargs), numbers_of(args, kwargs)
        with LOCK:
            of_kind = self._kinds.get(spec, [])
            alike = [case for case in self._open.get(spec.without_sizes, ()) if case.covers(spec, numbers)]
            for case in (*of_kind, *alike):
                if not by_graphs and case.code is not None and case.code.step != "precompiled":
                    continue
                if not (misfit := case.misfit(numbers, module, args, kwargs)):
                    case.meet(module)
                    return case
                case.leave(module, misfit)
            case = Case(spec, numbers, module)
            if reason := self._why_none(module, spec, of_kind):
                case.move(State.EAGER, reason)
            else:
                self._kinds.setdefault(spec, []).append(case)
            case.meet(module)
            return case

    def _why_none(self, module: nn.Module, spec: CallSpec, of_kind: list[Case]) -> str:
        """Why no other case of a kind is made for this instance; empty if one may be."""
        if spec not in self._kinds and len(self._kinds) + sum(map(bool, self._open.values())) >= RECOMPILE_LIMIT:
            known = {one: cases for one, cases in self._kinds.items() if {case.state for case in cases} - {State.NEW}}
            if len(known) == len(self._kinds):
                return _TOO_MANY
            self._kinds = known
        own = [case for case in of_kind if case.first is module]
        if len(own) >= MOST_FUNCTIONS:
            return _CHANGING
        # Code that did not fit the module that it was made for. The module may have changed since then. The same misfit
        # twice means that no code will fit.
        misfits = [case.reason for case in own if case.state is State.ARRIVED and case.reason]
        if len(set(misfits)) < len(misfits) and not any(case.serves_any for case in of_kind):
            return f"code of the second process does not fit in this process: {misfits[-1]}"
        return ""

    def opened(self, case: Case) -> Case:
        """The case to order in place of `case`: one that leaves sizes open, if kinds of calls of its module differ in
        one size of a tensor; else `case` itself."""
        with LOCK:
            if case.dynamic or case not in self._kinds.get(case.spec, ()):  # another thread made room for its own
                return case
            alike = [
                other.sizes
                for other, of_kind in self._kinds.items()
                if other.without_sizes == case.spec.without_sizes
                and _is_alike(other.sizes, case.spec.sizes)
                and any(case.first in one.standings for one in of_kind)  # other modules may have another width
            ]
            known = self._open.setdefault(case.spec.without_sizes, [])
            varying = sorted(set[tuple[int, int]]().union(*(_differing(sizes, case.spec.sizes) for sizes in alike)))
            if (
                len(set(alike)) < _SIZES_BEFORE_DYNAMIC
                or len({number for number, _ in varying}) != len(varying)
                or any(one.numbers == case.numbers and set(varying) <= {*one.dynamic} for one in known)
                or len(known) >= MOST_FUNCTIONS
            ):
                return case
            dynamic = Case(case.spec, case.numbers, case.first, State.CLAIMED, dynamic=tuple(varying))
            dynamic.standings = case.standings
            known.append(dynamic)
            self._kinds[case.spec].remove(case)  # the next call of its sizes gets the other one
            return dynamic

    def note_growing(self, case: Case) -> None:
        """Serve calls like those of `case` eager, whatever the sizes of their tensors are, except the first one's: the
        next call has a larger cache, and a kind of its own."""
        sizes = list(enumerate(case.spec.sizes))[1:]
        dynamic = tuple((number, dimension) for number, size in sizes for dimension in range(len(size)))
        growing = Case(case.spec, case.numbers, case.first, State.EAGER, GROWS, dynamic=dynamic)
        with LOCK:
            known = self._open.setdefault(case.spec.without_sizes, [])
            self._open[case.spec.without_sizes] = [*known, growing][-RECOMPILE_LIMIT:]
            self._kinds[case.spec] = [other for other in self._kinds.get(case.spec, ()) if other is not case]
            if not self._kinds[case.spec]:
                del self._kinds[case.spec]


def _differing(one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...]) -> set[tuple[int, int]]:
    """The (tensor, dimension) pairs in which the sizes differ. Both have equally many tensors and dimensions."""
    return {
        (number, dimension)
        for number, (first, second) in enumerate(zip(one, two, strict=True))
        for dimension, (size, other) in enumerate(zip(first, second, strict=True))
        if size != other
    }


def _is_alike(one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...]) -> bool:
    """Whether all tensors have equally many dimensions and differ in at most one of them."""
    return len(one) == len(two) and all(
        len(first) == len(second) and sum(map(int.__ne__, first, second)) <= 1
        for first, second in zip(one, two, strict=True)
    )
