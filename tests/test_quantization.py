"""Weights of 8 bits: what they do to answers that are known, and to a layer."""

from __future__ import annotations

import pytest
import torch
from cog_server import PROJECT
from sums import answer, prompt, unseen_sums
from torch import nn

from compile_cache.inductor.function import Precompiled, compile_ahead
from compile_cache.inductor.toolchain import configure_torch
from models.text.model import TextInputs, TextModel
from models.text.quantization import QuantizedLinear
from models.text.settings import TextSettings

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("quantization", KINDS)
def test_quantized_models_add_as_well(quantization):
    """The speed mode's effect on quality, on the one task whose answers are known."""
    settings = TextSettings(cache_tokens=64, prompt_buckets=(16,), quantize=quantization)
    model = TextModel.load(str(PROJECT / "demo" / "llama-adder"), None, settings)
    right = sum("".join(model.answer(TextInputs(prompt(a, b)))) == answer(a, b) for a, b in unseen_sums(80))
    assert right >= 78
    network = model.generator.decode.model
    assert network.model.layers[0].mlp.down_proj.weight.dtype == KINDS[quantization]
    assert type(network.lm_head.weight) is nn.Parameter


@pytest.mark.parametrize(("quantization", "error"), [("int8", 1 / 254), ("fp8", 1 / 28)])
def test_a_weight_is_near_for_each_row_and_a_token_has_the_same_product_as_a_prompt(quantization, error):
    linear = nn.Linear(32, 8)
    with torch.no_grad():
        linear.weight[3] *= 1000
        linear.weight[4] = 0
    layer = QuantizedLinear(linear, quantization)
    largest = linear.weight.abs().amax(1, keepdim=True)
    assert ((layer.weight.float() * layer.scale - linear.weight).abs() <= error * largest * 1.001).all()
    inputs = torch.randn(1, 5, 32)
    with torch.inference_mode():
        tokens = torch.cat([layer(inputs[:, place : place + 1]) for place in range(5)], dim=1)
        torch.testing.assert_close(layer(inputs), tokens, rtol=1e-4, atol=1e-4)


def test_a_layer_of_8_bits_can_be_precompiled():
    configure_torch()
    call = QuantizedLinear(nn.Linear(32, 8), "int8"), (torch.randn(1, 3, 32),), {}
    with torch.inference_mode():
        loaded = Precompiled("", *compile_ahead(call, "default", False, ""))
        assert loaded.misfit(call) == ""
        torch.testing.assert_close(loaded(*call), call[0](*call[1]))
