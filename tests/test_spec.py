"""The description of a call: plain strides, kinds of calls, numbers, inputs that share memory, hooks."""

from __future__ import annotations

import torch
from accelerate import cpu_offload
from torch import nn

from compile_cache.calls.spec import CallSpec, overlaps, why_eager, with_plain_strides


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
            result = plain(tensor)
            kept = [
                (old, new)
                for old, new, size in zip(tensor.stride(), result.stride(), tensor.shape, strict=True)
                if size != 1
            ]
            assert all(old == new for old, new in kept)


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
    assert overlaps((x, x[:4], x[4:], x.clone())) == (0, "0 of (8,) (1,) 0", "0 of (8,) (1,) 4", 3)
    assert overlaps((x[:4], x[4:], torch.empty(0))) == (0, 1, 2)
    module = nn.Identity()
    one, other = x.view(2, 4), x.view(2, 4)
    calls = [(x, x), (x, x[:]), (x, x.clone()), (one, other), (one, one)]
    assert len({CallSpec.of(module, call, {}) for call in calls}) == len(calls)


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
