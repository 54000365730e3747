"""Weights of 8 bits: half the bytes of bf16, but not the numbers that the model's authors published."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor, nn

from models.kernels.float8 import check_float8, to_float8
from models.kernels.operators import matrix_vector

_LARGEST = 127
# So that rows of zeros have a scale.
_LEAST = 1e-12


def quantize(model: nn.Module, quantization: str) -> None:
    """Quantize the weights of all linear layers in place to int8 or fp8, with a scale for each row.

    Activations keep their type. The layer of the logits keeps its weights: it is small, and a wrong logit is a wrong
    token.

    Raises:
        ValueError: the GPU has no fp8.
    """
    if quantization == "fp8":
        check_float8("QUANTIZE=fp8", "Use int8")
    output = model.get_output_embeddings()  # type: ignore[operator]
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child is not output:
                setattr(parent, name, QuantizedLinear(child, quantization))


class QuantizedLinear(nn.Module):
    """A linear layer with a weight of int8 or float8, [out_features, in_features], and a scale, [out_features, 1], of
    float32."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear, quantization: str) -> None:
        super().__init__()
        convert = to_float8 if quantization == "fp8" else _to_int8
        for name, part in zip(("weight", "scale"), convert(linear.weight.detach()), strict=True):
            self.register_buffer(name, part)
        self.bias = linear.bias

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs and result: [..., size]."""
        if inputs.numel() == self.weight.shape[1] and inputs.dim() == 3:
            return matrix_vector(inputs, self.weight, self.scale, self.bias)
        return F.linear(inputs, (self.weight.float() * self.scale).to(inputs.dtype), self.bias)


def _to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values of int8 and scales of float32. Their product is about `rows`.

    rows and values: [rows, columns], scales: [rows, 1].
    """
    scales = rows.abs().amax(1, keepdim=True).float().clamp(min=_LEAST) / _LARGEST
    return (rows.float() / scales).round().to(torch.int8), scales
