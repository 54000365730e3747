"""Layers for a model that serves one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from models.text.layers import GatedMLP, TokenLinear, TokenNorm, use_token_layers


def type_after(layer: nn.Module, given: torch.Tensor, **tolerance: float) -> type[nn.Module]:
    """What the layer has become, which computes the same and has parameters of the same names."""
    model = nn.Sequential(layer)
    expected = model(given)
    names = [name for name, _ in model.named_parameters()]
    use_token_layers(model)
    assert [name for name, _ in model.named_parameters()] == names
    torch.testing.assert_close(model(given), expected, **tolerance)
    return type(model[0])


def test_linear_layers_are_replaced_and_keep_their_weights():
    model = nn.Sequential(nn.Linear(8, 4), nn.ModuleDict({"inner": nn.Linear(4, 6, bias=False)}))
    weights = [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()]
    use_token_layers(model)
    assert [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()] == weights
    assert type(model[0]) is type(model[1]["inner"]) is TokenLinear


def test_hooked_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), mlp())
    model[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    model[1].register_forward_pre_hook(lambda module, inputs: None)
    use_token_layers(model)
    assert (type(model[0]), type(model[1])) == (nn.Linear, LlamaMLP)


def mlp(kind: type[LlamaMLP] = LlamaMLP, **changes: Any) -> LlamaMLP:
    return kind(LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=40, **changes))


def norm(kind: type[LlamaRMSNorm] = LlamaRMSNorm) -> LlamaRMSNorm:
    made = kind(16)
    nn.init.uniform_(made.weight, 0.5, 1.5)
    return made


class OtherMlp(LlamaMLP):
    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return down_proj


def test_a_linear_layer_and_a_gated_mlp_are_replaced_and_compute_the_same():
    for tokens in (1, 3):
        assert type_after(nn.Linear(16, 4), torch.randn(1, tokens, 16), atol=0, rtol=0) is TokenLinear
        assert type_after(mlp(), torch.randn(1, tokens, 16)) is GatedMLP


class OtherNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(inputs)


OTHERS = [mlp(OtherMlp), mlp(hidden_act="gelu"), mlp(mlp_bias=True), norm(OtherNorm), Doubled(16, 4)]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_what_computes_something_else_is_left_alone(other):
    assert type_after(other, torch.randn(1, 1, 16)) is type(other)


@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 3, 16), (1, 1, 4, 16)])
@pytest.mark.parametrize(
    ("norm_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
def test_a_norm_is_replaced_and_computes_the_same(shape, norm_dtype, dtype):
    """A norm of another type than its input promotes."""
    assert type_after(norm().to(norm_dtype), torch.randn(shape, dtype=dtype), atol=0, rtol=0) is TokenNorm


def test_vectors_without_a_batch_do_not_reach_the_operators():
    model = nn.Sequential(norm(), nn.Linear(16, 4), mlp())
    use_token_layers(model)
    given = torch.randn(1, 16)
    assert (model[0](given).shape, model[1](given).shape, model[2](given).shape) == ((1, 16), (1, 4), (1, 16))
