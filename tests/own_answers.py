"""Modules whose inputs and answers are objects of classes of their own, and one that reads secrets; and a boot of them.

    own_answers.py NAME...

Prints a line of JSON: for each class, the step, the reason, and whether each answer is that of a twin that is not
compiled.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

import torch
from blocks import SIZE, Far, Weighted
from diffusers.utils import BaseOutput
from transformers.utils import ModelOutput

import compile_cache
from compile_cache.serving.comparison import compare

SECRET = os.environ.get("OWN_SECRET", "")  # read at import
Pair = namedtuple("Pair", "first second", defaults=[None])


class Typed(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None = None


@dataclass
class Answer:
    value: torch.Tensor
    note: str = "none"


@dataclass
class Out(ModelOutput):
    value: torch.Tensor | None = None
    extra: Any = None


@dataclass
class Base(BaseOutput):
    value: torch.Tensor


class Product(Weighted):
    def product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


class AnswersPair(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return Pair(self.product(x), x)


class AnswersTyped(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return Typed(self.product(x))


class AnswersNested(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return {"all": [Far(Typed(self.product(x), x), (x, Pair(x)))]}


class TakesTyped(Product):
    def forward(self, x: torch.Tensor, given: Typed) -> Any:
        return Typed(given.first, self.product(x + given.first))  # torch 2.11 makes nothing of `_replace`


class AnswersDataclass(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return Answer(self.product(x))


class AnswersModelOutput(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return Out(value=self.product(x), extra=(x, {"x": x}))


class AnswersBaseOutput(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return Base(value=self.product(x))


class AsksForTheType(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return self.product(x) if type(x) is torch.Tensor else x


class Named(namedtuple("Named", "first second")):
    def __new__(cls, first: str, second: str) -> Any:
        assert first
        return super().__new__(cls, first, second)


class Text(str):
    pass


Kind = Enum("Kind", {"ONE": ("one", 1)})


def joined(name: str, token: str) -> str:
    return name + token


def closed(token: str) -> Callable[..., str]:
    return lambda other=(token,): token + other[0]


class Secretive(Product):
    """Reads secrets of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.unread = SECRET + "own", SECRET + "unread"
        self.config = SimpleNamespace(key=SECRET + "config", unread=SECRET + "beside", several=[SECRET + "listed"])
        self.items = OrderedDict(key=SECRET + "item", kind=Kind.ONE)
        self.named = Named(SECRET + "named", SECRET + "unread name")
        self.partial = partial(joined, SECRET + "positional", token=SECRET + "keyword")
        self.closure = closed(SECRET + "closure")
        self.text = Text(SECRET + "text")

    def forward(self, x: torch.Tensor) -> Any:
        read = (os.environ.get("OWN_SECRET"), self.own, self.config.key, self.config.several[0], self.items["key"])
        read += self.named.first, self.text, self.partial(), self.closure()
        read += (SECRET,) if self.text == "text" or self.items["kind"].value[1] == 2 else ()
        return self.product(x) * (2.0 if SECRET in read else 1.0)


class Choosing(Product):
    def forward(self, x: torch.Tensor) -> Any:
        return self.product(x) * (2.0 if os.environ.get("OWN_CHOICE") == "two" else 1.0)


def inputs(name: str) -> tuple[Any, ...]:
    x = torch.randn(2, SIZE)
    return (x, Typed(x)) if name == "TakesTyped" else (x,)


def main() -> None:
    own = importlib.import_module("own_answers")
    torch.manual_seed(0)
    right, called = dict[str, list[bool]](), {}
    with compile_cache.boot("own/answers@" + "0" * 40) as boot, torch.inference_mode():
        for name in sys.argv[1:]:
            module = getattr(own, name)().eval().requires_grad_(False)
            called[name] = module, copy.deepcopy(module)
            boot.compile(module, whole=True)
        boot.warm_up(lambda: [module(*inputs(name)) for name, (module, _) in called.items()])
    with torch.inference_mode():
        for name, (module, twin) in called.items():
            given = inputs(name)
            right[name] = [compare((module(*given),), (twin(*given),)).passed for _ in range(2)]
    assert boot.wait_published(60)
    told = {one.name: [one.step, one.reason, right[one.name]] for one in boot.report.regions}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
