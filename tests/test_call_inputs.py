"""A call's inputs: plain strides, copies that can take the place of the inputs, and kinds of calls."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from compile_cache.regions.inputs import Kept, kind_of_call, with_plain_strides


def plain(tensor: torch.Tensor) -> torch.Tensor:
    (result,), _ = with_plain_strides((tensor,), {})
    return result


def test_plain_strides_are_those_of_a_contiguous_tensor_where_no_address_depends_on_them():
    with torch.no_grad():
        sliced = torch.arange(128.0).view(1, 8, 16)[:, :4]
        assert sliced.stride() == (128, 16, 1)
        assert plain(sliced).stride() == (64, 16, 1)
        torch.testing.assert_close(plain(sliced), sliced)


def test_plain_strides_share_the_storage():
    with torch.no_grad():
        base = torch.zeros(1, 8, 16)
        plain(base[:, :4]).fill_(1.0)
        assert base.sum() == 64


def test_other_strides_stay():
    with torch.no_grad():
        for tensor in (torch.ones(2, 8, 16)[:, :4], torch.ones(1, 4, 8).transpose(1, 2), torch.ones(4).expand(3, 4)):
            result = plain(tensor)
            kept = [
                (old, new)
                for old, new, size in zip(tensor.stride(), result.stride(), tensor.shape, strict=True)
                if size != 1
            ]
            assert all(old == new for old, new in kept)


def test_contiguous_tensor_is_left_as_it_is():
    with torch.no_grad():
        tensor = torch.ones(1, 4)
        assert plain(tensor) is tensor


def test_where_gradients_are_recorded_nothing_is_changed():
    with torch.enable_grad():
        sliced = torch.ones(1, 8, 16, requires_grad=True)[:, :4]
        assert plain(sliced) is sliced
        assert torch.is_grad_enabled()


def test_keywords_have_plain_strides_as_well():
    with torch.no_grad():
        _, keywords = with_plain_strides((), {"x": torch.ones(1, 8, 16)[:, :4], "y": 3})
    assert keywords["x"].stride() == (64, 16, 1)
    assert keywords["y"] == 3


class Slotted:
    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen = [1]


class Cache:
    """As a language model's: objects with tensors, in lists and attributes."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(2)]
        self.length = 0
        self.names = {"first"}


class Writing(nn.Module):
    """Changes everything that it is given, and returns some of it."""

    def forward(self, x: torch.Tensor, cache: Cache, **others: Any) -> Any:
        x.add_(1)
        cache.layers[0].fill_(3)
        cache.layers.append(x)
        cache.length += 1
        cache.names.add("second")
        cache.extra = x[:1]
        for other in others.values():
            if isinstance(other, dict):
                other.pop("old")
                other["new"] = x
            elif isinstance(other, list):
                other.insert(0, x)
            else:
                other.seen.append(2)
        return x, cache, {"new": x + 1}


def test_a_call_on_copies_takes_the_place_of_the_call():
    x, cache, module = torch.ones(2), Cache(), Writing()
    layer = cache.layers[0]
    others = {"a": OrderedDict(old=1, kept=2), "b": [x], "c": Slotted(), "d": SimpleNamespace(seen=[])}
    kept = Kept(module, (x, cache), others)
    answer = kept.eager().output
    assert (x.tolist(), cache.length, others["b"]) == ([1, 1], 0, [x])
    returned = kept.give_back(answer)
    assert returned[0] is x
    assert returned[1] is cache
    assert x.tolist() == [2, 2]
    assert returned[2]["new"].tolist() == [3, 3]
    assert cache.layers[0] is layer
    assert layer.tolist() == [3, 3]
    assert cache.layers[1] is x
    assert (cache.length, cache.names, cache.extra.tolist()) == (1, {"first", "second"}, [2])
    assert (list(others["a"]), others["a"]["new"] is x) == (["kept", "new"], True)
    assert [each is x for each in others["b"]] == [True, True]
    assert (others["c"].seen, others["d"].seen) == ([1, 2], [2])


def test_copies_share_the_storage_that_the_inputs_share_and_the_module():
    base, module = torch.zeros(8), Writing()
    kept = Kept(module, (base[:4], base[2:]), {"owner": SimpleNamespace(module=module)})
    kept.args[0].fill_(1)
    assert kept.args[1].tolist() == [1, 1, 0, 0, 0, 0]
    assert kept.kwargs["owner"].module is module
    assert base.sum() == 0


def test_inputs_that_a_recorded_computation_has_made_are_copied():
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 2
        kept = Kept(Writing(), (x, Cache()), {})
    assert kept.args[0] is not x
    assert torch.equal(kept.args[0], x)


@pytest.mark.parametrize("inference", [False, True])
def test_unchanged_tensors_are_left_alone_in_whatever_mode_they_were_made(inference):
    with torch.inference_mode(inference):
        expanded, changed = torch.ones(1).expand(4), torch.zeros(2)
    kept = Kept(nn.Identity(), ([expanded, changed],), {})
    with torch.inference_mode(inference):
        kept.args[0][1].fill_(5)
    kept.give_back(None)
    assert changed.tolist() == [5, 5]


def test_kinds_of_calls_differ_by_shape_type_flag_and_training_and_not_by_numbers():
    module = nn.Sequential(nn.Linear(2, 2))
    calls = [(torch.ones(2, 2), 1.0, True), (torch.zeros(2, 2), 2.0, True)]
    assert len({kind_of_call(module, call, {}) for call in calls}) == 1
    others = [(torch.ones(3, 2), 1.0, True), (torch.ones(2, 2), 1, True), (torch.ones(2, 2), 1.0, False)]
    kinds = {kind_of_call(module, call, {}) for call in [*calls, *others]}
    module[0].eval()
    kinds.add(kind_of_call(module, calls[0], {}))
    with torch.inference_mode():
        kinds.add(kind_of_call(module, calls[0], {}))
    assert len(kinds) == 6
