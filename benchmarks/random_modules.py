"""Modules at random, as source text: a computation, and features that make a call more than a function of its inputs.

A module's `forward` takes two tensors [batch, length, 32], a number and a dictionary. Features are drawn from a seed,
so that a module can be made again. Of a feature that can be set in some ways, a class has five instances, each set in
another way.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import indent

WIDTH = 32


@dataclass(frozen=True)
class Feature:
    """Lines of `__init__`, lines at the start of `forward`, and lines in it, which may append to the answer.

    `keeps`: calls change the module. `draws`: calls use torch's own generator. `ways`: statements, one of which is made
    on each instance (`self`), and others while it serves. `Own` stands for the class, and begins the names of globals
    that belong to it.
    """

    init: str = ""
    start: str = ""
    forward: str = ""
    keeps: bool = False
    draws: bool = False
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


def _block(line: str, call: str = "x = self.block(x)") -> Feature:
    return Feature(init=line, forward=call)


def _ways(factor: str, *ways: str, init: str = "", factored: str = "x") -> Feature:
    """What the `ways` set is a factor of the result."""
    return Feature(init=init, forward=f"x = scaled({factored}, self.mix.weight, {factor})", ways=ways)


def _set(factor: str, *values: str) -> Feature:
    """The same for an attribute, `value`, that is set to each of these values."""
    return _ways(factor, *(f"self.value = {value}" for value in values))


def _made(factor: str, way: str, init: str = "", factored: str = "x") -> Feature:
    """The same for what is made of a number, N."""
    ways = [re.sub(r"N\b", str(number), way) for number in range(1, 6)]
    return _ways(factor, *ways, init=init, factored=factored)


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


FEATURES = {
    "none": Feature(),
    "buffer": Feature(
        init="self.register_buffer('kept', torch.zeros(WIDTH))",
        forward="self.kept.mul_(0.5).add_(x.mean((0, 1)))\nx = x + self.kept",
        keeps=True,
    ),
    "keys": Feature(
        init="self.register_buffer('keys', torch.zeros(8, WIDTH))\n"
        "self.register_buffer('position', torch.zeros(1, dtype=torch.long))",
        forward="self.keys[self.position % 8] = x[0, :1].to(self.keys.dtype)\nself.position.add_(1)\n"
        "x = x + torch.softmax(x @ self.keys.T, -1) @ self.keys",
        keeps=True,
    ),
    "static cache": Feature(
        init="self.register_buffer('past', torch.zeros(2, 16, WIDTH))\n"
        "self.register_buffer('filled', torch.zeros(1, dtype=torch.long))",
        forward="self.past.index_copy_(1, (self.filled + torch.arange(x.shape[1], device=x.device)) % 16, x.float())\n"
        "self.filled += x.shape[1]\npast = self.past.to(x.dtype)\n"
        "x = x + F.scaled_dot_product_attention(x, past, past)",
        keeps=True,
    ),
    "new buffer": Feature(
        init="self.register_buffer('last', torch.zeros(WIDTH))",
        forward="before, self.last = self.last, x.mean((0, 1)).clone()\nx = x + before",
        keeps=True,
    ),
    "count": Feature(
        init="self.register_buffer('calls', torch.zeros((), dtype=torch.long))",
        forward="self.calls.add_(1)\nanswer.append(self.calls * 2)",
        keeps=True,
    ),
    "attribute": Feature(init="self.number = 0", forward="self.number += 1\nx = x + self.number % 3", keeps=True),
    "list": Feature(init="self.lengths = []", forward="self.lengths.append(x.shape[1])", keeps=True),
    "draw": Feature(forward="x = x + 0.1 * torch.randn_like(x)", draws=True),
    "dropout": Feature(forward="x = F.dropout(x, 0.1, training=True)", draws=True),
    "write": Feature(forward="y.mul_(0.5).add_(1)\nx = x + y"),
    "alias": Feature(start="x.mul_(0.5)\ny.add_(1)\nx = x + y"),  # the caller passes views of one tensor
    "view": Feature(forward="y[:, 0].mul_(2)\nz = y.transpose(0, 1)[..., 4:8]\nz.add_(1)\nanswer.append(z)"),
    "own view": Feature(
        init="self.register_buffer('table', torch.zeros(2, 4, 8))\nself.flat = self.table.view(8, 8)",
        forward="self.flat[1].add_(x.mean())\nx = x + self.table.sum()",
        keeps=True,
    ),
    "views": Feature(forward="answer += [x[..., :4], y]"),
    "dictionary": Feature(forward="cache['x'] = x * 2\ncache['calls'] = cache.get('calls', 0) + 1"),
    "plain": Feature(forward="answer += [y.shape[1], 'words', None, by * 2, self.training]"),
    "number": Feature(forward="x = x * by"),  # the caller changes it
    "sentinel": Feature(
        init="self.mode = SENTINEL", forward="answer.append('this' if self.mode is SENTINEL else 'another')"
    ),
    "enumeration": Feature(init="self.kind = Kind.ONE", forward="answer.append(1 if self.kind is Kind.ONE else 2)"),
    "function": Feature(
        init="self.act = F.gelu", forward="x = self.act(x)\nanswer.append('gelu' if self.act is F.gelu else 'another')"
    ),
    "hook": Feature(init="self.register_forward_pre_hook(halve)"),
    "own hook": Feature(
        init="self.seen = []\nself.register_forward_hook(lambda module, args, output: self.seen.append(len(args)))",
        keeps=True,
    ),
    "inner hook": Feature(init="self.mix.register_forward_hook(double)"),
    "weight norm": Feature(
        init="self.normed = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))", forward="x = self.normed(x)"
    ),
    "autocast": Feature(),  # the caller enters it
    "inner autocast": Feature(
        forward="with torch.autocast(x.device.type, torch.bfloat16):\n    x = x + self.mix(x).to(x.dtype)"
    ),
    "break": Feature(forward="torch._dynamo.graph_break()\nx = x * 2"),
    "branch": Feature(forward="x = x * 2 if y.sum() > 0 else x - 1"),
    "sizes": Feature(),  # the caller changes the length
    "modes": Feature(),  # the caller changes whether gradients are recorded
    "resnet": _block(
        "from diffusers.models.resnet import ResnetBlock2D\n"
        "self.block = ResnetBlock2D(in_channels=WIDTH, temb_channels=WIDTH, groups=4)",
        "x = self.block(x.transpose(1, 2)[..., None], y.mean(1))[..., 0].transpose(1, 2)",
    ),
    "flux": _block(
        "from diffusers.models.transformers.transformer_flux import FluxTransformerBlock\n"
        "self.block = FluxTransformerBlock(WIDTH, 2, 16)",
        "y, x = self.block(x, y, y.mean(1))",
    ),
    "flux single": _block(
        "from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock\n"
        "self.block = FluxSingleTransformerBlock(WIDTH, 2, 16)",
        "y, x = self.block(x, y, y.mean(1))",
    ),
    "diffusers": _block(
        "from diffusers.models.attention import BasicTransformerBlock\nself.block = BasicTransformerBlock(WIDTH, 2, 16)"
    ),
    "llama": _decoder("llama", "Llama"),
    "qwen": _decoder("qwen2", "Qwen2"),
    "gemma": _decoder("gemma", "Gemma", "head_dim=16, "),
    "llama cache": _decoder("llama", "Llama", has_cache=True),
    "bert": _block(
        "from transformers.models.bert.modeling_bert import BertConfig, BertLayer\n"
        "sizes = dict(hidden_size=WIDTH, intermediate_size=64, num_attention_heads=2)\n"
        "self.block = BertLayer(BertConfig(**sizes, attn_implementation='sdpa'))",
        "x = self.block(x)\nx = x[0] if isinstance(x, tuple) else x",
    ),
    "gpt2": _block(
        "from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config\n"
        "self.block = GPT2Block(GPT2Config(n_embd=WIDTH, n_head=2, attn_implementation='sdpa'), 0)"
    ),
}

# What forward reads of an instance, its class or its module, set in some ways. A method of a class is none of these:
# neither torch nor the library sees that another one takes its place, unless it is a `forward`.
_SETS = {
    "flag": _set("2.0 if self.value else 0.5", "True", "False"),
    "int": _made("0.5 * self.value", "self.value = N"),
    "float": _set("self.value", "0.5", "1.5", "-0.5", "2.5", "-1.0"),
    "zero": _set("2.0 if math.copysign(1.0, self.value) < 0 else 0.5", "0.0", "-0.0", "float('nan')"),
    "equal": _set("1.5 if self.value is True else 0.5 * (len(repr(self.value)) - 2)", "1", "True", "1.0"),
    "complex": _set("self.value.real + self.value.imag", "1j", "2 + 1j", "-1j", "1 - 3j"),
    "text": _made("0.5 * len(self.value)", "self.value = 'a' * N"),
    "bytes": _made("0.5 * self.value[0]", "self.value = bytes([N])"),
    "none": _set("0.5 if self.value is None else self.value", "None", "1.5", "2.5"),
    "absence": _ways("2.0 if hasattr(self, 'value') else 0.5", "self.value = 1", "vars(self).pop('value', None)"),
    "member": _set("self.value.value * (1.0 if self.value is Size.ONE else 0.5)", "Size.ONE", "Size.TWO", "Size.SIX"),
    "int member": _made("0.5 * self.value", "self.value = Flags(N)"),
    "partial": _made("self.value(0.5)", "self.value = functools.partial(times, N)"),
    "keyword of a partial": _made("self.value(0.5)", "self.value = functools.partial(times, by=N)"),
    "function": _made("self.value()", "self.value = gainN"),
    "closure": _made("self.value(0.5)", "self.value = closing(N)"),
    "bound method": _made("self.value(0.5)", "self.value = Gain(N).times"),
    "own method": _made("self.value()", "self.value = types.MethodType(gainN, self)"),
    "callable": _made("self.value(0.5)", "self.value = Gain(N)"),
    "cached function": _made("self.value()", "self.value = functools.lru_cache(gainN)"),
    "class": _set("self.value.gain", "Low", "High"),
    "list": _set("self.value[0] * len(self.value)", "[0.5]", "[0.5, 1]", "[1.5]", "[1, 1.0, 1]", "[True, 2]"),
    "list in place": _made("0.5 * len(self.value)", "self.value[:] = [1] * N", "self.value = []"),
    "dictionary": _set("self.value['a'] * len(self.value)", "{'a': 0.5}", "{'a': 1.5}", "{'b': 1, 'a': 1}"),
    "dictionary in place": _made("0.5 * self.value['a']", "self.value['a'] = N", "self.value = {}"),
    "order": _set("next(iter(self.value.values()))", "{'a': 0.5, 'b': 1.5}", "{'b': 1.5, 'a': 0.5}"),
    "keys": _set("1.5 if any(key is True for key in self.value) else 0.5", "{1: 0}", "{True: 0}", "{1.0: 0}"),
    "set": _set("1.5 if 'a' in self.value else 0.5 * len(self.value)", "{'a'}", "{'b'}", "{'b', 'c'}", "{'a', 1}"),
    "frozen set": _made("0.5 * len(self.value)", "self.value = frozenset(range(N))"),
    "tuple": _set("self.value[-1] * len(self.value)", "(0.5,)", "(1, 0.5)", "(1.5,)", "(1, 2, 1)"),
    "named tuple": _made("self.value.gain * self.value.by", "self.value = Named(N, 0.5)"),
    "data class": _made("self.value.gain", "self.value = Data(0.5 * N)"),
    "frozen data class": _made("self.value.gain", "self.value = Frozen(0.5 * N)"),
    "slots": _made("self.value.gain", "self.value = Slots(0.5 * N)"),
    "namespace": _made("self.value.gain", "self.value = types.SimpleNamespace(gain=0.5 * N)"),
    "nested": _made("self.value.value.gain", "self.value = types.SimpleNamespace(value=Data(0.5 * N))"),
    "nested in place": _made("self.value.gain", "self.value.gain = 0.5 * N", "self.value = Data(1)"),
    "property": _made("self.value.doubled", "self.value = Doubled(0.25 * N)"),
    "shared list": _set("1.5 if self.value is SHARED else 0.5 * len(self.value)", "SHARED", "[1]", "[1, 1]"),
    "sentinel": _set("1.5 if self.value is ONE else 0.5 if self.value is TWO else 2.5", "ONE", "TWO", "object()"),
    "instance": _set("1.5 if self.value is OLD else 0.5 if self.value is NEW else 2.5", "OLD", "NEW", "Data(1)"),
    "one object twice": _set("1.5 if self.value[0] is self.value[1] else 0.5", "[Data(1), Data(1)]", "[Data(1)] * 2"),
    "dtype": _set("self.value.itemsize * 0.25", "torch.float16", "torch.float32", "torch.float64", "torch.int8"),
    "device": _set("0.5 * len(self.value.type)", "torch.device('cpu')", "torch.device('meta')"),
    "size": _made("0.5 * self.value[1]", "self.value = torch.Size([1, N])"),
    "module": _made("self.value.gain", "self.value = Part(0.5 * N)"),
    "number of a module": _made("self.value.gain", "self.value.gain = 0.5 * N", "self.value = Part(1)"),
    "modules": _made("0.5 * len(self.value)", "self.value = nn.ModuleList([Part(1) for _ in range(N)])"),
    "identity": _set("1.5 if isinstance(self.value, nn.Identity) else 0.5", "nn.Identity()", "Part(1)", "None"),
    "buffer": _made(
        "1.0", "self.value = torch.full((), 0.5 * N)", "self.register_buffer('value', torch.ones(()))", "x * self.value"
    ),
    "shape": _made("self.value.numel()", "self.value = torch.ones(N)", "self.register_buffer('value', torch.ones(1))"),
    "gradient": _ways(
        "1.5 if self.mix.weight.requires_grad else 0.5",
        "self.mix.requires_grad_(True)",
        "self.mix.requires_grad_(False)",
    ),
    "training": _ways("1.5 if self.training else 0.5", "self.train()", "self.eval()"),
    "number of a class": _made("self.value", "Own.value = 0.5 * N"),
    "property of a class": _made("self.value", "Own.value = property(gainN)"),
    "forward of a part": _made("self.value()", "OwnPart.forward = gainN", "self.value = OwnPart(1)"),
    "global number": _made("0.5 * OwnNumber", "fuzzed.OwnNumber = N"),
    "global list": _made("0.5 * len(OwnList)", "fuzzed.OwnList[:] = [1] * N"),
    "global object": _made("0.5 * OwnData.gain", "fuzzed.OwnData.gain = N"),
    "global function": _made("OwnFunction()", "fuzzed.OwnFunction = gainN"),
    "code": _made("OwnFunction()", "fuzzed.OwnFunction.__code__ = gainN.__code__"),
    "default": _made("OwnDefault()", "fuzzed.OwnDefault.__defaults__ = (N,)"),
    "default of a keyword": _made("OwnKeyword()", "fuzzed.OwnKeyword.__kwdefaults__ = {'by': N}"),
}
SETS = {f"set {name}": feature for name, feature in _SETS.items()}
FEATURES |= SETS

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
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = {WIDTH}
SENTINEL = object()
Kind = enum.Enum("Kind", "ONE TWO")
ARMED = threading.local()


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
        init = ["super().__init__()", "self.mix = nn.Linear(WIDTH, WIDTH)", *(part.init for part in parts)]
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
        own = _OWN.replace("Own", self.name) if self.ways else ""
        return f"{own}\n\nclass {self.name}(nn.Module):\n{text.rstrip()}\n"


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
