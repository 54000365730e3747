"""Regions that are hard to hand over to another process, which imports them from here; and what it answers.

As a program, it receives each `*.call` in a folder, runs it, and writes what it found beside it.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from blocks import SIZE, Kind
from torch import nn

from compile_cache.calls.description import structure, structure_digest
from compile_cache.calls.pickling import receive
from compile_cache.calls.spec import CallSpec
from compile_cache.calls.torch_call import call_region


@dataclass(frozen=True, slots=True)
class Options:
    gain: float
    kind: Kind


def scaled(by: float, x: torch.Tensor) -> torch.Tensor:
    return x * by


class Attributed(nn.Module):
    """Has attributes of many kinds, all of which its answer depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.tied = nn.Linear(SIZE, SIZE)
        self.tied.weight = self.first.weight
        self.table = nn.Buffer(torch.arange(SIZE), persistent=False)
        self.options = Options(2.0, Kind.LARGE)
        self.act = functools.partial(scaled, 0.5)
        self.method = self.widened
        self.dtype, self.device, self.format = torch.float32, torch.device("cpu"), torch.contiguous_format
        self.operator = torch.ops.aten.silu.default
        self.math = math
        self.generator = torch.Generator()
        self.first.weight.is_special = True

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(2, *x.shape)

    def forward(self, x: torch.Tensor, rows: list[torch.Tensor], *, by: dict[str, float]) -> torch.Tensor:
        assert self.options.kind is Kind.LARGE
        assert self.first.weight.is_special
        x = self.operator(self.tied(self.first(x))) + self.table.to(self.dtype)
        x = self.act(x) * self.options.gain * by["more"] * self.math.pi + torch.rand(1, generator=self.generator)
        return self.method(x) + sum(row.sum() for row in rows)


class Forgetful(nn.Linear):
    """Keeps its compiled call in its state, which torch's own `__getstate__` leaves out."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "was_pickled": True}


class Codes(torch.Tensor):
    """A weight of 8 bits with one scale for each row, that is put together when it is used."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Codes:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=scale.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: None, shape: Any, strides: Any) -> Codes:
        return cls(parts["codes"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, operator: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        args = [value.codes.to(value.scale) * value.scale if isinstance(value, cls) else value for value in args]
        return operator(*args, **(kwargs or {}))


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-128, 128, (SIZE, SIZE), dtype=torch.int8)
        self.weight = nn.Parameter(Codes(codes, torch.rand(SIZE, 1)), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


class Labelled(torch.Tensor):
    """A tensor with a class of its own and nothing else."""


class Complex(nn.Module):
    """Takes tensors that are conjugated or negated when they are read."""

    def forward(self, x: torch.Tensor, negated: torch.Tensor, label: Labelled) -> torch.Tensor:
        return x * negated + label


class Layers(nn.Module):
    """What a language model's step has: parameters, a cache that it writes, and a place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, SIZE)
        self.head = nn.Linear(SIZE, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.cache = [torch.zeros(8, SIZE) for _ in range(2)]

    def forward(self, token: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        for cache in self.cache:
            cache.index_copy_(0, place, self.embedding(token))
        return self.head(F.silu(sum(self.cache)))


def description(module: nn.Module, args: Any, kwargs: Any) -> list[Any]:
    """What artifacts are found by: the same for a call and for what another process makes of it."""
    described = [structure_digest(structure(module)), CallSpec.of((module, args, kwargs)).stored]
    return json.loads(json.dumps(described))


def shapes(output: Any) -> Any:
    """The shapes of the tensors in an output."""
    return [list(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def main() -> None:
    for path in sorted(Path(sys.argv[1]).glob("*.call")):
        module, args, kwargs = receive(path.read_bytes())
        found = description(module, args, kwargs)
        with torch.inference_mode(path.stem.startswith("inference")), torch.no_grad():
            output = call_region(module, args, kwargs)
        path.with_suffix(".json").write_text(json.dumps([found, shapes(output)]))


if __name__ == "__main__":
    main()
