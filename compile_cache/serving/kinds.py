"""The kinds of calls that met a region, the state of each, and the instances on which its function has passed.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import nn

from compile_cache.calls.spec import RECOMPILE_LIMIT, CallSpec
from compile_cache.calls.torch_call import Call
from compile_cache.of_each import OfEach
from compile_cache.serving.moment import LOCK

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled

# Functions for one kind of call of one instance. If more are needed, a number changes from call to call.
MOST_FUNCTIONS = 8
# If an instance's kinds of calls differ in one size of a tensor, the one after so many asks for code that leaves that
# size open.
_SIZES_BEFORE_OPEN = 3
# What is known of a case's code on one instance: how many comparisons have not ended, or one of these. No more
# comparisons are made; a function has passed; a whole graph has, or several have.
LEFT_OUT, PASSED, WHOLE_GRAPH, SEVERAL_GRAPHS = -1, -2, -3, -4
_CHANGING = "a number or a flag changes from call to call, so no compiled code fits for long"
_TOO_MANY = f"eager for new kinds of calls: {RECOMPILE_LIMIT} are kept"


class State(enum.Enum):
    """How calls of a case are served. `MOVES` has the ways from one state to another.

    - NEW: nothing is known yet. One call at a time looks for a stored function, and orders one if there is none.
    - ORDERED: the second process makes a function, or the store has some, which are loaded after READY. Eager answers.
    - HAS_CODE: a function answers calls of the instances on which it has passed. On any other instance, eager answers,
      and the function runs on a copy and is compared.
    - GROWING: the model's own code answers, whatever the sizes are: calls make a tensor larger that they keep. If the
      first call of a prediction does not, the case is NEW again.
    - EAGER: the model's own code answers until the process ends, or graphs do: see `graphs.py`. The region's report
      says why.
    """

    NEW = "new"
    ORDERED = "ordered"
    HAS_CODE = "has code"
    GROWING = "growing"
    EAGER = "eager"


# The states that may follow each state. An order that stored files answer makes a case NEW: which of them fits is found
# in a call.
MOVES: Mapping[State, frozenset[State]] = {
    State.NEW: frozenset({State.ORDERED, State.HAS_CODE, State.GROWING, State.EAGER}),
    State.ORDERED: frozenset({State.NEW, State.HAS_CODE, State.EAGER}),
    State.HAS_CODE: frozenset({State.EAGER}),
    State.GROWING: frozenset({State.NEW}),
    State.EAGER: frozenset(),
}


@dataclass(slots=True, weakref_slot=True, eq=False)
class Case:
    """Calls of one kind that one function fits, or will be made for. They have one state.

    | field | meaning |
    | --- | --- |
    | `spec` | the first such call |
    | `state` | how its calls are served; `move` alone sets it |
    | `function` | what serves them, once it has arrived |
    | `trials` | by instance that made such calls and still exists, what is known of the code there: see `PASSED` |
    | `graphs` | the record of the graphs of `torch.compile` that serve its calls in place of a function |
    | `claimant` | the call that looks for a function, orders one or compares it: one at a time |
    """

    spec: CallSpec
    state: State = State.NEW
    function: Precompiled | None = None
    trials: OfEach[int] = field(default_factory=OfEach)
    graphs: str = ""
    claimant: Call | None = None

    def subject(self, module: nn.Module) -> tuple[Case, int]:
        """What changes of this case for one instance have in common: see `Moment.defer`."""
        return self, id(module)

    def claim(self, call: Call) -> bool:
        """Whether this call has the case from now on, until `give_back`: no other has it. Call both in one `try`,
        because a cancel may come between any two instructions."""
        with LOCK:
            if self.claimant is None and self.state in (State.NEW, State.HAS_CODE):
                self.claimant = call
            return self.claimant is call

    def give_back(self, call: Call) -> None:
        """End the claim of this call, if it has one."""
        with LOCK:
            if self.claimant is call:
                self.claimant = None

    def move(self, state: State) -> bool:
        """Go to `state`. False if `MOVES` has no such way, because another thread was first."""
        with LOCK:
            if state not in MOVES[self.state]:
                return False
            self.state = state
            return True

    def arrive(self, function: Precompiled) -> None:
        """Take a function, unless the case was given up."""
        with LOCK:
            if self.move(State.HAS_CODE):
                self.function = function

    def meet(self, module: nn.Module) -> None:
        """Note a call of `module`."""
        with LOCK:
            self.trials.setdefault(module, 0)

    def leave(self, module: nn.Module) -> None:
        """Note that a function does not fit a call of `module`. An instance on which it was compared stays: it may
        fit again, as after an adapter was taken out."""
        with LOCK:
            if self.state is State.HAS_CODE and self.trials.get(module) == 0:
                self.trials.pop(module)

    def serves(self, module: nn.Module) -> bool:
        """Whether the function has passed on this instance."""
        return bool(self.trials.get(module) == PASSED)

    @property
    def serves_any(self) -> bool:
        """Whether the function has passed on an instance."""
        return PASSED in self.trials.values()

    def instances(self, have_passed: bool) -> list[nn.Module]:
        """The instances that made such calls and on which the function has passed, or those on which it has not."""
        with LOCK:
            return [module for module, trial in self.trials.items() if (trial == PASSED) is have_passed]

    @property
    def waits(self) -> bool:
        """Whether eager answers until code arrives, or a comparison of it ends."""
        has_code = self.state is State.HAS_CODE or self.graphs
        return self.state is State.ORDERED or bool(has_code and max([0, *self.trials.values()]) > 0)

    def counts_for(self, module: nn.Module) -> bool:
        """Whether the case is one of those that may be made for an instance: it made such calls, or no other did."""
        if self.serves_any:
            return self.serves(module)
        return module in self.trials or self.state is State.HAS_CODE

    def is_known_to_serve(self, module: nn.Module) -> bool:
        """Whether calls of this instance were served as the case says, so that it is asked first."""
        return module in self.trials if self.state is State.GROWING else self.serves(module)

    def misfit(self, function: Precompiled | None, spec: CallSpec, call: Call) -> str:
        """Why the case, with this function, is not for this call, which it covers; empty if it is. A function that is
        still to come may fit any number."""
        if self.state is State.HAS_CODE and function is not None:
            return function.misfit(call)
        is_same = self.state is not State.EAGER or self.spec.numbers == spec.numbers
        return "" if is_same else "it is for other calls"

    def covers(self, spec: CallSpec) -> bool:
        """Whether a kind that is the same without sizes is its own, or differs from it in open sizes alone. Code that
        leaves sizes open covers none if it could not be made, or failed; until it is there, it covers its own numbers
        alone."""
        is_for_numbers = self.state is State.HAS_CODE or self.spec.numbers == spec.numbers
        if self.spec.open and (self.state is State.EAGER or not is_for_numbers):
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
        return sum(case.waits for case in self)

    def case(self, call: Call) -> tuple[Case, Precompiled | None] | str:
        """The case of this call, made if it is new, and its function, which fits the call. One that arrives later may
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
                function = case.function
                if not (reason := case.misfit(function, spec, call)):
                    case.meet(module)
                    return case, function
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
        made = [case.function for case in own if case.function and not (case.serves_any or case.function.compared_on)]
        paths = {function.path for function in made}
        return f"code of the second process does not fit in this process: {misfit}" if len(paths) < len(made) else ""

    def _has_room(self, spec: CallSpec) -> bool:
        """Whether a case of this kind may be made. Kinds of which nothing is known make room."""
        kinds = {case.spec for case in self}
        if spec in kinds or len(kinds) < RECOMPILE_LIMIT:
            return True
        kept = {case.spec for case in self if case.state is not State.NEW or case.claimant}
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
            met = [one for one in alike if module in one.trials and (one is case or one.state is not State.NEW)]
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
