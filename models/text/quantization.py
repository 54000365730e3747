"""Weights of 8 bits, made by torchao: half the bytes of bf16, but not the numbers that the model's authors
published."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor, nn

from models.kernels.float8 import check_float8
from models.kernels.operators import matrix_vector


def quantize(model: nn.Module, quantization: str) -> None:
    """Quantize the weights of all linear layers in place to int8 or fp8, with a scale for each row.

    Activations keep their type. The layer of the logits keeps its weights: it is small, and a wrong logit is a wrong
    token.

    Raises:
        ValueError: torchao is not installed, or the GPU has no fp8.
    """
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        remedy = "pip install '.[quantize]' in a checkout of cog-compile-cache"
        raise ValueError(f"QUANTIZE={quantization} needs torchao: {remedy}") from error
    if quantization == "fp8":
        check_float8("QUANTIZE=fp8", "Use int8")
    # Otherwise torchao would change Inductor's settings in this process, which the key already has.
    config: Any = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[quantization](set_inductor_config=False)
    output = model.get_output_embeddings()  # type: ignore[operator]
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not output)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child is not output:
                setattr(parent, name, QuantizedLinear(child))


class QuantizedLinear(nn.Module):
    """A linear layer that keeps a weight of torchao's class as plain tensors.

    torch can store guards on plain tensors, but not on that class. So a region with this layer can be precompiled.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight: Any = linear.weight
        names, self._rest = weight.__tensor_flatten__()
        self._names = tuple(names)
        self._kind = type(weight)
        for name in names:
            self.register_buffer(name, getattr(weight, name).detach())
        self.bias = linear.bias
        self._columns = linear.in_features
        zero_point = getattr(weight, "zero_point", None)
        has_row_scales = weight.scale.shape == (linear.out_features, 1) and weight.qdata.is_contiguous()
        self._is_scaled_matrix = has_row_scales and (zero_point is None or not zero_point.any())

    @property
    def weight(self) -> Tensor:
        """The weight in torchao's class."""
        parts = {name: getattr(self, name) for name in self._names}
        weight: Tensor = self._kind.__tensor_unflatten__(parts, self._rest, None, None)
        return weight

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs and result: [..., size]."""
        if self._is_scaled_matrix and inputs.numel() == self._columns and inputs.dim() == 3:
            return matrix_vector(inputs, self.qdata, self.scale, self.bias)
        return F.linear(inputs, self.weight, self.bias)
