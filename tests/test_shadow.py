"""A copy of a call: what is copied, what is shared, and that a run on it changes nothing of the call."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving_faults import DEFAULT, Mode
from torch import nn

from compile_cache.calls.shadow import Shadow
from compile_cache.errors import NotHandedOver


class Stateful(nn.Module):
    """Has all that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("state", torch.zeros(4))
        self.seen: list[int] = []
        self.lock, self.double, self.mode = threading.Lock(), lambda x: x * 2, DEFAULT
        self.generator = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            self.seen.append(len(self.seen))
            self.state.add_(1)
            return self.double(self.linear(x)) + torch.rand(2, generator=self.generator)


def test_a_run_on_a_copy_changes_nothing_of_the_call():
    module, x = Stateful(), torch.ones(2)
    shadow = Shadow(module, (x,), {"cache": [x]})
    before = module.generator.get_state()
    with torch.no_grad():
        first, second = (copied(*args) for copied, args, _ in (shadow.copied(), shadow.copied()))
    assert torch.equal(first, second)
    assert (module.seen, module.state.sum(), shadow.module.seen) == ([], 0, [])
    assert torch.equal(module.generator.get_state(), before)


def test_parameters_functions_locks_and_what_has_a_name_are_shared():
    module = Stateful()
    copied = Shadow(module, (Mode(),), {}).module
    for name in ("lock", "double", "mode"):
        assert getattr(copied, name) is getattr(module, name)
    assert copied.linear.weight is module.linear.weight
    assert copied.linear is not module.linear


def test_views_of_one_storage_and_one_object_in_two_places_stay_so():
    base, module = torch.zeros(8), Stateful()
    module.state = base[:4]
    shadow = Shadow(module, (base[2:6],), {"owner": SimpleNamespace(module=module, base=base)})
    shadow.args[0].fill_(1)
    assert shadow.module.state.tolist() == [0, 0, 1, 1]
    assert shadow.kwargs["owner"].base.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert shadow.kwargs["owner"].module is shadow.module
    assert base.sum() == 0


def test_a_view_that_overlaps_another_tensor_keeps_its_base_as_code_for_both_depends_on_it():
    module = Stateful()
    module.state = torch.zeros(2, 4, 8)
    module.flat = module.state.view(8, 8)[2:]
    copied = Shadow(module, (), {}).copied()[0]
    assert copied.flat._base is copied.state
    assert (copied.flat.shape, copied.flat.storage_offset()) == ((6, 8), 16)
    copied.flat[0].fill_(1)
    assert (copied.state.sum(), module.state.sum()) == (8, 0)


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_is_an_inference_tensor_where_the_original_is_one(inference):
    with torch.inference_mode(inference):
        x = torch.ones(3)
    copied = Shadow(nn.Identity(), (x,), {}).args[0]
    assert copied.is_inference() == inference
    assert torch.equal(copied, x)


def test_a_module_outside_the_region_is_shared():
    outside = nn.Linear(2, 2)
    assert Shadow(nn.Identity(), (outside,), {}).args[0] is outside


def test_what_cannot_be_copied_is_said():
    class Single:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("there is only one")

    with pytest.raises(NotHandedOver, match="there is only one"):
        Shadow(nn.Identity(), (Single(),), {})
