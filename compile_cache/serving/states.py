"""The kinds of calls that met a region, and the state of each.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from compile_cache.calls.spec import RECOMPILE_LIMIT, Call, CallSpec
from compile_cache.of_each import OfEach
from compile_cache.serving.moment import LOCK

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Graph

# What serves calls: a function compiled ahead of time, or a graph of `torch.compile`.
Code: TypeAlias = "Precompiled | Graph"
# Functions for one kind of call of one instance. If more are needed, a number changes from call to call.
MOST_FUNCTIONS = 8
# If an instance's kinds of calls differ in one size of a tensor, the one after so many asks for code that leaves that
# size open.
_SIZES_BEFORE_OPEN = 3
_CHANGING = "a number or a flag changes from call to call, so no compiled code fits for long"
_TOO_MANY = f"eager for new kinds of calls: {RECOMPILE_LIMIT} are kept"


class State(enum.Enum):
    """How calls of a case are served. `MOVES` has the ways from one state to another.

    - NEW: nothing is known yet. The next call claims the case.
    - CLAIMED: one thread looks for stored code, makes code (`block`), or orders it (`background`). Eager answers.
    - ORDERED: the second process makes the code. Eager answers.
    - LATE: functions are stored for such calls, and are loaded after READY. Eager answers. Then the case is NEW again.
    - ARRIVED: eager answers, and the code runs on a copy and is compared.
    - TAKEN: the code answers calls of instances on which it has passed: a function compiled ahead of time, or graphs
      of `torch.compile`, of stored files or made in this process. On any other instance, it is compared first. Of the
      instances on which earlier boots compared it, one is enough in the warm-up, and none is needed outside it.
    - GROWING: the model's own code answers, whatever the sizes are: calls make a tensor larger that they keep. If the
      first call of a prediction does not, the case is NEW again.
    - EAGER: the model's own code answers until the process ends. The region's report says why.
    """

    NEW = "new"
    CLAIMED = "claimed"
    ORDERED = "ordered"
    LATE = "late"
    ARRIVED = "arrived"
    TAKEN = "taken"
    GROWING = "growing"
    EAGER = "eager"


# The states that may follow each state. If nothing was found, made, ordered or given up, a claim ends in NEW.
MOVES: Mapping[State, frozenset[State]] = {
    State.NEW: frozenset({State.CLAIMED, State.EAGER}),
    State.CLAIMED: frozenset({State.NEW, State.ORDERED, State.LATE, State.ARRIVED, State.GROWING, State.EAGER}),
    State.LATE: frozenset({State.NEW}),
    State.ORDERED: frozenset({State.ARRIVED, State.EAGER}),
    State.ARRIVED: frozenset({State.TAKEN, State.EAGER}),
    State.TAKEN: frozenset({State.EAGER}),
    State.GROWING: frozenset({State.NEW}),
    State.EAGER: frozenset(),
}
# The states that have code.
WITH_CODE = frozenset({State.ARRIVED, State.TAKEN})


class Standing(enum.Enum):
    """What an instance has to do with a case that it has met.

    - TO_COMPARE: the code has to be compared on it.
    - PROVED: it made no such call yet, but an earlier boot has compared the code on it.
    - PASSED: the code was compared on it. Eager answers until the code is taken, between two predictions.
    - SERVES: the code was compared on it, or need not be. Whether the code fits a call is checked in that call.
    - DOES_NOT_FIT: no graph fitted its call, or the code cannot be compared on it. Its next call gets another case.
    """

    TO_COMPARE = "to compare"
    PROVED = "proved"
    PASSED = "passed"
    SERVES = "serves"
    DOES_NOT_FIT = "does not fit"


_PASSED = (Standing.PROVED, Standing.PASSED, Standing.SERVES)


@dataclass(slots=True, weakref_slot=True, eq=False)
class Case:
    """Calls of one kind that one function fits, or will be made for. They have one state.

    | field | meaning |
    | --- | --- |
    | `spec` | the first such call |
    | `state` | how its calls are served; `move` and `claim` alone set it |
    | `code` | what serves them, once it has arrived |
    | `standings` | the instances that made such calls and still exist |
    | `unended` | how many comparisons have not ended since one did |
    | `claimant` | the call that has claimed the case |
    """

    spec: CallSpec
    state: State = State.NEW
    code: Code | None = None
    standings: OfEach[Standing] = field(default_factory=OfEach)
    unended: int = 0
    claimant: Call | None = None

    def claim(self, call: Call) -> bool:
        """Whether this call has the case from now on, until `give_back`: it was NEW. Call both in one `try`, because a
        cancel may come between any two instructions."""
        with LOCK:
            if self.state is State.NEW:
                self.claimant = call
                self.state = State.CLAIMED
            return self.claimant is call

    def give_back(self, call: Call) -> None:
        """End the claim of this call, if it has one. If nothing was found, made or ordered, the case is NEW again."""
        with LOCK:
            if self.claimant is call:
                self.claimant = None
                if self.state is State.CLAIMED:
                    self.state = State.NEW

    def move(self, state: State) -> bool:
        """Go to `state`. False if `MOVES` has no such way, because another thread was first."""
        with LOCK:
            if state not in MOVES[self.state]:
                return False
            self.state = state
            return True

    def arrive(self, code: Code) -> None:
        """Take code that has to be compared, unless the case was given up."""
        with LOCK:
            if self.move(State.ARRIVED):
                self.code = code

    @property
    def path(self) -> str:
        """The file of its function; empty if it has none."""
        return self.code.path if self.code is not None else ""

    @property
    def compared_on(self) -> frozenset[str]:
        """The places of the instances on which earlier boots have compared its code."""
        return self.code.compared_on if self.code is not None else frozenset()

    def meet(self, module: nn.Module) -> None:
        """Note a call of `module`."""
        with LOCK:
            if self.standings.setdefault(module, Standing.TO_COMPARE) is Standing.PROVED:
                self.standings[module] = Standing.SERVES

    def leave(self, module: nn.Module) -> None:
        """Note that a function does not fit a call of `module`. An instance on which it was compared stays so: it may
        fit again, as after an adapter was taken out."""
        with LOCK:
            if self._is_function and self.standings.get(module) is Standing.TO_COMPARE:
                del self.standings[module]

    def miss(self, module: nn.Module) -> None:
        """Note that the code is not for this instance, whose next call gets another case."""
        with LOCK:
            self.standings[module] = Standing.DOES_NOT_FIT

    @property
    def _is_function(self) -> bool:
        """Whether its code is a function, which can be asked what it fits."""
        return self.state in WITH_CODE and bool(self.path)

    def serve(self, proved: Iterable[nn.Module] = ()) -> None:
        """Let the code serve the instances on which it has passed, and those on which an earlier boot compared it."""
        with LOCK:
            for module in proved:
                if self.standings.setdefault(module, Standing.PROVED) is Standing.TO_COMPARE:
                    self.standings[module] = Standing.PASSED
            for module, standing in self.standings.items():
                if standing is Standing.PASSED:
                    self.standings[module] = Standing.SERVES

    @property
    def serves_any(self) -> bool:
        """Whether the code was compared on an instance, and passed."""
        with LOCK:
            return any(standing in _PASSED for standing in list(self.standings.values()))

    def instances(self, have_passed: bool) -> list[nn.Module]:
        """The instances that made such calls and on which the code has passed, or those on which it has not."""
        with LOCK:
            met = [pair for pair in self.standings.items() if pair[1] is not Standing.PROVED]
        return [module for module, standing in met if (standing in _PASSED) is have_passed]

    def is_to_compare(self, module: nn.Module) -> bool:
        """Whether the code was not compared on this instance."""
        return self.standings.get(module) not in _PASSED

    def counts_for(self, module: nn.Module) -> bool:
        """Whether the case is one of those that may be made for an instance: it made such calls, or no other did."""
        if self.serves_any:
            return self.standings.get(module) in (Standing.PASSED, Standing.SERVES)
        return module in self.standings or self._is_function

    def is_known_to_serve(self, module: nn.Module) -> bool:
        """Whether calls of this instance were served as the case says, so that it is asked first."""
        return module in self.standings if self.state is State.GROWING else not self.is_to_compare(module)

    def misfit(self, code: Code | None, spec: CallSpec, call: Call) -> str:
        """Why the case, with this code, is not for this call, which it covers; empty if it is. Code that is still to
        come may fit any number."""
        is_left_out = self.standings.get(call[0]) is Standing.DOES_NOT_FIT
        if code is not None and self._is_function and not is_left_out:
            return code.misfit(call)
        is_open = self.state in (State.NEW, State.CLAIMED, State.ORDERED, State.LATE, State.GROWING)
        is_same = self.spec.numbers == spec.numbers and not is_left_out
        return "" if is_open or is_same else "it is for other calls"

    def covers(self, spec: CallSpec) -> bool:
        """Whether a kind that is the same without sizes is its own, or differs from it in open sizes alone. Code that
        leaves sizes open covers none if it could not be made, or failed."""
        if self.spec.open and (self.state is State.EAGER or self.spec.numbers != spec.numbers):
            return False
        differing = _differing(self.spec, spec)
        if self.state is State.GROWING:  # the first tensor is what the call is about
            return differing is not None and all(number for number, _ in differing)
        is_open = self.spec.open and differing is not None and differing <= {*self.spec.open}
        return bool(is_open) or self.spec.leaves == spec.leaves


class Kinds:
    """The kinds of one region, at most 64. Calls of any other kind are eager."""

    def __init__(self) -> None:
        # By kind without sizes.
        self._cases: dict[CallSpec, list[Case]] = {}

    def __iter__(self) -> Iterator[Case]:
        """Every case."""
        with LOCK:
            return iter([case for alike in self._cases.values() for case in alike])

    @property
    def waiting(self) -> int:
        """How many cases are served eager until their code arrives, or a comparison of it ends."""
        return sum(case.state is State.ORDERED or (case.unended > 0 and case.state is not State.EAGER) for case in self)

    def case(self, call: Call) -> tuple[Case, Code | None] | str:
        """The case of this call, made if it is new, and its code, which fits the call. Code that arrives later may
        not. Why there is no case otherwise.

        Guards run the model's own code, such as a property, which may wait for another thread. So no lock is held.
        """
        module, spec = call[0], CallSpec.of(call)
        kind = spec.without_sizes
        while True:
            alike, covering, misfit = [*self._cases.get(kind, ())], list[Case](), ""
            for case in sorted(alike, key=lambda case: (not case.is_known_to_serve(module), case.state is State.EAGER)):
                if not case.covers(spec):
                    continue
                code = case.code
                if not (reason := case.misfit(code, spec, call)):
                    case.meet(module)
                    return case, code
                case.leave(module)
                covering.append(case)
                misfit = reason
            with LOCK:
                if alike != [*self._cases.get(kind, ())]:  # another thread has made a case meanwhile
                    continue
                if reason := self._why_none(module, spec, covering, misfit):
                    return reason
                case = Case(spec)
                self._cases.setdefault(kind, []).append(case)
                case.meet(module)
                return case, None

    def _why_none(self, module: nn.Module, spec: CallSpec, covering: list[Case], misfit: str) -> str:
        """Why no other case of a kind is made for this instance; empty if one may be."""
        if not self._has_room(spec):
            return _TOO_MANY
        own = [case for case in covering if case.counts_for(module)]
        if len(own) >= MOST_FUNCTIONS:
            return _CHANGING
        # The second process does not know something of this module, so it would make the same function once more.
        made = [case.path for case in own if case.path and case.state is State.ARRIVED and not case.compared_on]
        return f"code of the second process does not fit in this process: {misfit}" if len({*made}) < len(made) else ""

    def _has_room(self, spec: CallSpec) -> bool:
        """Whether a case of this kind may be made. Kinds of which nothing is known make room."""
        kinds = {case.spec for case in self}
        if spec in kinds or len(kinds) < RECOMPILE_LIMIT:
            return True
        kept = {case.spec for case in self if case.state is not State.NEW}
        for alike in self._cases.values():
            alike[:] = [case for case in alike if case.spec in kept]
        return len(kept) < RECOMPILE_LIMIT

    def leave_sizes_open(self, case: Case, module: nn.Module) -> None:
        """Let the code of a case that `module` has claimed leave sizes open, if kinds of calls of the module differ in
        one size of a tensor."""
        with LOCK:
            alike = self._cases.get(case.spec.without_sizes, [])
            if case not in alike:  # another thread made room for its own
                return
            # Other modules may have another width, and NEW cases may find stored code.
            met = [one for one in alike if module in one.standings and (one is case or one.state is not State.NEW)]
            kinds = {one.spec.sizes: one.spec for one in met}
            differing = [found for kind in kinds.values() if (found := _differing(kind, case.spec)) is not None]
            varying = tuple(sorted(set[tuple[int, int]]().union(*differing)))
            opened = [one.spec for one in alike if one.spec.open]
            if (
                len(differing) >= _SIZES_BEFORE_OPEN
                and len({number for number, _ in varying}) == len(varying)
                and not any(one.numbers == case.spec.numbers and {*varying} <= {*one.open} for one in opened)
                and len(opened) < MOST_FUNCTIONS
            ):
                case.spec = replace(case.spec, open=varying)


def _differing(one: CallSpec, other: CallSpec) -> set[tuple[int, int]] | None:
    """The (tensor, dimension) pairs in which the sizes of two calls differ that are one kind without sizes. None if a
    tensor differs in more than one dimension, or in their number."""
    pairs = set[tuple[int, int]]()
    for number, (first, second) in enumerate(zip(one.sizes, other.sizes, strict=True)):
        found = {
            (number, dimension) for dimension, pair in enumerate(zip(first, second, strict=False)) if len({*pair}) > 1
        }
        if len(first) != len(second) or len(found) > 1:
            return None
        pairs |= found
    return pairs
