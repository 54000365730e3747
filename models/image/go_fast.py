"""go_fast: the linear layers of a denoiser's blocks as products in float8, made from its own weights at setup.

Each row of a weight and each token has a scale of its own. Everything else stays as it is, and no step is skipped.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator

import torch
from torch import nn

from models.kernels.operators import gpu_without_float8, quantize, scaled_linear
from models.weights import gpu_has_room

# The names of layers that see one row a picture: modulation, embeddings of the time. They multiply little.
_ONE_ROW = re.compile(r"norm|(^|_)mod(?!el)|time|emb")
# What the products in float8 need of both sides of a weight.
_MULTIPLE = 16

log = logging.getLogger(__name__)


class FastLinear(nn.Module):
    """A linear layer whose product is in float8."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight, scale = quantize(linear.weight.detach())
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)

    @torch.no_grad()
    def quantize(self, weight: torch.Tensor) -> None:
        """Take other weights. weight: [out_features, in_features]."""
        values, scale = quantize(weight)
        self.weight.copy_(values)
        self.scale.copy_(scale.t())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: [..., in_features], result: [..., out_features], of the inputs' type."""
        return scaled_linear(inputs, self.weight, self.scale, self.bias)


def fast_copy(denoiser: nn.Module) -> tuple[nn.Module, dict[nn.Parameter, FastLinear]]:
    """A fast denoiser beside this one, which shares all other weights; and its fast layers by the weights that they
    are made from.

    Raises:
        ValueError: the GPU has no float8 or no room, or the denoiser has no such layers.
    """
    layers = dict(_layers(denoiser))
    nbytes = sum(layer.weight.numel() for layer in layers.values())
    if next(denoiser.parameters()).is_cuda and not gpu_has_room(nbytes):
        raise ValueError(
            f"GO_FAST=on keeps {nbytes / 1e9:.1f} GB of weights beside the others, and the GPU has no room for them. "
            "Set GO_FAST=only, which keeps no others, or off"
        )
    shared = {id(tensor): tensor for tensor in (*denoiser.parameters(), *denoiser.buffers())}
    fast = copy.deepcopy(denoiser, shared)
    replaced = make_fast(fast)
    return fast, {layers[name].weight: replaced[name] for name in layers}


def make_fast(denoiser: nn.Module) -> dict[str, FastLinear]:
    """Replace the linear layers of a denoiser's blocks, and return them by name. Their weights are freed one by one.

    Raises:
        ValueError: the GPU has no float8, or the denoiser has no such layers.
    """
    if name := gpu_without_float8():
        raise ValueError(f"GO_FAST needs compute capability 8.9; this is {name}. Set GO_FAST=off")
    replaced = {}
    for name in [name for name, _ in _layers(denoiser)]:
        parent, _, attribute = name.rpartition(".")
        replaced[name] = FastLinear(denoiser.get_submodule(name))
        setattr(denoiser.get_submodule(parent), attribute, replaced[name])
    if not replaced:
        raise ValueError(f"GO_FAST finds no linear layers in blocks of {type(denoiser).__name__}. Set GO_FAST=off")
    log.info("go_fast.made layers=%d", len(replaced))
    return replaced


def _layers(denoiser: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers below the denoiser's lists of blocks that see all tokens, by name."""
    for name, layer in denoiser.named_modules():
        path = name.lower().split(".")
        in_block = any(part.isdigit() for part in path)
        fits = type(layer) is nn.Linear and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
        if in_block and fits and not any(map(_ONE_ROW.search, path)):
            yield name, layer
