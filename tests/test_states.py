"""Cases of a kind: who waits for which code, and what an instance that it does not fit gets.

`Serving` plays any order of calls, answers and predictions, and tells what must never be, and what must be in the end.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from precompiling import Token, eager, tensor
from torch import nn

from compile_cache.background.orders import Order
from compile_cache.calls.pickling import receive
from compile_cache.calls.spec import CallSpec, top_sizes
from compile_cache.calls.torch_call import Call
from compile_cache.errors import ArtifactError
from compile_cache.inductor import stored_functions
from compile_cache.inductor.function_file import read_marks
from compile_cache.inductor.make import Answer
from compile_cache.of_each import OfEach
from compile_cache.serving import kinds as kinds_module
from compile_cache.serving import moment, supply
from compile_cache.serving.kinds import LEFT_OUT, MOVES, PASSED, Case, Kinds, State
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory


class Code:
    """A function that fits the calls of which `fitting(module, *args)` is true."""

    def __init__(
        self, fitting: Callable[..., bool], path: str = "made.aot", run: Callable[..., Any] = lambda *_: None
    ) -> None:
        self._fitting, self.path, self._run = fitting, path, run
        self.compared_on = frozenset[str]()

    def fits(self, call: Call) -> bool:
        return self._fitting(call[0], *call[1])

    def misfit(self, call: Call) -> str:
        return "" if self.fits(call) else "a guard failed"

    def outdated(self) -> str:
        return ""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(self.path, module, *args)


def case_of(kinds: Kinds, module: nn.Module, *args: Any) -> Case:
    found = kinds.case((module, args, {}))
    assert not isinstance(found, str), found
    return found[0]


def arrive(case: Case, code: Code) -> None:
    case.arrive(code)
    assert case.state is State.HAS_CODE


def third_size(kinds: Kinds, module: nn.Module, *told: Any) -> Case:
    """The case of 32 rows; those of 16 and of 24 are ordered."""
    for rows in (16, 24):
        case_of(kinds, module, torch.ones(rows, 4), *told).move(State.ORDERED)
    return case_of(kinds, module, torch.ones(32, 4), *told)


def test_the_states_are_walked_as_the_table_says_and_eager_is_the_end():
    for start in State:
        for end in State:
            case = Case(CallSpec("", (), (), (), (), ()), start)
            assert case.move(end) is (end in MOVES[start])
            assert case.state is (end if end in MOVES[start] else start)
        case = Case(CallSpec("", (), (), (), (), ()), start)
        case.arrive(code := Code(lambda *_: True))
        assert case.function is (code if State.HAS_CODE in MOVES[start] else None)
    assert {state for state in State if State.EAGER not in MOVES[state]} == {State.EAGER, State.GROWING}
    ends, found = {State.NEW}, {State.NEW}
    while ends := {end for state in ends for end in MOVES[state]} - found:
        found |= ends
    assert found == {*State}


def test_a_size_that_code_for_all_sizes_does_not_fit_gets_code_of_its_own():
    kinds, module = Kinds(), nn.Identity()
    dynamic, known = third_size(kinds, module), next(iter(kinds))
    for known.state, opened in ((State.NEW, ()), (State.EAGER, ((0, 0),))):  # for one that is NEW again, code is stored
        kinds.leave_sizes_open(dynamic, module)
        assert dynamic.spec.open == opened
    arrive(dynamic, Code(lambda _, x: x.shape[0] % 8 == 0))
    assert case_of(kinds, module, torch.ones(40, 4)) is dynamic
    assert case_of(kinds, module, torch.ones(32, 4)) is dynamic
    seventh = torch.ones(7, 4)
    own = case_of(kinds, module, seventh)
    assert (own.spec.open, own.state) == ((), State.NEW)
    assert case_of(kinds, module, seventh) is own


def test_where_code_for_all_sizes_could_not_be_made_each_size_gets_code_of_its_own():
    kinds, module = Kinds(), nn.Identity()
    dynamic = third_size(kinds, module)
    kinds.leave_sizes_open(dynamic, module)
    dynamic.move(State.EAGER)
    for rows in (32, 40):
        assert case_of(kinds, module, torch.ones(rows, 4)).state is State.NEW


def test_eight_cases_of_a_kind_leave_sizes_open():
    kinds, module = Kinds(), nn.Identity()
    case = third_size(kinds, module, 9)
    others = [Case(replace(case.spec, numbers=(str(number),), open=((0, 0),))) for number in range(8)]
    for alike, opened in ((others, ()), (others[1:], ((0, 0),))):
        kinds._cases[case.spec.without_sizes][3:] = alike
        kinds.leave_sizes_open(case, module)
        assert case.spec.open == opened


def test_code_for_all_sizes_serves_the_numbers_that_it_fits_once_it_is_there():
    kinds, module = Kinds(), nn.Identity()
    dynamic = third_size(kinds, module, 1)
    kinds.leave_sizes_open(dynamic, module)
    assert case_of(kinds, module, torch.ones(40, 4), 2) is not dynamic
    arrive(dynamic, Code(lambda _, x, number: number < 3))
    assert [case_of(kinds, module, torch.ones(48, 4), number) is dynamic for number in (1, 2, 3)] == [True, True, False]


def test_an_instance_that_a_function_does_not_fit_leaves_its_case():
    kinds, module, other = Kinds(), nn.Identity(), nn.Identity()
    case = case_of(kinds, module, 1)
    assert case_of(kinds, other, 2) is case
    arrive(case, Code(lambda _, number: number == 1))
    assert case_of(kinds, other, 2) is not case
    assert case.instances(False) == [module]


def test_an_instance_on_which_a_function_passed_stays_though_it_does_not_fit_a_call():
    """It may fit again, as after an adapter was taken out."""
    kinds, module = Kinds(), nn.Identity()
    arrive(case := case_of(kinds, module, 1), Code(lambda _, number: number == 1))
    case.trials[module] = PASSED
    assert case_of(kinds, module, 2) is not case
    assert case.serves(module)


def test_a_case_that_was_given_up_waits_for_no_comparison():
    kinds, module = Kinds(), nn.Identity()
    arrive(case := case_of(kinds, module, 1), Code(lambda *_: True))
    case.trials[module] = 1
    assert kinds.waiting == 1
    case.move(State.EAGER)
    assert kinds.waiting == 0


def test_the_widths_of_several_modules_of_a_class_are_not_taken_for_a_varying_length():
    kinds = Kinds()
    for width in (16, 32, 48, 64):
        module, tensor = nn.ReLU(), torch.ones(4, width)
        case = case_of(kinds, module, tensor)
        kinds.leave_sizes_open(case, module)
        assert not case.spec.open
        case.move(State.ORDERED)


@pytest.mark.parametrize(("paths", "reason"), [(range(8), "call to call"), ((0, 0), "process: a guard failed")])
def test_code_that_fits_no_call_is_made_eight_times_and_the_same_code_twice(paths, reason):
    """A call may change its own inputs, as a cache that counts does, so code for one does not fit the next."""
    kinds, module = Kinds(), nn.Identity()
    for path in paths:
        arrive(case_of(kinds, module, 1), Code(lambda *_: False, path=f"{path}.aot"))
    assert reason in kinds.case((module, (1,), {}))


def test_an_object_may_end_with_the_mapping_that_holds_another_ones_value():
    one, other, values = nn.Identity(), nn.Identity(), OfEach[Any]()
    values[one], values[other] = other, None
    del other, values


def test_an_eager_case_hides_no_code_that_leaves_its_sizes_open():
    kinds, module, other = Kinds(), nn.Identity(), nn.Identity()
    dynamic = third_size(kinds, module)
    kinds.leave_sizes_open(dynamic, module)
    arrive(dynamic, Code(lambda *_: True))
    case = next(case for case in kinds if case.spec.sizes == ((16, 4),))
    assert case.move(State.EAGER)
    assert case_of(kinds, other, torch.ones(16, 4)) is dynamic


@pytest.mark.parametrize("told", [lambda number: (number,), lambda number: (str(number),)])
def test_calls_that_grow_cost_a_bounded_number_of_cases_whatever_else_they_are_told(told):
    kinds, module, cases = Kinds(), nn.Identity(), set()
    for number in range(200):
        found = kinds.case((module, (torch.ones(1, 4), torch.ones(5 + number, 4), *told(number)), {}))
        if isinstance(found, str):  # eager
            continue
        if (case := found[0]).state is State.NEW:
            cases.add(case)
            assert case.move(State.GROWING)
        assert case.state is State.GROWING
    assert len(cases) <= 64
    assert len(list(kinds)) <= 64


def test_a_case_that_made_room_for_another_thread_is_ordered_as_it_is():
    kinds, module = Kinds(), nn.Identity()
    case = third_size(kinds, module)
    for number in range(62):
        case_of(kinds, module, str(number)).move(State.ORDERED)
    assert case not in kinds
    assert case.claim((module, (), {}))
    kinds.leave_sizes_open(case, module)
    assert not case.spec.open


def test_room_is_made_of_no_case_that_a_call_has_claimed():
    kinds, module = Kinds(), nn.Identity()
    case = case_of(kinds, module, "claimed")
    assert case.claim((module, (), {}))
    for number in range(100):
        case_of(kinds, module, str(number))
    assert case in kinds


def test_a_region_keeps_64_kinds():
    kinds, module = Kinds(), nn.Identity()
    for rows in range(100):  # of half of the calls nothing is known afterwards, as where new calls are errors
        case = case_of(kinds, module, torch.ones(rows, 4))
        rows % 2 or case.move(State.ORDERED)
    assert case.state is State.NEW
    for rows in range(100, 114):
        case_of(kinds, module, torch.ones(rows, 4)).move(State.ORDERED)
    assert "64 are kept" in kinds.case((module, (torch.ones(150, 4),), {}))
    assert case_of(kinds, module, torch.ones(2, 4)).state is State.ORDERED
    assert len(list(kinds)) == 64


def test_a_nested_tensor_can_be_described_and_has_no_size():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert top_sizes((nested, torch.ones(4)), {}) == (torch.Size([4]),)
    assert CallSpec.of((nn.Identity(), (nested,), {})) == CallSpec.of((nn.Identity(), (nested,), {}))


class Block(nn.Module):
    """The last one has another structure. Functions may depend on the number of its `own`."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.own, self.weight = place, 1, nn.Parameter(torch.ones(2 if place < 2 else 1))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * self.weight * self.own + number


