"""go_fast: the linear layers of a denoiser's blocks as products in float8, made from its own weights at setup.

Each row of a weight and each token has a scale of its own. Everything else stays as it is, and no step is skipped.
"""

from __future__ import annotations

import copy
import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compile_cache.weights.early_weights import gpu_has_room
from models.kernels.float8 import check_float8, scaled_linear, to_float8

# The names of layers that see one row a picture: modulation, embeddings of the time and of the guidance. They multiply
# little.
_ONE_ROW = re.compile(r"norm|(^|_)mod(?!el)|time|emb|guidance|mapper")
# What the products in float8 need of both sides of a weight.
_MULTIPLE = 16
_REMEDY = "Set GO_FAST=off"

log = logging.getLogger(__name__)


class FastLinear(nn.Linear):
    """A linear layer whose product is in float8. weight: [out_features, in_features], of float8, scale: [1,
    out_features], of float32."""

    scale: Tensor

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Take another layer's weight, [out_features, in_features]."""
        values, scale = to_float8(weight)
        self.weight.copy_(values)
        self.scale.copy_(scale.t())

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs: [..., in_features], result: [..., out_features], of the inputs' type."""
        return scaled_linear(inputs, self.weight, self.scale, self.bias)


def fast_copy(denoiser: nn.Module) -> tuple[nn.Module, dict[nn.Parameter, list[FastLinear]]]:
    """A fast denoiser beside this one, which shares all other weights; and its fast layers by the weights that they
    are made from.

    Raises:
        ValueError: the GPU has no float8 or no room, or the denoiser has no such layers.
    """
    layers = dict(_layers(denoiser))
    size_bytes = sum(layer.weight.numel() for layer in layers.values())
    if next(denoiser.parameters()).is_cuda and not gpu_has_room(size_bytes):
        raise ValueError(
            f"GO_FAST=on needs {size_bytes / 1e9:.1f} GB more, and 4 GB free beside that; the GPU has no such room. "
            "Set GO_FAST=only or off"
        )
    # What is in deepcopy's memo is not copied, but shared.
    shared = {id(tensor): tensor for tensor in (*denoiser.parameters(), *denoiser.buffers())}
    fast = copy.deepcopy(denoiser, shared)
    by_weight = defaultdict(list)
    for name, layer in make_fast(fast).items():
        by_weight[layers[name].weight].append(layer)
    return fast, dict(by_weight)


def make_fast(denoiser: nn.Module) -> dict[str, FastLinear]:
    """Make the linear layers of a denoiser's blocks fast, and return them by name.

    Raises:
        ValueError: the GPU has no float8, or the denoiser has no such layers.
    """
    check_float8("GO_FAST", _REMEDY)
    layers = {name: _become_fast(layer) for name, layer in _layers(denoiser)}
    if not layers:
        raise ValueError(f"GO_FAST finds no linear layers in blocks of {type(denoiser).__name__}. {_REMEDY}")
    log.info("go_fast.made layers=%d", len(layers))
    return layers


def _become_fast(layer: Any) -> FastLinear:
    values, scale = to_float8(layer.weight.detach())
    layer.__class__ = FastLinear
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)
    return layer


def _layers(denoiser: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers below the denoiser's lists of blocks that see all tokens, by name."""
    for name, layer in denoiser.named_modules():
        path = name.lower().split(".")
        in_block = any(part.isdigit() for part in path)
        fits = type(layer) is nn.Linear and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
        if in_block and fits and not any(map(_ONE_ROW.search, path)):
            yield name, layer
