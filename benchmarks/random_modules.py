"""Modules at random, as source text: a computation, and features that make a call more than a function of its inputs.

random_modules.toml has the features. A module's `forward` takes two tensors [batch, length, 32], a number and a
dictionary. Features are drawn from a seed, so that a module can be made again. Of a feature that can be set in some
ways, a class has five instances, each set in another way.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

WIDTH = 32


@dataclass(frozen=True)
class Feature:
    """Lines of `__init__`, lines at the start of `forward`, and lines in it, which may append to the answer.

    `apart`: instances differ in what guards may not see: in `is_odd`. `keeps`: calls change the module. `draws`: calls
    use torch's own generator. `ways`: statements, one of which is made on each instance (`self`), and others while it
    serves. `Own` stands for the class, and begins the names of globals that belong to it.
    """

    init: str = ""
    start: str = ""
    forward: str = ""
    keeps: bool = False
    draws: bool = False
    apart: bool = False
    ways: tuple[str, ...] = ()

    def numbered(self, number: int, name: str) -> Feature:
        """The feature with names of its own, beside the other features of the module, whose class has this name."""
        lines = (self.init, self.forward, *self.ways)
        names = {text: f"{text}{number}" for text in ("self.block", "self.value", "Own.value")}
        names |= {"'value'": f"'value{number}'", "Own": name}
        for old, new in names.items():
            lines = tuple(line.replace(old, new) for line in lines)
        init, forward, *ways = lines
        return replace(self, init=init, forward=forward, ways=tuple(ways))


def _settable(
    factor: str,
    values: Sequence[str] = (),
    numbers: str = "",
    ways: Sequence[str] = (),
    init: str = "",
    factored: str = "x",
) -> Feature:
    """What is set in some ways, and a factor of the result: `value` to each of `values`, or made of the numbers N."""
    ways = [*ways, *(f"self.value = {value}" for value in values)]
    ways += [re.sub(r"N\b", str(number), numbers) for number in range(1, 6) if numbers]
    return Feature(init=init, forward=f"x = scaled({factored}, self.mix.weight, {factor})", ways=tuple(ways))


def _decoder(package: str, name: str, sizes: str = "", has_cache: bool = False) -> Feature:
    """A decoder layer of transformers, by its package and the start of its classes' names."""
    past = "from transformers import StaticCache\nself.cache = StaticCache(config, 4096)" if has_cache else ""
    return Feature(
        init=f"from transformers.models.{package}.modeling_{package} import {name}Config, {name}DecoderLayer\n"
        f"sizes = dict({sizes}hidden_size=WIDTH, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)\n"
        f"config = {name}Config(**sizes, num_hidden_layers=1, attn_implementation='sdpa')\n"
        f"self.block = {name}DecoderLayer(config, 0)\n{past}",
        forward="turn = torch.ones(1, x.shape[1], 16, device=x.device)\n"
        "with torch.autocast(x.device.type, enabled=False):\n"
        f"    x = self.block(x.float(), None, None, {'self.cache' if has_cache else None}, "
        "position_embeddings=(0.6 * turn, 0.8 * turn))",
        keeps=has_cache,
    )


_TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SETS = {f"set {name}": _settable(**parts) for name, parts in _TOLD["sets"].items()}
FEATURES = {
    name: _decoder(**parts["decoder"]) if "decoder" in parts else Feature(**parts)
    for name, parts in _TOLD["features"].items()
} | SETS

_QUICK = "x = scaled(x, self.mix.weight, by)"
_COMPUTATIONS = (
    "x = torch.tanh(self.mix(x))",
    "x = F.layer_norm(self.mix(x), (WIDTH,))",
    "x = torch.softmax(self.mix(x) @ x.transpose(1, 2), -1) @ x",
    "x = self.mix(F.conv1d(x.transpose(1, 2), self.mix.weight[..., None]).transpose(1, 2)).sigmoid()",
)

