"""Blocks whose compiled code depends on what their inputs do not show.

They multiply matrices, and all else goes into the factors: that compiles in half a second, without a C++ compiler.
"""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

SIZE = 16
GAIN = 1.5
COUNT = 2
ACTIVE: list[str] = []
OPTIONS: dict[str, float] = {"gain": 2.0}
CONFIG = SimpleNamespace(gain=3.0)


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2


def combine(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight)


def combine_otherwise(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.T)


def double(number: float) -> float:
    return 2 * number


def triple(number: float) -> float:
    return 3 * number


class Inner(nn.Module):
    def __init__(self, eps: float = 0.5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.eye(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight, alpha=self.eps)


class Adapted(Inner):
    """An adapter: the parameters of what it adapts, and another result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(super().forward(x), x.T @ x)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))


class Product(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight)


class Block(nn.Module):
    """Every attribute is a factor of the result, and so are the globals of this module."""

    shift = 1.25
    extra: float | None

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(SIZE, SIZE))
        self.second = nn.Parameter(torch.randn(SIZE, SIZE))
        self.inner = Inner()
        self.flag = True
        self.number = 3
        self.scale = 0.5
        self.name = "short"
        self.missing: float | None = None
        self.kind = Kind.SMALL
        self.dtype = torch.float32
        self.pair = (1.0, 2.0)
        self.several = [1.0, 2.0]
        self.options = {"gain": 2.0}
        self.config = SimpleNamespace(gain=4.0)
        self.act: Callable[[float], float] = double

    def factor(self) -> float:
        factor = self.scale * self.number * len(self.name) * self.pair[1] * len(self.several) * self.several[-1]
        factor *= 1.0 if self.missing is None else 2.0
        factor *= 1.0 if self.kind is Kind.SMALL else 2.0
        factor *= 1.0 if self.dtype == torch.float32 else 2.0
        factor *= self.options["gain"] * (5.0 if "more" in self.options else 1.0) * self.config.gain * self.shift
        factor *= self.extra if hasattr(self, "extra") else 1.0
        return self.act(factor)

    def forward(self, x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        y = self.inner(combine(x, self.first if self.flag and not self.training else self.second))
        return torch.addmm(x, y, self.first, beta=GAIN, alpha=by * self.factor())


class Beside(Weighted):
    """Calls a module that is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = [Inner().eval()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, self.beside[0](x), self.weight)


class Global(Weighted):
    """Every global of this module is a factor of the result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if ACTIVE else 1.0
        factor *= OPTIONS["gain"] * (5.0 if "more" in OPTIONS else 1.0) * CONFIG.gain
        factor *= COUNT if isinstance(COUNT, int) else -COUNT
        return torch.addmm(x, x, self.weight, alpha=factor)


class Registry(dict[str, float]):
    """Code reads one key of it by a method of its own, or all of them."""

    def get(self, key: object) -> float:
        return super().get(str(key)) or 0.0


REGISTRY = Registry(gain=2.0)


class Registered(Weighted):
    """One value of a global dictionary is a factor of the result, and with `sums` all of them are."""

    def __init__(self, sums: bool = False) -> None:
        super().__init__()
        self.sums = sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = sum(REGISTRY.values()) if self.sums else REGISTRY.get("gain")
        return torch.addmm(x, x, self.weight, alpha=factor)


def make_tunable() -> tuple[Callable[..., float], Callable[[float], None]]:
    """A function with a default, a keyword's default and a closure variable, and what sets that variable."""
    gain = 1.5

    def tunable(by: float = 2.0, *, more: float = 3.0) -> float:
        return gain * by * more

    def tune(value: float) -> None:
        nonlocal gain
        gain = value

    return tunable, tune


tunable, tune = make_tunable()


class Tunable(Weighted):
    """The answer of a global function is a factor of the result, and so is that of one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.tune = make_tunable()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight, alpha=tunable() * self.own())


class Environ(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight, alpha=2.0 if os.environ.get("BLOCK_GAIN") else 1.0)


class Pair(nn.Module):
    """Two inputs, the first of which it changes before it reads both."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.copy_(torch.mm(x, y.T))
        return torch.mm(x, y)


class Layer(Weighted):
    """A layer that writes into its own part of a cache, as those of a language model do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        caches[self.layer_idx].copy_(x)
        return torch.mm(caches[self.layer_idx], self.weight)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0), Layer(1)])
        self._no_split_modules = ["Layer"]

    def forward(self, x: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, caches)
        return x


class Batched(Weighted):
    """Takes inputs of any strides as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.weight.expand(x.shape[0], SIZE, SIZE))


CHEATS = {"now": False}


@torch.compiler.assume_constant_result
def cheats() -> bool:
    """Asked once, when the code is traced, and not guarded."""
    return CHEATS["now"] or "BLOCK_CHEATS" in os.environ


class Cheating(Weighted):
    """Compiled while it cheats, it gives another answer than eager."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 2.0 if torch.compiler.is_compiling() and cheats() else 1.0
        return torch.addmm(x, x, self.weight, alpha=factor)


class Breaking(Weighted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.mm(x, self.weight)
        torch._dynamo.graph_break()
        return torch.mm(x, self.weight)


TABLE = torch.eye(SIZE)


class ReadsGlobalTensor(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, TABLE)


class Anything:
    """An object that only its identity tells from another."""


ANYTHING = Anything()


class Slotted:
    __slots__ = ("gain",)


@dataclass
class Gain:
    gain: float = 2.0


# By kind, an object that `Asking` knows and another that is like it.
OBJECTS: dict[str, tuple[Any, Any]] = {
    "object": (object(), object()),
    "instance": (Anything(), Anything()),
    "slots": (Slotted(), Slotted()),
    "dataclass": (Gain(), Gain()),
    "list": ([1.0], [1.0]),
    "dict": ({"gain": 1.0}, {"gain": 1.0}),
    "partial": (functools.partial(len), functools.partial(len)),
}
SENTINEL, SENTINEL_TOO = OBJECTS["object"]


class Far(NamedTuple):
    """A named tuple that other modules use."""

    first: Any
    second: Any = None


class Asking(Weighted):
    """What it computes depends on which object it finds."""

    def __init__(self, kind: str, place: str, number: int) -> None:
        super().__init__()
        self.kind, self.place = kind, place
        self.put(number)

    def put(self, number: int) -> None:
        self.found = OBJECTS[self.kind][number]
        self.several, self.by_name = [self.found], {"found": self.found}
        self.nested = SimpleNamespace(inner=SimpleNamespace(found=self.found))

    def find(self) -> Any:
        if self.place == "list":
            return self.several[0]
        if self.place == "dict":
            return self.by_name["found"]
        return self.nested.inner.found if self.place == "nested" else self.found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = self.find() is (SENTINEL if self.kind == "object" else OBJECTS[self.kind][0])
        return torch.addmm(x, x, self.weight, alpha=2.0 if known else 1.0)


class AskingInputs(Weighted):
    """Asks which object an input is, and which a default."""

    def forward(self, x: torch.Tensor, which: Any = SENTINEL, other: Any = None) -> torch.Tensor:
        factor = (2.0 if which is SENTINEL else 1.0) * (3.0 if other is which else 1.0)
        return torch.addmm(x, x, self.weight, alpha=factor)
