"""Rotary embeddings from a table: cosines and sines of all positions, computed once.

torch.compile would compute them again wherever they are used, in every layer and for every head: cheap operations are
copied to their users, and it takes a cosine for one.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn


def use_rotary_tables(model: nn.Module, tokens: int) -> None:
    """Let the rotary embeddings of `model` that depend on nothing but the position be looked up, for positions 0 to
    `tokens` - 1. Call it when the model is where it will run."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if _is_rotary(child) and (table := _table(child, tokens)):
                setattr(parent, name, RotaryTable(child, *table))


class RotaryTable(nn.Module):
    """What a rotary embedding of transformers gives for its positions.

    cos and sin: [tokens, size], float32, as the embedding computes them before it rounds.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, rotary: nn.Module, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.rotary = rotary
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """position_ids: [1, tokens]; two results: [1, tokens, size], of the type of `x`."""
        if position_ids.dim() != 2:  # some models give each token several
            return self.rotary(x, position_ids)
        return self.cos[position_ids].to(x.dtype), self.sin[position_ids].to(x.dtype)


def _is_rotary(module: Any) -> bool:
    """Whether it is called as those of transformers are, with frequencies that stay (`suitability.settle_rope`)."""
    return (
        isinstance(getattr(module, "rope_type", None), str)
        and isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        and list(inspect.signature(module.forward).parameters) == ["x", "position_ids"]
    )


@torch.no_grad()
def _table(rotary: Any, tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines, if that is what the embedding gives."""
    device = rotary.inv_freq.device
    found = rotary(torch.empty(0, device=device), torch.arange(tokens, device=device)[None])
    if not isinstance(found, tuple) or [one.shape[:2] for one in found] != [(1, tokens)] * 2:
        return None
    cos, sin = found
    return cos[0].clone(), sin[0].clone()
