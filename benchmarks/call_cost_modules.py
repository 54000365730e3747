"""The modules of call_cost.py: next to no work, and many parts."""

import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.others = nn.ModuleList(nn.Identity() for _ in range(parts - 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Breaking(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        torch._dynamo.graph_break()
        return y + 1
