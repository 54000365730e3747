"""A copy of a call: what is copied, and what is shared. test_serving_faults.py has what a run on it leaves alone."""

from __future__ import annotations

import threading

import pytest
import torch
from serving_faults import DEFAULT, Mode
from torch import nn

from compile_cache.calls.shadow import Shadow


class Stateful(nn.Module):
    """Has what a copy shares, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("state", torch.zeros(4))
        self.lock, self.double, self.mode = threading.Lock(), lambda x: x * 2, DEFAULT


def test_parameters_functions_locks_and_what_has_a_name_are_shared():
    module = Stateful()
    copied = Shadow((module, (Mode(),), {})).call[0]
    for name in ("lock", "double", "mode"):
        assert getattr(copied, name) is getattr(module, name)
    assert copied.linear.weight is module.linear.weight
    assert copied.linear is not module.linear


def test_a_view_that_overlaps_another_tensor_does_so_in_a_copy_of_a_copy():
    module = Stateful()
    module.state = torch.zeros(2, 4, 8)
    module.flat = module.state.view(8, 8)[2:]
    copied = Shadow((module, (), {})).copied()[0]
    copied.flat[0].fill_(1)
    assert (copied.state.sum(), module.state.sum()) == (8, 0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_is_an_inference_tensor_where_the_original_is_one(inference):
    with torch.inference_mode(inference):
        x = torch.ones(3)
    copied = Shadow((nn.Identity(), (x,), {})).call[1][0]
    assert copied.is_inference() == inference
    assert torch.equal(copied, x)


def test_a_module_outside_the_region_is_shared():
    outside = nn.Linear(2, 2)
    assert Shadow((nn.Identity(), (outside,), {})).call[1][0] is outside


def test_a_generator_of_the_modules_own_is_copied_with_its_state():
    module = Stateful()
    module.generator = torch.Generator().manual_seed(7)
    copied = Shadow((module, (), {})).call[0].generator
    assert torch.rand((), generator=copied) == torch.rand((), generator=module.generator)


def test_a_tensor_without_a_plain_storage_is_copied():
    x = torch.ones(3).to_sparse()
    copied = Shadow((nn.Identity(), (x,), {})).call[1][0]
    copied._values().fill_(2)
    assert torch.equal(x.to_dense(), torch.ones(3))
