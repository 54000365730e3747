"""Weights of 8 bits, by torchao: half the bytes of bf16, and other numbers than the model was published with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# The first generation with float8 matrix products (Ada Lovelace).
_LEAST_FP8_CAPABILITY = (8, 9)


def quantize(model: nn.Module, quantization: str) -> None:
    """Quantize the weights of all linear layers in place, one scale a row; activations stay as they are.

    The layer that gives the logits is left out: it weighs little, and a wrong logit is a wrong token.

    Raises:
        ValueError: torchao is not installed, or the GPU has no such numbers.
    """
    try:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError(f"QUANTIZE={quantization} needs torchao: pip install 'cog-compile-cache[quantize]'") from error
    if quantization == "fp8" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < _LEAST_FP8_CAPABILITY:
            name = f"{torch.cuda.get_device_name()} (compute capability {capability[0]}.{capability[1]})"
            raise ValueError(f"QUANTIZE=fp8 needs compute capability 8.9; this is {name}. Use int8.")
    # torchao would change Inductor's settings for the whole process, after they have gone into the key.
    config: Any = {"int8": Int8WeightOnlyConfig, "fp8": Float8WeightOnlyConfig}[quantization](set_inductor_config=False)
    output = model.get_output_embeddings()  # type: ignore[operator]
    quantize_(model, config, filter_fn=lambda module, _: isinstance(module, nn.Linear) and module is not output)
