"""Descriptions that mean the same in another process, and those that must differ."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any, Literal

import blocks
import pytest
import torch
from accelerate import cpu_offload
from boots import TESTS
from programs import run_program
from torch import nn

from compile_cache.calls.description import NotDescribedError, code_digest, describe
from compile_cache.calls.module_state import why_eager
from compile_cache.calls.overlaps import overlaps
from compile_cache.calls.spec import CallSpec, on_gpu, with_plain_strides
from compile_cache.inductor.torch_state import describe_switches, switches
from compile_cache.key.environment import digest


def first(x):
    def nested(y):
        return y + 1

    return nested(x) in {"one", "two", "three", "four"}


def same_as_first():
    """Of the same code as `first`, made a second time."""
    space: dict[str, object] = {}
    exec(compile("\n\n\n" + inspect.getsource(first), "elsewhere.py", "exec"), space)
    return space["first"]


def printed(code: str, hash_seed: int) -> str:
    """What a process whose strings hash by this seed prints."""
    return run_program(code, folder=TESTS, PYTHONHASHSEED=str(hash_seed)).stdout.strip()


def test_code_has_the_same_digest_in_another_process_whose_strings_hash_differently():
    (words,) = (constant for constant in first.__code__.co_consts if isinstance(constant, frozenset))
    in_order = f"print([*frozenset({sorted(words)})])"
    other_seed = next(seed for seed in range(100) if printed(in_order, seed) != str([*words]))
    digested = printed("import test_description as t; print(t.code_digest(t.first.__code__))", other_seed)
    assert digested == code_digest(first.__code__)


def test_code_has_the_same_digest_wherever_it_stands():
    assert code_digest(first.__code__) == code_digest(same_as_first().__code__)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)),
        (lambda x: x in {"one", "two"}, lambda x: x in {"one", "three"}),
        (lambda x: math.sin(x), lambda x: math.cos(x)),
        (lambda: 1, lambda: 1.0),
        (lambda: 1, lambda: True),
        (blocks.combine, blocks.combine_otherwise),
    ],
)
def test_code_that_does_something_else_has_another_digest(one, other):
    assert code_digest(one.__code__) != code_digest(other.__code__)


DESCRIBED = {
    "none": None,
    "flag": True,
    "whole number": 1,
    "number": 1.0,
    "negative zero": -0.0,
    "zero": 0.0,
    "complex": 1j,
    "text": "1",
    "bytes": b"1",
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "memory format": torch.channels_last,
    "member": blocks.Kind.SMALL,
    "other member": blocks.Kind.LARGE,
    "class": blocks.Block,
    "module": math,
    "function": blocks.double,
    "other function": blocks.triple,
    "code": blocks.double.__code__,
    "tuple": (1, 2),
    "list": [1, 2],
    "tuple of numbers": (1.0, 2),
    "set": {1, 2},
    "frozenset": frozenset({1, 2}),
    "method": blocks.Inner().forward,
    "builtin": len,
    "torch's builtin": torch.mm,
    "builtin of C": torch._C._get_tracing_state,
    "operator": torch.ops.aten.mm.default,
    "operator packet": torch.ops.aten.mm,
    "slot": dict.__getitem__,
    "cached": functools.lru_cache(blocks.double),
    "union": int | None,
    "other union": int | str,
    "union by its old name": typing.Optional[int],  # noqa: UP045
    "generic": list[int],
    "other generic": list[str],
    "generic by its old name": typing.List[int],  # noqa: UP006
    "generic of anything": typing.List,  # noqa: UP006
    "function's type": Callable[[int], str],
    "other function's type": Callable[..., str],
    "function's type by its old name": typing.Callable[[int], str],
    "literal": Literal["a"],
    "ellipsis": ...,
}


def test_each_kind_of_value_has_a_description_of_its_own():
    assert len({digest(describe(value)) for value in DESCRIBED.values()}) == len(DESCRIBED)


@pytest.mark.parametrize(
    "value", [object(), blocks.ANYTHING, [object()], {1: 2}, functools.partial(len), blocks.Inner()]
)
def test_what_only_this_process_can_tell_from_another_is_not_described(value):
    with pytest.raises(NotDescribedError):
        describe(value)


def inputs(*args: Any) -> Any:
    return CallSpec.of((nn.Identity(), args, {})).stored


def test_inputs_has_constants_by_value_and_type_but_numbers_by_type_alone():
    described = [inputs(value) for value in (1, 1.0, True, False, "1", "2", None)]
    assert len({digest(each) for each in described}) == len(described)
    assert inputs(1) == inputs(2)


def test_threads_are_no_switch_of_a_call_whose_tensors_are_all_on_a_gpu():
    on_cpu, elsewhere = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert on_gpu((elsewhere, (there,), {"x": [there]}))
    assert not on_gpu((elsewhere, (there,), {"x": [here]}))
    assert not on_gpu((on_cpu, (there,), {}))
    assert not on_gpu((nn.Identity(), (1.0,), {}))
    assert "threads" not in describe_switches(switches(on_gpu=True))


def test_every_switch_has_a_name():
    assert describe_switches(switches(on_gpu=False))["default dtype"] == "torch.float32"
    assert len(describe_switches(switches(on_gpu=False))) == len(switches(on_gpu=False))


# Of calls: plain strides, kinds, numbers, inputs that share memory, hooks.


def plain(tensor: torch.Tensor) -> torch.Tensor:
    (result,), _ = with_plain_strides((tensor,), {})
    return result


def test_plain_strides_are_those_of_a_contiguous_tensor_where_no_address_depends_on_them_in_the_same_storage():
    with torch.no_grad():
        base = torch.arange(128.0).view(1, 8, 16)
        sliced = base[:, :4]
        assert sliced.stride() == (128, 16, 1)
        assert plain(sliced).stride() == (64, 16, 1)
        torch.testing.assert_close(plain(sliced), sliced)
        plain(sliced).fill_(1.0)
        assert (base == 1).sum() == 64
        assert plain(base) is base, "it is contiguous"


def test_other_strides_stay():
    with torch.no_grad():
        for tensor in (torch.ones(2, 8, 16)[:, :4], torch.ones(1, 4, 8).transpose(1, 2), torch.ones(4).expand(3, 4)):
            for old, new, size in zip(tensor.stride(), plain(tensor).stride(), tensor.shape, strict=True):
                assert old == new or size == 1


def test_where_gradients_are_recorded_nothing_is_changed():
    with torch.enable_grad():
        sliced = torch.ones(1, 8, 16, requires_grad=True)[:, :4]
        assert plain(sliced) is sliced
        assert torch.is_grad_enabled()


def test_keywords_have_plain_strides_as_well_and_one_tensor_stays_one():
    with torch.no_grad():
        x, tagged = (torch.ones(1, 8, 16)[:, :4] for _ in range(2))
        tagged.tag = "a model's own"
        args, keywords = with_plain_strides((x, tagged), {"x": x, "y": 3})
    assert keywords["x"].stride() == (64, 16, 1)
    assert (args[0] is keywords["x"], args[1] is tagged, keywords["y"]) == (True, True, 3)


def test_inputs_that_share_memory_are_another_kind():
    x = torch.arange(8.0)
    assert overlaps((x, x[:4], x[4:], x.clone())) == ((1, 0), (2, 0))
    assert overlaps((x[:4], x[4:], torch.empty(0))) == ()
    module = nn.Identity()
    one, other = x.view(2, 4), x.view(2, 4)
    calls = [(x, x), (x, x[:]), (x, x.clone()), (one, other), (one, one)]
    assert len({CallSpec.of((module, call, {})) for call in calls}) == len(calls)


def test_a_hook_a_forward_of_its_own_and_a_compiled_part_are_named():
    def hooked() -> nn.Module:
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].register_forward_hook(lambda *_: None)
        return module

    own, compiled, offloaded = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    own[0].forward = lambda x: x
    compiled[0].compile()
    cpu_offload(offloaded[0], "cpu")
    assert why_eager(hooked()) == "0 has a hook"
    assert why_eager(own) == "0 has its own `forward` attribute"
    assert why_eager(compiled) == "0 is compiled by another torch.compile. Take that away"
    assert why_eager(torch.compile(nn.Linear(2, 2))) == "it is compiled by another torch.compile. Take that away"
    assert why_eager(offloaded) == "accelerate moves the weights of 0 in each call. Offload whole models, or nothing"
    assert why_eager(nn.utils.spectral_norm(nn.Linear(2, 2))) == ""
    assert why_eager(nn.Linear(2, 2)) == ""
