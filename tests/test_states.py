"""Cases of a kind: who waits for which code, and what an instance that it does not fit gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.calls.spec import Call, CallSpec, top_sizes
from compile_cache.of_each import OfEach
from compile_cache.serving.kinds import MOVES, Case, Kinds, Standing, State


class Code:
    """Code that fits the calls of which `fitting` is true."""

    def __init__(
        self, fitting: Callable[..., bool], path: str = "made.aot", compared_on: frozenset[str] = frozenset()
    ) -> None:
        self._fitting, self.path, self.compared_on = fitting, path, compared_on

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._fitting(*args)

    def misfit(self, call: Call) -> str:
        return "" if self._fitting(*call[1]) else "a guard failed"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None


def case_of(kinds: Kinds, module: nn.Module, *args: Any) -> Case:
    found = kinds.case((module, args, {}))
    assert not isinstance(found, str), found
    return found[0]


def arrive(case: Case, code: Code) -> None:
    case.move(State.CLAIMED)
    case.arrive(code)
    assert case.state is State.ARRIVED


def third_size(kinds: Kinds, module: nn.Module) -> Case:
    """The case of 32 rows; those of 16 and of 24 are being made."""
    for rows in (16, 24):
        case_of(kinds, module, torch.ones(rows, 4)).move(State.CLAIMED)
    return case_of(kinds, module, torch.ones(32, 4))


def serve(case: Case, module: nn.Module) -> None:
    """As after a comparison that passed."""
    case.standings[module] = Standing.SERVES


def test_the_states_are_walked_as_the_table_says_and_eager_is_the_end():
    for start in State:
        for end in State:
            case = Case(CallSpec("", (), (), (), (), ()), start)
            assert case.move(end) is (end in MOVES[start])
            assert case.state is (end if end in MOVES[start] else start)
    ends = {state for state in State if not MOVES[state]}
    assert ends == {State.EAGER}
    given_up = {*State} - ends - {State.LATE, State.GROWING}  # these two end in NEW
    assert all(State.EAGER in MOVES[state] for state in given_up)
    ends, found = {State.NEW}, {State.NEW}
    while ends := {end for state in ends for end in MOVES[state]} - found:
        found |= ends
    assert found == {*State}


def test_code_that_arrives_for_an_eager_case_serves_nothing():
    kinds, module = Kinds(), nn.Identity()
    case = case_of(kinds, module, 1)
    case.move(State.EAGER)
    case.arrive(Code(lambda number: True))
    assert (case.state, case.code) == (State.EAGER, None)


def test_graphs_of_torch_compile_serve_the_numbers_alone_that_they_were_compared_with():
    kinds, module, cases = Kinds(), nn.Identity(), []
    for number in range(8):
        cases.append(case_of(kinds, module, number))
        arrive(cases[-1], Code(lambda number: True, path=""))
        serve(cases[-1], module)
    assert len(set(map(id, cases))) == 8
    assert [case_of(kinds, module, number) for number in range(8)] == cases
    assert "changes from call to call" in kinds.case((module, (8,), {}))


def test_an_instance_that_no_graph_fitted_gets_another_case():
    kinds, module, other = Kinds(), nn.Identity(), nn.Identity()
    case = case_of(kinds, module, 1)
    arrive(case, Code(lambda number: True, path=""))
    case.standings[module] = Standing.DOES_NOT_FIT
    assert case_of(kinds, module, 1) is not case
    assert case_of(kinds, other, 1) is case


def test_a_size_that_code_for_all_sizes_does_not_fit_gets_code_of_its_own():
    kinds, module = Kinds(), nn.Identity()
    dynamic, known = third_size(kinds, module), next(iter(kinds))
    for known.state, opened in ((State.NEW, ()), (State.EAGER, ((0, 0),))):  # for one that is NEW again, code is stored
        kinds.leave_sizes_open(dynamic, module)
        assert dynamic.spec.open == opened
    arrive(dynamic, Code(lambda x: x.shape[0] % 8 == 0))
    assert case_of(kinds, module, torch.ones(40, 4)) is dynamic
    assert case_of(kinds, module, torch.ones(32, 4)) is dynamic
    seventh = torch.ones(7, 4)
    own = case_of(kinds, module, seventh)
    assert (own.spec.open, own.state) == ((), State.NEW)
    assert case_of(kinds, module, seventh) is own


def test_the_widths_of_several_modules_of_a_class_are_not_taken_for_a_varying_length():
    kinds = Kinds()
    for width in (16, 32, 48, 64):
        module, tensor = nn.Linear(width, width), torch.ones(4, width)
        case = case_of(kinds, module, tensor)
        kinds.leave_sizes_open(case, module)
        assert not case.spec.open


def test_an_instance_of_another_structure_makes_calls_of_another_kind():
    kinds, one, alike, other = Kinds(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    case = case_of(kinds, one, 1)
    assert case_of(kinds, alike, 1) is case
    assert case_of(kinds, other, 1) is not case


@pytest.mark.parametrize(("paths", "reason"), [(range(8), "call to call"), ((0, 0), "process: a guard failed")])
def test_code_that_fits_no_call_is_made_eight_times_and_the_same_code_twice(paths, reason):
    """A call may change its own inputs, as a cache that counts does, so code for one does not fit the next."""
    kinds, module = Kinds(), nn.Identity()
    for path in paths:
        arrive(case_of(kinds, module, 1), Code(lambda _: False, path=f"{path}.aot"))
    assert reason in kinds.case((module, (1,), {}))


def test_instances_with_numbers_of_their_own_get_code_each_and_one_whose_number_changes_gets_8():
    kinds, modules, changing = Kinds(), [nn.Identity() for _ in range(12)], nn.Identity()
    for number, module in enumerate(modules):
        case = case_of(kinds, module, number)
        arrive(case, Code(lambda found, number=number: found == number))
        serve(case, module)
    for number in range(100, 108):  # each time another one by the time at which its code arrives
        case = case_of(kinds, changing, number)
        assert case.state is State.NEW
        arrive(case, Code(lambda _: False, path=f"{number}.aot"))
    for number in (108, 109):
        assert "changes from call to call" in kinds.case((changing, (number,), {}))


def test_code_that_an_earlier_boot_compared_is_no_reason_to_make_none_for_one():
    kinds, modules, states = Kinds(), [nn.Identity() for _ in range(12)], []
    for number, module in enumerate(modules):
        states.append((case := case_of(kinds, module, number)).state)
        arrive(case, Code(lambda found, number=number: found == number, compared_on=frozenset({"a place"})))
        assert case.compared_on
        case.serve(modules)
    assert states == [State.NEW] * 12
    assert not any(case.is_to_compare(module) for case in kinds for module in modules)
    assert [case_of(kinds, module, number).spec.numbers for number, module in enumerate(modules)]


def test_an_object_may_end_with_the_mapping_that_holds_another_ones_value():
    one, other, values = nn.Identity(), nn.Identity(), OfEach[Any]()
    values[one], values[other] = other, None
    del other, values


def test_an_eager_case_hides_no_code_that_leaves_its_sizes_open():
    kinds, module, other = Kinds(), nn.Identity(), nn.Identity()
    dynamic = third_size(kinds, module)
    kinds.leave_sizes_open(dynamic, module)
    arrive(dynamic, Code(lambda x: True))
    case = next(case for case in kinds if case.spec.sizes == ((16, 4),))
    assert case.move(State.EAGER)
    assert case_of(kinds, other, torch.ones(16, 4)) is dynamic


def test_a_call_with_another_number_does_not_take_an_eager_case_from_its_instance():
    kinds, module = Kinds(), nn.Identity()
    for number in (1, 2):
        case_of(kinds, module, number).move(State.EAGER)
    cases = {id(case_of(kinds, module, number)) for number in (1, 2) * 10}
    assert len(cases) == 2


@pytest.mark.parametrize("told", [lambda number: (number,), lambda number: (str(number),)])
def test_calls_that_grow_cost_a_bounded_number_of_cases_whatever_else_they_are_told(told):
    kinds, module, cases = Kinds(), nn.Identity(), set()
    for number in range(200):
        found = kinds.case((module, (torch.ones(1, 4), torch.ones(5 + number, 4), *told(number)), {}))
        if isinstance(found, str):  # eager
            continue
        if (case := found[0]).state is State.NEW:
            cases.add(case)
            assert case.move(State.CLAIMED)
            assert case.move(State.GROWING)
        assert case.state is State.GROWING
    assert len(cases) <= 64
    assert len(list(kinds)) <= 64


def test_a_case_that_made_room_for_another_thread_is_ordered_as_it_is():
    kinds, module = Kinds(), nn.Identity()
    case = third_size(kinds, module)
    for number in range(62):
        case_of(kinds, module, str(number)).move(State.CLAIMED)
    assert case not in kinds
    assert case.move(State.CLAIMED)
    kinds.leave_sizes_open(case, module)
    assert not case.spec.open


def test_a_region_keeps_64_kinds():
    kinds, module = Kinds(), nn.Identity()
    for rows in range(100):  # of half of the calls nothing is known afterwards, as where new calls are errors
        case = case_of(kinds, module, torch.ones(rows, 4))
        rows % 2 or case.move(State.CLAIMED)
    assert case.state is State.NEW
    for rows in range(100, 114):
        case_of(kinds, module, torch.ones(rows, 4)).move(State.CLAIMED)
    assert "64 are kept" in kinds.case((module, (torch.ones(150, 4),), {}))
    assert case_of(kinds, module, torch.ones(2, 4)).state is State.CLAIMED
    assert len(list(kinds)) == 64


def test_a_nested_tensor_can_be_described_and_has_no_size():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert top_sizes((nested, torch.ones(4)), {}) == (torch.Size([4]),)
    assert CallSpec.of((nn.Identity(), (nested,), {})) == CallSpec.of((nn.Identity(), (nested,), {}))
