"""Blocks for boots that compile in a second process, and the model that is made of them.

All but `Norm` multiply matrices, which compiles in half a second, without a C++ compiler.
"""

from __future__ import annotations

import torch
from torch import nn

SIZE = 16


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE, bias=False)
        self.register_buffer("scale", torch.full((SIZE, SIZE), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, torch.mm(x, self.scale), self.linear.weight)


class Other(Wide):
    pass


class Norm(nn.Module):
    """Needs a C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.norm(x))


class Model(nn.Module):
    """Two of each block class. `forward` calls all of them, or those of the classes that are given."""

    def __init__(self, *classes: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for kind in classes:
            self.add_module(kind.__name__, nn.ModuleList([kind(), kind()]))
        self.eval()

    def forward(self, x: torch.Tensor, *classes: type[nn.Module]) -> torch.Tensor:
        for blocks in self.children():
            for block in blocks.children():
                if not classes or type(block) in classes:
                    x = block(x)
        return x


def inputs(rows: int = 4) -> torch.Tensor:
    """The same numbers every time."""
    with torch.inference_mode():
        return torch.linspace(-1, 1, rows * SIZE).view(rows, SIZE)


def predict(model: nn.Module, rows: int = 4, *classes: type[nn.Module]) -> torch.Tensor:
    """One prediction."""
    with torch.inference_mode():
        return model(inputs(rows), *classes)
