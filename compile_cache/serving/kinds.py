"""The kinds of calls that met a region, and the state of each.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from compile_cache.inductor.call_spec import RECOMPILE_LIMIT, CallSpec, numbers_of, top_sizes
from compile_cache.inductor.describe import structure

# Functions for one kind of call of one instance. If more are needed, a number changes from call to call.
MOST_FUNCTIONS = 8
# After so many kinds that differ in one size only, a region asks for one function for all sizes.
_SIZES_BEFORE_DYNAMIC = 3
# A comparison that did not end is tried again after so many predictions.
_TRIES_AFTER = (1, 10, 100)
CHANGING = "a number or a flag changes from call to call, so no compiled code fits for long"


class State(enum.Enum):
    """How calls of a case are served.

    - NEW: stored code is looked for. With it, the case is ARRIVED; code that an earlier boot compared serves at once,
      once the server is READY. Without it, the policy decides: `background` orders code; `block` makes and compares it
      while the call waits, which eager answers; `eager` gives up; `error` raises, and the case stays NEW. It also stays
      NEW while another thread makes or compares code. In the warm-up, graphs that are stored are traced.
    - ORDERED: eager answers while one thread looks for code or makes it, or the second process does. Then: ARRIVED;
      EAGER if there will be none; NEW if the call that asked for it broke off.
    - ARRIVED: eager answers, and the code runs on a copy and is compared, once for each instance. EAGER after a
      difference, an error of the code, or four comparisons that did not end. When all instances that still make such
      calls have passed: PRECOMPILED or CACHED, between two predictions. A call that the code does not fit gets another
      case, here and below.
    - PRECOMPILED: a function compiled ahead of time answers. An instance that has not passed is compared first, unless
      the code `is_proved`. EAGER after a failed comparison, or an assertion of the function, which the call raises.
    - CACHED: graphs of `torch.compile` answer, of stored files or made in this process. An instance that has not passed
      is compared first. EAGER after a failed comparison, with all other graphs of the class. A call for which there is
      no graph is eager, and its instance is compared anew, eight times at most.
    - EAGER: the model's own code answers until the process ends. `Case.reason` says why.
    """

    NEW = "new"
    ORDERED = "ordered"
    ARRIVED = "arrived"
    PRECOMPILED = "precompiled"
    CACHED = "cached"
    EAGER = "eager"


class Code(Protocol):
    """Code that serves calls: a function compiled ahead of time, or a graph of `torch.compile`."""

    @property
    def step(self) -> str:
        """What it is called in metrics: `precompiled` or `compiled`."""

    @property
    def path(self) -> str:
        """Its file in the cache directory; empty if it has none."""

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it fits this call of a module that passed `misfit`. Takes some tens of microseconds."""

    def misfit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Why it does not fit this call, after the full check; empty if it fits."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that fits. Raises NoGraph if it does not."""

    def try_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call that is compared."""


@dataclass(slots=True, eq=False)
class Case:
    """Calls of one kind that one function fits, or will be made for. They have one state.

    | field | meaning |
    | --- | --- |
    | `spec`, `numbers` | the first such call |
    | `serves` | the `top_sizes` of the calls that its code may fit; None: of any sizes |
    | `reason` | why its calls are eager |
    | `code` | what serves them, once it has arrived |
    | `instances` | the modules that made such calls |
    | `called`, `round` | those that made one since the code arrived; those before one of them made another |
    | `passed` | those on which the code was compared; of proved code, those that it serves |
    | `ordered_by`, `ordered_as` | the module whose call was ordered, and its structure then |
    | `is_proved` | an earlier boot compared the code on all instances: one is enough, and none after READY |
    | `dynamic` | the (tensor, dimension) pairs that the code leaves open; it serves several kinds |
    | `tries`, `not_before` | comparisons that did not end, and the prediction from which on the next one may begin |
    | `used` | the clock of the last use |
    """

    spec: CallSpec
    numbers: tuple[str, ...]
    serves: tuple[torch.Size, ...] | None
    state: State = State.NEW
    reason: str = ""
    code: Code | None = None
    instances: set[nn.Module] = field(default_factory=set)
    called: set[nn.Module] = field(default_factory=set)
    round: set[nn.Module] | None = None
    passed: set[nn.Module] = field(default_factory=set)
    ordered_by: nn.Module | None = None
    ordered_as: tuple[Any, ...] = ()
    is_proved: bool = False
    dynamic: tuple[tuple[int, int], ...] = ()
    tries: int = 0
    not_before: int = 0
    used: int = 0

    @property
    def has_passed(self) -> bool:
        """Whether the code was compared on every instance that it has to be compared on. An instance that was left out
        between two calls of another may be gone, and is not waited for."""
        waited_for = self.instances if self.round is None else self.round
        return bool(self.passed) and (self.is_proved or waited_for <= self.passed)

    def is_to_compare(self, module: nn.Module) -> bool:
        """Whether the code was not compared on this instance, and has to be."""
        return module not in self.passed and not (self.is_proved and self.passed)

    def order(self, module: nn.Module) -> None:
        """Note that the code is ordered with a call of `module`."""
        self.state, self.ordered_by, self.ordered_as = State.ORDERED, module, structure(module)

    def arrive(self, code: Code) -> None:
        """Take code that has to be compared."""
        self.code, self.state = code, State.ARRIVED
        self.called, self.round = set(), None

    def put_off(self, prediction: int) -> bool:
        """Note that a comparison did not end in this prediction; False if there were too many."""
        if self.tries == len(_TRIES_AFTER):
            return False
        self.not_before = prediction + _TRIES_AFTER[self.tries]
        self.tries += 1
        return True


@dataclass(slots=True, eq=False)
class _Kind:
    """The cases of one kind. `asked` counts the cases of each instance; `changing` is for those that had too many."""

    changing: Case
    cases: list[Case] = field(default_factory=list)
    asked: Counter[nn.Module] = field(default_factory=Counter)


class Kinds:
    """All kinds of one region, at most 64. To make room for another, one that does not wait for code is dropped: first
    those without code, then those used longest ago. Its calls are eager from then on."""

    def __init__(self) -> None:
        self._kinds: dict[CallSpec, _Kind] = {}
        self._forgotten: set[int] = set()
        # By kind without sizes, and numbers: the functions that leave sizes open, and the sizes that they leave open.
        self._open: dict[tuple[CallSpec, tuple[str, ...]], list[Case]] = {}
        self._clock = itertools.count(1)
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Case]:
        """Every case, once."""
        with self._lock:
            return iter(list({id(case): case for kind in self._kinds.values() for case in kind.cases}.values()))

    @property
    def waiting(self) -> int:
        """How many cases are served eager until their code arrives."""
        return sum(case.state is State.ORDERED for case in self)

    def note_use(self, case: Case) -> None:
        """Note that a case's code serves a call."""
        case.used = next(self._clock)

    def case(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Case | None, list[Case]]:
        """The case of this call, made if it is new, and the cases that were dropped for it. There is no case if this
        kind was dropped earlier, or if there is no room for it."""
        spec, numbers = CallSpec.of(module, args, kwargs), numbers_of(args, kwargs)
        with self._lock:
            kind, gone = self._kind(spec)
            if kind is None:
                return None, gone
            case = self._case(kind, spec, numbers, module, args, kwargs)
            case.instances.add(module)
            if module in case.called:
                case.round, case.called = case.called, set()
            case.called.add(module)
            self.note_use(case)
            return case, gone

    def _kind(self, spec: CallSpec) -> tuple[_Kind | None, list[Case]]:
        gone: list[Case] = []
        if spec not in self._kinds:
            if hash(spec) in self._forgotten:
                return None, gone
            if len(self._kinds) >= RECOMPILE_LIMIT:
                idle = [one for one, kind in self._kinds.items() if State.ORDERED not in {c.state for c in kind.cases}]
                if not idle:
                    return None, gone
                least = min(idle, key=self._worth)
                gone = [case for case in self._kinds.pop(least).cases if not case.dynamic]
                self._forgotten.add(hash(least))
            self._kinds[spec] = _Kind(Case(spec, (), None, State.EAGER, CHANGING))
        return self._kinds[spec], gone

    def _worth(self, spec: CallSpec) -> tuple[bool, int]:
        """Whether a kind has code, and when it was last used: those worth least are dropped first."""
        cases = self._kinds[spec].cases
        return any(case.code for case in cases), max((case.used for case in cases), default=0)

    def _case(
        self, kind: _Kind, spec: CallSpec, numbers: tuple[str, ...], module: nn.Module, args: Any, kwargs: Any
    ) -> Case:
        kind.cases = [case for case in kind.cases if not (case.dynamic and case.state is State.EAGER)]
        for case in kind.cases:
            if case.numbers == numbers and module in case.instances:
                return case
        if kind.asked[module] >= MOST_FUNCTIONS:
            return kind.changing
        for case in kind.cases:
            if _is_same(case, numbers, module, args, kwargs):
                return case
            if module not in case.passed:  # it waited for this code
                case.instances.discard(module)
        kind.asked[module] += 1
        alike = self._open.get((spec.without_sizes, numbers), ())
        covering = (case for case in alike if _covers(case, spec) and case not in kind.cases)
        case = next(covering, None) or Case(spec, numbers, top_sizes(args, kwargs))
        kind.cases.append(case)
        return case

    def claim(self, case: Case) -> bool:
        """Let one thread alone find or order the code of a new case."""
        with self._lock:
            is_new = case.state is State.NEW
            case.state = State.ORDERED if is_new else case.state
            return is_new

    def leave(self, case: Case, module: nn.Module) -> None:
        """Note that a case's code does not fit `module` now, whose next call gets another case. If it fits again later,
        as after an adapter was taken out, it is not compared again."""
        with self._lock:
            for modules in (case.instances, case.called, case.round or set()):
                modules.discard(module)

    def miss(self, case: Case, module: nn.Module, times: int = 1) -> None:
        """Note that no graph fits a call of `module`, which is compared again. After eight times, it is eager."""
        with self._lock:
            if kind := self._kinds.get(case.spec):
                kind.asked[module] += times
                if kind.asked[module] >= MOST_FUNCTIONS:
                    self.leave(case, module)
            case.passed.discard(module)

    def opened(self, case: Case, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Case:
        """The case to order in place of `case`: one that leaves sizes open, if kinds of calls of `module` differ in one
        size of a tensor; else `case` itself."""
        spec, numbers = CallSpec.of(module, args, kwargs), numbers_of(args, kwargs)
        with self._lock:
            if case.dynamic or spec not in self._kinds:  # which may have been dropped meanwhile
                return case
            key = spec.without_sizes, numbers
            alike = [
                other.sizes
                for other, kind in self._kinds.items()
                if other.without_sizes == spec.without_sizes
                and _is_alike(other.sizes, spec.sizes)
                and any(module in one.instances for one in kind.cases)  # other modules may have another width
            ]
            if len(set(alike)) < _SIZES_BEFORE_DYNAMIC:
                return case
            varying = tuple(sorted(set().union(*(_differing(sizes, spec.sizes) for sizes in alike))))
            known = self._open.setdefault(key, [])
            if len({number for number, _ in varying}) != len(varying) or any(varying == one.dynamic for one in known):
                return case
            dynamic = Case(spec, numbers, None, State.ORDERED, instances=case.instances, dynamic=varying)
            known.append(dynamic)
            kind = self._kinds[spec]
            kind.cases = [dynamic if one is case else one for one in kind.cases]
            return dynamic


def _is_same(case: Case, numbers: tuple[str, ...], module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a case's code fits a call with other numbers or of another instance, or may fit it once it arrives."""
    code = case.code
    if code is None:
        is_open = case.numbers == numbers or case.state in (State.NEW, State.ORDERED)
        return is_open and (case.ordered_by is None or case.ordered_as == structure(module))
    if code.step != "precompiled":  # of graphs, only the call itself finds out
        return case.numbers == numbers
    return not code.misfit(module, args, kwargs)


def _covers(case: Case, spec: CallSpec) -> bool:
    """Whether a case that leaves sizes open fits this kind too, and did not fail."""
    return (
        case.state is not State.EAGER
        and _is_alike(case.spec.sizes, spec.sizes)
        and _differing(case.spec.sizes, spec.sizes) <= set(case.dynamic)
    )


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
