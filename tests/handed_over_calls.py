"""Calls to hand over: small ones that are hard to describe, and those of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from handed_over import SIZE, Attributed, Complex, Labelled, Layers, Quantized
from random_texts import make, prompt
from torch import nn

PROJECT = Path(__file__).parent.parent
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def attributed() -> Call:
    base = torch.randn(4, 2 * SIZE)
    rows = [base[1:3], base[2], base.T[1:, ::2], torch.empty(0, 3), torch.tensor(1.0).expand(3, 4)]
    return Attributed().eval(), (base[:, SIZE:], rows), {"by": {"more": 2.0}}


def inference() -> Call:
    with torch.inference_mode():
        return attributed()


def inference_mixed() -> Call:
    """As in a server: the weights are not of inference mode, the inputs are."""
    module, _, kwargs = attributed()
    return module, inference()[1], kwargs


def quantized() -> Call:
    return Quantized(), (torch.randn(2, SIZE),), {}


def inference_quantized() -> Call:
    with torch.inference_mode():
        return quantized()


def bits() -> Call:
    value = torch.randn(SIZE, dtype=torch.complex64).conj()
    return Complex(), (value, value.imag, torch.randn(SIZE).as_subclass(Labelled)), {}


def misaligned() -> Call:
    """Weights at addresses that kernels for aligned ones must not read, and at odd ones, as files have them."""
    module = nn.Linear(SIZE, SIZE, bias=True)
    memory = torch.randn(SIZE * SIZE + 1)
    module.weight = nn.Parameter(memory[1:].view(SIZE, SIZE))
    odd = torch.frombuffer(bytearray(4 * SIZE + 64), dtype=torch.uint8)
    start = (17 - odd.data_ptr()) % 64
    module.bias = nn.Parameter(torch.frombuffer(odd.numpy().data, dtype=torch.float32, count=SIZE, offset=start))
    return module, (torch.randn(2, SIZE),), {}


def layers() -> Call:
    return Layers(), (torch.tensor([3]), torch.tensor([7])), {}


def flux_whole() -> Call:
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32)}
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(8, 3), "timestep": torch.tensor([1.0])}
    return model.eval(), (), {**inputs, **ids, "pooled_projections": torch.randn(1, 32), "return_dict": False}


def llama() -> Call:
    return make("llama"), (torch.tensor([prompt(8)]),), {"use_cache": False}


def llama_layer() -> Call:
    model = make("llama").model
    x, places = torch.randn(1, 8, 64), torch.arange(8)[None]
    return model.layers[1], (x,), {"position_ids": places, "position_embeddings": model.rotary_emb(x, places)}


CASES = {
    made.__name__: made
    for made in (
        attributed, inference, inference_mixed, quantized, inference_quantized, bits, misaligned, layers,
        flux_whole, llama, llama_layer,
    )
}  # fmt: skip
