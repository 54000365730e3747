"""Cases of a kind: who waits for which code, and what an instance that it does not fit gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compile_cache.inductor.call_spec import CallSpec, top_sizes
from compile_cache.serving.kinds import Case, Kinds, State


class Code:
    """Code that fits the calls of which `fitting` is true."""

    step, path = "precompiled", "made.aot"

    def __init__(self, fitting: Callable[..., bool]) -> None:
        self._fitting = fitting

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self._fitting(*args)

    def misfit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return "" if self._fitting(*args) else "a guard failed"

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return None


def case_of(kinds: Kinds, module: nn.Module, *args: Any) -> Case:
    case, gone = kinds.case(module, args, {})
    assert case is not None
    assert gone == []
    return case


def test_an_instance_that_waited_for_code_that_does_not_fit_it_does_not_hold_that_code_back():
    kinds, one, other = Kinds(), nn.Identity(), nn.Identity()
    case = case_of(kinds, one, 1)
    assert kinds.claim(case)
    assert case_of(kinds, other, 2) is case
    case.arrive(Code(lambda number: number == 1))
    assert case_of(kinds, other, 2) is not case
    case.passed.add(one)
    assert case.has_passed


def test_code_does_not_wait_for_an_instance_that_was_left_out_when_another_called_again():
    kinds, one, absent = Kinds(), nn.Identity(), nn.Identity()
    case = case_of(kinds, absent, 1)
    assert case_of(kinds, one, 1) is case
    case.arrive(Code(lambda number: True))
    states = []
    case.passed.add(one)
    for caller in (one, one, absent):
        assert case_of(kinds, caller, 1) is case
        states.append(case.has_passed)
    assert states == [False, True, True]


def test_graphs_of_torch_compile_serve_the_numbers_alone_that_they_were_compared_with():
    kinds, module, cases = Kinds(), nn.Identity(), []
    for number in range(8):
        cases.append(case_of(kinds, module, number))
        graphs = Code(lambda number: True)
        graphs.step = "compiled"
        cases[-1].arrive(graphs)
        cases[-1].passed.add(module)
    assert len(set(map(id, cases))) == 8
    assert [case_of(kinds, module, number) for number in range(8)] == cases


def test_a_size_that_code_for_all_sizes_does_not_fit_gets_code_of_its_own():
    kinds, module = Kinds(), nn.Identity()
    for rows in (16, 24):
        case_of(kinds, module, torch.ones(rows, 4))
    third = torch.ones(32, 4)
    dynamic = kinds.opened(case_of(kinds, module, third), module, (third,), {})
    assert dynamic.dynamic == ((0, 0),)
    dynamic.arrive(Code(lambda x: x.shape[0] % 8 == 0))
    assert case_of(kinds, module, torch.ones(40, 4)) is dynamic
    seventh = torch.ones(7, 4)
    kinds.leave(case_of(kinds, module, seventh), module)
    own = case_of(kinds, module, seventh)
    assert (own.dynamic, own.state) == ((), State.NEW)
    assert case_of(kinds, module, seventh) is own


def test_the_widths_of_several_modules_of_a_class_are_not_taken_for_a_varying_length():
    kinds = Kinds()
    for width in (16, 32, 48, 64):
        module, tensor = nn.Linear(width, width), torch.ones(4, width)
        case = case_of(kinds, module, tensor)
        assert kinds.opened(case, module, (tensor,), {}) is case


def test_an_instance_of_another_structure_does_not_wait_for_code_that_cannot_fit_it():
    kinds, one, alike, other = Kinds(), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    case = case_of(kinds, one, 1)
    assert kinds.claim(case)
    case.order(one)
    assert case_of(kinds, alike, 1) is case
    assert case_of(kinds, other, 1) is not case


def test_code_that_fits_an_instance_again_is_not_compared_again():
    """As when an adapter is put in, and taken out again."""
    kinds, module, adapters = Kinds(), nn.Identity(), []
    without = case_of(kinds, module, 0)
    without.arrive(Code(lambda _: not adapters))
    without.passed.add(module)
    adapters.append("style")
    assert case_of(kinds, module, 0) is without
    kinds.leave(without, module)
    assert case_of(kinds, module, 0) is not without
    adapters.clear()
    kinds.leave(case_of(kinds, module, 0), module)
    assert case_of(kinds, module, 0) is without
    assert not without.is_to_compare(module)


def test_one_of_two_threads_finds_or_orders_the_code_of_a_new_case():
    kinds, module = Kinds(), nn.Identity()
    case = case_of(kinds, module, 1)
    assert [kinds.claim(case), kinds.claim(case)] == [True, False]


def test_a_nested_tensor_can_be_described_and_has_no_size():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert top_sizes((nested, torch.ones(4)), {}) == (torch.Size([4]),)
    assert CallSpec.of(nn.Identity(), (nested,), {}) == CallSpec.of(nn.Identity(), (nested,), {})
