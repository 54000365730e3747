"""A small model with two repeated block classes, that compiles in seconds."""

from __future__ import annotations

import os

import torch
from torch import nn


class WideBlock(nn.Module):
    """A matrix product alone, which needs no C++ compiler, and compiles in half a second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.linear.weight)


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.norm(x))


class ToyModel(nn.Module):
    """With TOY_ONE_CLASS in the environment, it has the first class alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.ModuleList([WideBlock(), WideBlock()])
        self.norms = nn.ModuleList([] if "TOY_ONE_CLASS" in os.environ else [NormBlock(), NormBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.wide, *self.norms):
            x = block(x)
        return x


def run(model: nn.Module, rows: int = 4) -> list[float]:
    """One prediction on the same numbers every time."""
    with torch.inference_mode():
        return model(torch.linspace(-1, 1, rows * 16).view(rows, 16)).flatten().tolist()