_HEADER = f'''"""Modules made by random_modules.py."""

import asyncio
import enum
import functools
import math
import threading
import types
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = {WIDTH}
SENTINEL = object()
Kind = enum.Enum("Kind", "ONE TWO")
ARMED = threading.local()


class Key:
    """What a number belongs to."""


EVEN, ODD = Key(), Key()
SCALES = weakref.WeakKeyDictionary({{EVEN: 1.0, ODD: 1.5}})


class Failed(Exception):
    """An error of a model."""


def enter():
    """Cancel this thread's call, or let it fail, if it is armed, before eager code has done anything."""
    if left := getattr(ARMED, "left", 0):
        ARMED.left = left - 1
        if left == 1:
            raise ARMED.error


def halve(module, args):
    return (args[0] * 0.5, *args[1:])


def double(module, args, output):
    return output * 2


def scaled(x, weight, factor):
    return torch.baddbmm(x, x, weight.expand(len(x), WIDTH, WIDTH), alpha=factor)


def times(x, by):
    return x * by


def closing(by):
    return lambda x: x * by


class Gain:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return x * self.by

    def times(self, x):
        return x * self.by


class Low:
    gain = 0.5


class High:
    gain = 1.5


@dataclass
class Data:
    gain: float


@dataclass(frozen=True)
class Frozen:
    gain: float


class Named(NamedTuple):
    gain: float
    by: float


class Slots:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


class Doubled(Data):
    @property
    def doubled(self):
        return 2 * self.gain


class Part(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain


Size = enum.Enum("Size", {{"ONE": 1, "TWO": 3, "SIX": 6}})
Flags = enum.IntFlag("Flags", {{"A": 1, "B": 2, "C": 4}})
SHARED = [1, 1, 1, 1]
ONE, TWO = object(), object()
OLD, NEW = Data(1), Data(1)
''' + "".join(f"\n\ndef gain{number}(*given):\n    return 0.5 * {number}\n" for number in range(1, 6))
# What belongs to a class with ways to be set.
_OWN = """

OwnNumber = 1
OwnList = [1]
OwnData = Data(1)


class OwnPart(Part):
    pass


def OwnFunction():
    return 0.5


def OwnDefault(by=1):
    return 0.5 * by


def OwnKeyword(*, by=1):
    return 0.5 * by
"""


@dataclass(frozen=True)
class RandomModule:
    """The class `name` of the generated source, and what it is made of."""

    seed: int
    number: int
    features: tuple[str, ...]
    computation: str

    @property
    def name(self) -> str:
        """The name of its class."""
        return f"Module{self.number}"

    @property
    def keeps(self) -> bool:
        """Whether calls change it."""
        return any(FEATURES[name].keeps for name in self.features)

    @property
    def has_instances(self) -> bool:
        """Whether it can be set in some ways, or its instances differ."""
        return bool(self.ways) or any(FEATURES[name].apart for name in self.features)

    @property
    def draws(self) -> bool:
        """Whether calls use torch's own generator."""
        return any(FEATURES[name].draws for name in self.features)

    @property
    def ways(self) -> tuple[tuple[str, ...], ...]:
        """For each feature that can be set, the ways to do so."""
        parts = (FEATURES[name].numbered(number, self.name) for number, name in enumerate(self.features))
        return tuple(part.ways for part in parts if part.ways)

    @property
    def source(self) -> str:
        """The class."""
        parts = [FEATURES[name].numbered(number, self.name) for number, name in enumerate(self.features)]
        own = (
            f"{self.name}.built = getattr({self.name}, 'built', 0) + 1\nself.is_odd = ({self.name}.built - 1) // 2 % 2"
        )
        init = ["super().__init__()", own, "self.mix = nn.Linear(WIDTH, WIDTH)", *(part.init for part in parts)]
        forward = [
            "if not torch.compiler.is_compiling():\n    enter()",
            "answer = []",
            *(part.start for part in parts),
            self.computation,
            *(part.forward for part in parts),
            "return (x, *answer) if answer else x",
        ]
        methods = (("__init__(self)", init), ("forward(self, x, y, by=1.0, cache=None)", forward))
        text = "".join(
            f"    def {head}:\n{indent(chr(10).join(filter(None, body)), ' ' * 8)}\n\n" for head, body in methods
        )
        globals_ = _OWN.replace("Own", self.name) if self.ways else ""
        return f"{globals_}\n\nclass {self.name}(nn.Module):\n{text.rstrip()}\n"


def make_modules(seed: int, numbers: Sequence[int], only: Sequence[str] = ()) -> list[RandomModule]:
    """The modules of a seed with these numbers: of one to three features, or of one each of `only` in turn."""
    made = []
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        features = tuple(chance.sample(list(FEATURES), chance.randint(1, 3)))
        if only:
            features = (only[number % len(only)],)
        # Many functions are made of what can be set: they multiply matrices, which needs no C++ compiler.
        computations = (_QUICK,) if set(features) <= SETS.keys() else _COMPUTATIONS
        made.append(RandomModule(seed, number, features, chance.choice(computations)))
    return made


def source_of(modules: Sequence[RandomModule]) -> str:
    """A file with the classes of these modules."""
    return _HEADER + "".join(module.source for module in modules)
