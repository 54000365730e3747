"""Calls to hand over: small ones that are hard to describe. The demo servers hand over those of real models."""

from __future__ import annotations

from typing import Any

import torch
from handed_over import SIZE, Attributed, Complex, Labelled, Layers, Quantized
from torch import nn

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


def made_in_a_function() -> Call:
    by = 3.0

    class Local(nn.Linear):
        def __init__(self) -> None:
            super().__init__(SIZE, SIZE)
            self.act = lambda x: x * by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(super().forward(x))

    return Local(), (torch.randn(2, SIZE),), {}


def layers() -> Call:
    return Layers(), (torch.tensor([3]), torch.tensor([7])), {}


MADE = attributed, inference, inference_mixed, quantized, inference_quantized, bits, misaligned, layers
CASES = {made.__name__: made for made in (*MADE, made_in_a_function)}
