"""Recorded guards: what they find different, in words."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import blocks
import pytest
import torch
from blocks import SIZE
from precompiling import build, built, eager, only_report, tensor
from torch import nn

from compile_cache.calls.description import describe
from compile_cache.inductor.guards import Checks, RecordedGuard
from compile_cache.key.environment import digest
from compile_cache.settings import Settings


def checks_of(expression: str, kind: str, was, key=None) -> Checks:
    return Checks([RecordedGuard(expression, kind, key, digest(["salt", expression, was]))], "salt")


# A global of blocks, the kind of guard, what it asks for, what was there, and what is there later.
KINDS = [
    ("GAIN", "CONSTANT_MATCH", None, describe(blocks.GAIN), 7.0),
    ("COUNT", "EQUALS_MATCH", None, describe(blocks.COUNT), 2.0),
    ("combine", "FUNCTION_MATCH", None, describe(blocks.combine), blocks.combine_otherwise),
    ("combine", "CLOSURE_MATCH", None, describe(blocks.combine), blocks.combine_otherwise),
    ("Inner", "CLASS_MATCH", None, describe(blocks.Inner), blocks.Adapted),
    ("os", "MODULE_MATCH", None, describe(blocks.os), pytest),
    ("CONFIG", "TYPE_MATCH", None, "types.SimpleNamespace", object()),
    ("ACTIVE", "SEQUENCE_LENGTH", None, ["builtins.list", 0], ["one"]),
    ("OPTIONS", "DICT_KEYS_MATCH", None, ["builtins.dict", [describe("gain")]], {"other": 1.0}),
    ("OPTIONS", "DICT_CONTAINS", "gain", True, {}),
    ("CONFIG", "HASATTR", "gain", True, SimpleNamespace()),
]


@pytest.mark.parametrize(("name", "kind", "key", "was", "later"), KINDS)
def test_difference_names_what_differs(monkeypatch, name, kind, key, was, later):
    checks = checks_of(f"G['blocks'].{name}", kind, was, key)
    assert checks.difference() == ""
    monkeypatch.setattr(blocks, name, later)
    assert f"G['blocks'].{name} has changed" in checks.difference()


def test_what_is_gone_is_a_difference(monkeypatch):
    checks = checks_of("G['blocks'].GAIN", "CONSTANT_MATCH", describe(blocks.GAIN))
    monkeypatch.delattr(blocks, "GAIN")
    assert "cannot be read: AttributeError" in checks.difference()


@pytest.mark.parametrize("owner", ["type(L['module'])", "type(L['module']).__mro__[0]"])
def test_an_item_of_a_class_is_compared_in_every_call_and_so_is_what_the_class_lacks(owner):
    class Owner:
        act = blocks.double

    inputs = {"module": Owner()}
    item = checks_of(f"dict({owner}.__dict__)['act']", "CLOSURE_MATCH", describe(blocks.double)).per_call(inputs)
    lacks = checks_of(f"dict({owner}.__dict__)", "DICT_NOT_CONTAINS", False, "other").per_call(inputs)
    assert item(inputs)
    assert lacks(inputs)
    Owner.act, Owner.other = blocks.triple, 1
    assert not item(inputs)
    assert not lacks(inputs)


class Doubled(dict[str, Any]):
    """What it has is twice as much."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 2


class Chain(list[Any]):
    """A call that is false, as an empty chain of calls is."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


class Paired(nn.Module):
    """Has its attributes under two names, and parts that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.right = nn.Linear(SIZE, SIZE)
        self.one = self.other = SimpleNamespace(gain=2.0)
        self.keys = self.values = torch.ones(SIZE)
        self.pair, self.flags, self.names = (1.0, 0.0), (True, 2), {b"y": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(self.left(x) * self.one.gain, self.right.weight) * self.keys
        y = y + self.right(x) * self.other.gain + self.values
        factor = math.copysign(2.0, self.pair[1]) + (1.0 if self.flags[0] is True else 3.0) + (b"y" in self.names)
        factor += ("b'y'" in self.names) * 4 + isinstance(self.left._parameters, OrderedDict)
        return torch.addmm(y, x, self.right.weight, alpha=factor)


def other_parts(module: Paired) -> None:
    module._modules = dict(module._modules, right=build(nn.Linear, SIZE, SIZE, seed=3))


# What torch has no guard for, or one that is not stored.
CHANGES: dict[str, Callable[[Paired], object]] = {
    "an object": lambda module: setattr(module, "other", SimpleNamespace(gain=5.0)),
    "an object's attribute": lambda module: setattr(module.one, "gain", 5.0),
    "a tensor": lambda module: setattr(module, "values", torch.full((SIZE,), 5.0)),
    "a part": lambda module: setattr(module, "right", build(nn.Linear, SIZE, SIZE, seed=3)),
    "a forward": lambda module: setattr(module.right, "forward", lambda x: x * 3),
    "a forward that is false": lambda module: setattr(module.right, "forward", Chain()),
    "parameters' dictionary": lambda module: setattr(module.left, "_parameters", OrderedDict(module.left._parameters)),
    "doubled parameters": lambda module: setattr(module.left, "_parameters", Doubled(module.left._parameters)),
    "parts' dictionary": other_parts,
    "a zero's sign": lambda module: setattr(module, "pair", (1.0, -0.0)),
    "a flag that is a number": lambda module: setattr(module, "flags", (1, 2)),
    "a key that reads like another": lambda module: module.names.update({"b'y'": 1.0}),
}


def test_what_torch_has_no_stored_guard_for_is_seen_by_the_next_call(directory):
    _, compiler = built(directory, Paired, settings=Settings(cold_start="block", unseen="eager"))
    assert only_report(compiler).step == "precompiled"
    (region,) = compiler.by_class.values()
    for name, change in CHANGES.items():
        served, twin = build(Paired), build(Paired)
        compiler.compile(served)
        for _ in range(2):
            before = region.served["precompiled"]
            torch.testing.assert_close(eager(served, tensor()), eager(twin, tensor()))
        assert region.served["precompiled"] == before + 1, name
        for module in (served, twin):
            change(module)
        for _ in range(2):
            torch.testing.assert_close(eager(served, tensor()), eager(twin, tensor()), msg=name)