class Stored(stored_functions.Artifacts):
    """Those of one folder, whose files have no content: `Serving` knows what they do."""

    def _groups(self, *_: Any) -> dict[str, Any]:
        return {"precompiled/group": {}}

    def _key(self, *_: Any) -> Any:
        raise ArtifactError("no graphs are stored")

    def _read(self, path: str) -> Any:
        return ()


BACKGROUND = Settings(cold_start="background", unseen="background")
# Kinds of calls, and functions of one kind of an instance, that are kept.
MOST_KINDS, MOST_FUNCTIONS = 3, 2
# The place of an instance, the rows of its input, and a number. A key has the number of the instance's own too.
Told = tuple[int, int, int]
Key = tuple[int, int, int, int]
CALLS = st.lists(st.tuples(st.sampled_from([0, 0, 1, 1, 2]), st.integers(1, 2), st.integers(1, 2)), max_size=5)


class Made(NamedTuple):
    """A function that the second process has made: what it fits, and the instance on which it is wrong, which no guard
    sees."""

    spec: CallSpec
    has_open_sizes: bool
    numbers: Collection[int]
    owns: Collection[int]
    wrong_on: int | None


class Serving(RuleBasedStateMachine):
    """Instances that are called in predictions, of which several may be open. The second process, memory and the clock
    are the rules'; all else is real."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.directory = CacheDirectory.claim(Path(self.folder.name))
        (self.directory.path / "precompiled/group").mkdir(parents=True)
        self.made: list[Made] = []
        self.clock, self.has_memory = 0, True
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(moment, "time", SimpleNamespace(monotonic=lambda: self.clock))
        self.patch.setattr(supply, "_GAP_S", 1e-6)
        self.patch.setattr(kinds_module, "RECOMPILE_LIMIT", MOST_KINDS)
        self.patch.setattr(kinds_module, "MOST_FUNCTIONS", MOST_FUNCTIONS)
        self.patch.setattr(kinds_module, "_SIZES_BEFORE_OPEN", 2)
        self.patch.setattr(stored_functions, "Artifacts", Stored)
        self.patch.setattr(stored_functions, "_load", lambda path: Code(partial(self.fits, path), path, self.run_code))
        # By path and place: what whole predictions have compared, and what is marked.
        self.whole, self.marks = set[tuple[str, int]](), set[tuple[str, int]]()
        self.boot()

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.what_passed_serves_in_the_end()
                self.all_orders_come_to_an_end()
        finally:
            self.patch.undo()
            self.folder.cleanup()
            os.close(self.directory.lock_fd)

    @precondition(lambda self: self.whole - self.marks)
    @rule()
    def boot(self) -> None:
        """Begin a process with the functions and the marks that are stored."""
        self.marks = self.read_marks()
        self.whole = {*self.marks}
        self.blocks = nn.ModuleList(map(Block, range(3)))
        self.blocks._repeated_blocks = ["Block"]
        self.regions = Regions(BACKGROUND, self.directory, is_hit=True)
        orders: Any = self.regions.supply.orders
        orders.queue = SimpleNamespace(put=self.put, waiting=0, release=int)
        orders.copy_in = lambda answer: (self.directory.path / answer.path).touch()
        self.regions.supply.open()
        self.regions.compile(self.blocks)
        self.regions.supply.release()
        (self.region,) = self.regions.by_class.values()
        # Orders with their calls, and lists that get the paths of their functions.
        self.orders: list[tuple[Order, Call, list[str]]] = []
        self.ordered: dict[tuple[int, CallSpec], list[list[str]]] = defaultdict(list)
        self.open: list[Token] = []
        self.ran: list[tuple[str, nn.Module]] = []
        # Functions that failed; by path and place, those that have passed, and those that may serve by now.
        self.failed, self.passed, self.taken = set[str](), set[tuple[str, int]](), set[tuple[str, int]]()
        # What served a call in this prediction; what has passed on a call; and all calls.
        self.codes, self.passed_on, self.called = dict[Key, str](), dict[Key, str](), set[Key]()

    # The second process's part.

    def put(self, order: Order) -> None:
        call, path = eager(receive, order.call), list[str]()
        self.orders.append((order, call, path))
        order.dynamic or self.ordered[call[0].place, eager(CallSpec.of, call)].append(path)

    @precondition(lambda self: self.orders)
    @rule(
        most=st.integers(1, 4),
        what=st.sampled_from(["no code", "no call", *["a number", "all numbers"] * 4]),
        has_open_sizes=st.booleans(),
        has_any_own=st.booleans(),
        wrong_on=st.sampled_from([None, None, 0, 1]),
    )
    def answer(self, most: int, what: str, has_open_sizes: bool, has_any_own: bool, wrong_on: int | None) -> None:
        for order, call, path in self.orders[:most]:
            if what == "no code":
                order.answer.set_result(Answer(reason="torch refuses"))
                continue
            numbers = {"no call": (), "a number": call[1][1:]}.get(what, range(9))
            owns = range(9) if has_any_own else (call[0].own,)
            made = Made(eager(CallSpec.of, call), has_open_sizes, numbers, owns, wrong_on)
            self.made += [made] * (made not in self.made)
            path.append(f"precompiled/group/{self.made.index(made)}.aot")
            order.answer.set_result(Answer(path[0], files=(path[0],)))
        del self.orders[:most]

    def function(self, path: str) -> Made:
        return self.made[int(Path(path).stem)]

    def fits(self, path: str, module: Block, x: torch.Tensor, number: int) -> bool:
        made, spec = self.function(path), CallSpec.of((module, (x, number), {}))
        is_kind = made.spec == spec or (made.has_open_sizes and made.spec.without_sizes == spec.without_sizes)
        return is_kind and number in made.numbers and module.own in made.owns

    def run_code(self, path: str, module: Block, *args: Any) -> torch.Tensor:
        assert self.fits(path, module, *args), "a function serves what it does not fit"
        self.ran.append((path, module))
        if not self.has_memory and module not in {*self.blocks}:
            raise MemoryError("none left for a comparison")
        return module.forward(*args) + (module.place == self.function(path).wrong_on)

    # Predictions and their calls.

    @precondition(lambda self: len(self.open) < 3)
    @rule(after_s=st.sampled_from([0, 0, 11]), calls=CALLS)
    def begin(self, after_s: int = 0, calls: Sequence[Told] = ()) -> None:
        self.clock += after_s
        if not self.open or self.clock - self.taken_at > 10:
            self.take()
        self.open.append(Token())
        self.regions.supply.moment.begin(self.open[-1])
        self.go_on(calls, True)

    def take(self) -> None:
        """Note that what has passed may serve from now on."""
        self.taken_at, self.taken = self.clock, {*self.passed}
        self.codes.clear()

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2), is_whole=st.booleans())
    def end(self, which: int = -1, is_whole: bool = True) -> None:
        self.regions.supply.moment.end(self.open.pop(which % len(self.open)), is_whole)
        if is_whole and not self.open:
            self.whole |= self.passed

    @precondition(lambda self: not self.open)
    @rule(calls=CALLS)
    def warm_up(self, calls: Sequence[Told]) -> None:
        with self.regions._watching():
            self.go_on(calls, True)
        self.whole |= self.passed

    @precondition(lambda self: not self.open)
    @rule(place=st.integers(0, 2), own=st.integers(1, 2))
    def change(self, place: int, own: int) -> None:
        self.blocks[place].own = own

    @rule(calls=CALLS, has_memory=st.sampled_from([True, True, True, False]))
    def go_on(self, calls: Sequence[Told], has_memory: bool) -> None:
        self.has_memory = has_memory
        for call in calls:
            self.call(call)

    def call(self, told: Told) -> str:
        """Returns the path of the function that serves a call, or empty."""
        place, rows, number = told
        block, x, code = self.blocks[place], tensor(rows, 2), ""
        key = *told, block.own
        if not self.open:
            self.take()
        self.ran.clear()
        self.called.add(key)
        answer = eager(block, x, number)
        assert torch.equal(answer, eager(block.forward, x, number)), "a wrong answer"
        for path, module in self.ran:
            if module is block:
                assert (path, place) in self.taken | self.marks, "what serves was not compared, or has just passed"
                code = path
            elif self.has_memory and place != self.function(path).wrong_on:
                self.passed.add((path, place))
                self.passed_on[key] = path
            elif self.has_memory and len(self.open) < 2:
                self.fail(path)
        if (before := self.codes.setdefault(key, code)) != code:
            is_proved = code and (before or (code, place) in self.marks)
            assert is_proved or before in self.failed, "what serves a call has changed within a prediction"
            self.codes[key] = code
        return code

    def fail(self, path: str) -> None:
        alike = [case for case in self.region.supply.kinds if case.function and case.function.path == path]
        assert {case.state for case in alike} == {State.EAGER}, "a function that has failed goes on"
        self.failed.add(path)
        for pairs in (self.passed, self.taken, self.marks, self.whole):
            pairs -= {(path, place) for place in range(3)}
        self.passed_on = {key: passed for key, passed in self.passed_on.items() if passed != path}

    def read_marks(self) -> set[tuple[str, int]]:
        marks = read_marks(self.directory.path, self.directory.scan())
        return {(path, int(place[-1])) for path, mark in marks.items() for place in mark.places}

    # What else must be.

    @invariant()
    def marks_are_proved_and_all_is_bounded(self) -> None:
        assert self.read_marks() <= self.whole, "a mark names an instance on which no whole prediction has compared it"
        assert len({case.spec for case in self.region.supply.kinds}) <= MOST_KINDS
        for (place, _), paths in self.ordered.items():
            others = {path for path, other in self.passed if other != place}
            assert sum(not {*path} & (others | self.failed) for path in paths) <= MOST_FUNCTIONS

    def what_passed_serves_in_the_end(self) -> None:
        """Also if predictions always overlap."""
        for *told, own in self.passed_on:
            self.begin(11)
            self.blocks[told[0]].own = own
            assert self.call(tuple(told)), "what has passed does not serve"

    def all_orders_come_to_an_end(self) -> None:
        """If they are answered, each call is served by a function in the end, or is eager for a reason."""
        self.has_memory = True
        while self.open:
            self.end()
        for place, rows, number, own in [*self.called]:
            self.blocks[place].own = own
            for _ in range(250):
                self.begin()
                code = self.call((place, rows, number))
                self.end()
                found = eager(self.region.supply.kinds.case, (self.blocks[place], (tensor(rows, 2), number), {}))
                if code or isinstance(found, str) or found[0].state is State.EAGER:
                    break
                if found[0].trials.get(self.blocks[place]) == LEFT_OUT:
                    break
                self.answer(99, "a number", False, False, None)
            else:
                raise AssertionError("a call is eager for no reason")


def test_what_the_second_process_makes_arrives_is_compared_and_serves():
    """If none arrived, `Serving` would tell nothing."""
    serving, told = Serving(), (0, 1, 1)
    served = []
    for _ in range(3):
        serving.begin()
        served.append(serving.call(told))
        serving.end()
        serving.answer(1, "a number", False, False, None) if serving.orders else None
    serving.teardown()
    assert served == ["", "", "precompiled/group/0.aot"]


TestServing = Serving.TestCase
