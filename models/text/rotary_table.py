"""Rotary embeddings from a table: the cosines and sines of all positions, computed once.

torch.compile treats a cosine as a cheap operation and copies it to its users. So every head of every layer would
compute it again.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn

from models.text.token_layers import is_as_its_class

# An embedding whose results have the same type for both of these inputs does not round to its input's type.
_DTYPES = (torch.float32, torch.bfloat16)


class _Table(NamedTuple):
    """cos and sin: [tokens, size], float32. With `follows_input`, the embedding rounds them to its input's type."""

    cos: torch.Tensor
    sin: torch.Tensor
    follows_input: bool


def use_rotary_tables(model: nn.Module, tokens: int) -> None:
    """Replace the rotary embeddings of `model` that depend only on the position, for positions 0 to `tokens` - 1.

    Call it when the model is on its device, and again for another number of positions.
    """
    for parent in list(model.modules()):
        if isinstance(parent, RotaryTable):
            continue
        for name, child in parent.named_children():
            rotary = child.rotary if isinstance(child, RotaryTable) else child
            if _is_rotary(rotary) and (table := _table(rotary, tokens)):
                setattr(parent, name, RotaryTable(rotary, table))


class RotaryTable(nn.Module):
    """Gives the same results as a rotary embedding of transformers, and has its settings, which models read."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, rotary: nn.Module, table: _Table) -> None:
        super().__init__()
        for name in vars(rotary).keys() - vars(self).keys():
            setattr(self, name, getattr(rotary, name))
        self.rotary = rotary
        self.register_buffer("cos", table.cos, persistent=False)
        self.register_buffer("sin", table.sin, persistent=False)
        self._follows_input = table.follows_input

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """position_ids: [1, tokens]; both results: [1, tokens, size], of the embedding's own type."""
        if position_ids.dim() != 2:  # some models have several positions for each token
            return self.rotary(x, position_ids)
        cos, sin = self.cos[position_ids], self.sin[position_ids]
        return (cos.to(x.dtype), sin.to(x.dtype)) if self._follows_input else (cos, sin)


def _is_rotary(module: Any) -> bool:
    """Whether a module has the call of transformers' rotary embeddings, constant frequencies (`supported.settle_rope`)
    and no hooks."""
    return (
        isinstance(getattr(module, "rope_type", None), str)
        and isinstance(getattr(module, "inv_freq", None), torch.Tensor)
        and list(inspect.signature(module.forward).parameters) == ["x", "position_ids"]
        and is_as_its_class(module)
    )


@torch.no_grad()
def _table(rotary: Any, tokens: int) -> _Table | None:
    """The cosines and sines; None if the embedding has other results."""
    device = rotary.inv_freq.device
    positions = torch.arange(tokens, device=device)[None]
    exact, rounded = (rotary(torch.empty(0, dtype=dtype, device=device), positions) for dtype in _DTYPES)
    if not isinstance(exact, tuple) or [(one.shape[:2], one.dtype) for one in exact] != [((1, tokens), _DTYPES[0])] * 2:
        return None
    cos, sin = (one[0].clone() for one in exact)
    return _Table(cos, sin, follows_input=rounded[0].dtype == _DTYPES[1])
