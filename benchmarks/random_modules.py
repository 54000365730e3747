"""Modules at random, as source text: a computation, and features that make a call more than a function of its inputs.

A module's `forward` takes two tensors [batch, length, 32], a number and a dictionary. Features are drawn from a seed,
so that a module can be made again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import indent

WIDTH = 32


@dataclass(frozen=True)
class Feature:
    """Lines of `__init__`, lines at the start of `forward`, and lines in it, which may append to the answer.

    `keeps`: calls change the module. `draws`: calls use torch's own generator.
    """

    init: str = ""
    start: str = ""
    forward: str = ""
    keeps: bool = False
    draws: bool = False

    def numbered(self, number: int) -> Feature:
        """The feature whose block has a name of its own, beside those of the module's other features."""
        init, forward = (text.replace("self.block", f"self.block{number}") for text in (self.init, self.forward))
        return replace(self, init=init, forward=forward)


def _block(line: str, call: str = "x = self.block(x)") -> Feature:
    return Feature(init=line, forward=call)


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

_COMPUTATIONS = (
    "x = torch.tanh(self.mix(x))",
    "x = F.layer_norm(self.mix(x), (WIDTH,))",
    "x = torch.softmax(self.mix(x) @ x.transpose(1, 2), -1) @ x",
    "x = self.mix(F.conv1d(x.transpose(1, 2), self.mix.weight[..., None]).transpose(1, 2)).sigmoid()",
)

_HEADER = f'''"""Modules made by random_modules.py."""

import asyncio
import enum
import threading

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = {WIDTH}
SENTINEL = object()
Kind = enum.Enum("Kind", "ONE TWO")
ARMED = threading.local()


def enter():
    """Cancel this thread's call if it is armed, before eager code has done anything."""
    if left := getattr(ARMED, "left", 0):
        ARMED.left = left - 1
        if left == 1:
            raise asyncio.CancelledError


def halve(module, args):
    return (args[0] * 0.5, *args[1:])


def double(module, args, output):
    return output * 2
'''


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
    def source(self) -> str:
        """The class."""
        parts = [FEATURES[name].numbered(number) for number, name in enumerate(self.features)]
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
        return f"\n\nclass {self.name}(nn.Module):\n{text.rstrip()}\n"


def make_modules(seed: int, numbers: Sequence[int], only: Sequence[str] = ()) -> list[RandomModule]:
    """The modules of a seed with these numbers: of one to three features, or of one each of `only` in turn."""
    made = []
    for number in numbers:
        chance = random.Random(f"{seed} {number}")
        features = tuple(chance.sample(list(FEATURES), chance.randint(1, 3)))
        if only:
            features = (only[number % len(only)],)
        made.append(RandomModule(seed, number, features, chance.choice(_COMPUTATIONS)))
    return made


def source_of(modules: Sequence[RandomModule]) -> str:
    """A file with the classes of these modules."""
    return _HEADER + "".join(module.source for module in modules)
