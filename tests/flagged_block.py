"""A block whose code depends on something that one process alone has changed."""

from __future__ import annotations

import torch
from torch import nn

IS_DOUBLED = False


class FlaggedBlock(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x.T) * 2.0 if IS_DOUBLED else torch.mm(x, x.T)
