"""Blocks that change objects which their program has under a name, and a boot that calls each a few times.

    own_classes.py __main__|own_classes

says whose the classes are: the main program's, which travel by value, or a module's. Prints a line of JSON: by name,
what the calls left in an object, and what as many changes leave.
"""

from __future__ import annotations

import collections
import itertools
import json
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import torch
from torch import nn

import compile_cache

SIZE = 16


class Plain:
    def __init__(self) -> None:
        self.calls: list[int] = []


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: list[int] = []


@dataclass
class Equal:
    calls: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Identical:
    calls: list[int] = field(default_factory=list)


class Bare:
    """Has nothing before the first call."""


class Nested:
    def __init__(self) -> None:
        self.inner = SimpleNamespace(calls=collections.deque[int]())


class Summed:
    """Keeps a tensor, and one object for all of its class."""

    whole: Summed

    def __init__(self) -> None:
        self.sum = torch.zeros(SIZE)


Summed.whole = Summed()
PLAIN, SLOTTED, EQUAL, IDENTICAL, BARE, NESTED = Plain(), Slotted(), Equal(), Identical(), Bare(), Nested()
LISTED, NAMED, COUNTED = list[int](), dict[str, int](), collections.Counter[str]()
OBJECTS = "PLAIN", "SLOTTED", "EQUAL", "IDENTICAL", "BARE", "NESTED", "LISTED", "NAMED", "COUNTED", "SUMMED"


def change(value: Any, x: torch.Tensor) -> None:
    """Change an object as one call does."""
    if isinstance(value, list):
        value[:] = [sum(value) + 1]  # one that grew would be a new kind in each call
    elif isinstance(value, dict):
        value["calls"] = value.get("calls", 0) + 1
    elif type(value).__name__ == "Bare":
        value.calls = getattr(value, "calls", 0) + 1
    elif hasattr(value, "inner"):
        value.inner.calls.append(1)
    elif hasattr(value, "sum"):
        value.sum.add_(x[0])
    else:
        value.calls.append(1)


def left(value: Any) -> Any:
    """What calls left in an object, as text."""
    if hasattr(value, "inner"):
        return str(list(value.inner.calls))
    if hasattr(value, "sum"):
        return f"{value.sum.sum():.3f}"
    return str(value if isinstance(value, list | dict) else getattr(value, "calls", None))


class Given(nn.Module):
    """Changes its input."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(SIZE), requires_grad=False)
        self.value = value

    def forward(self, x: torch.Tensor, value: Any) -> torch.Tensor:
        change(value, x)
        return torch.mm(x, self.weight)


class Holding(Given):
    """Changes its attribute."""

    def forward(self, x: torch.Tensor, value: Any) -> torch.Tensor:
        change(self.value, x)
        return torch.mm(x, self.weight)


def main() -> None:
    if (name := sys.argv[1]) != __name__:
        runpy.run_path(__file__, run_name=name)
        return
    own, told, x = sys.modules[name], {}, torch.ones(2, SIZE)
    # Each object is changed in one way here, and in the other one by the other module's classes.
    ways = itertools.cycle((own.Given, own.Holding) if name == "__main__" else (own.Holding, own.Given))
    with compile_cache.boot("own/objects@" + "0" * 40) as boot, torch.inference_mode():
        for name in OBJECTS:
            owner, attribute = (own.Summed, "whole") if name == "SUMMED" else (own, name)
            block_class = next(ways)
            value, twin = (type(getattr(owner, attribute))() for _ in range(2))
            setattr(owner, attribute, value)
            block = block_class(value)

            def call(block: nn.Module = block, value: Any = value, twin: Any = twin) -> None:
                block(x, value)
                change(twin, x)

            boot.compile(block)
            boot.warm_up(call)
            for _ in range(2):
                with boot.prediction():
                    call()
            told[f"{name} {block_class.__name__}"] = [left(value), left(twin)]
            block.value = None
    print(json.dumps(told))


if __name__ == "__main__":
    main()
