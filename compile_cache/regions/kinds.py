"""The kinds of calls that a region has met and no code was at hand for: what became of each.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils import _pytree as pytree

# As many as Dynamo may make graphs of a function.
MOST_KINDS = 64
# Artifacts for one kind of call of one instance. More of them means that a number changes from call to call.
_MOST_VARIANTS = 8
# Calls of one region that differ in one size before one graph for all sizes is asked for.
_SIZES_BEFORE_DYNAMIC = 3


class Turn(enum.Enum):
    """What to do with a call that no code fits."""

    LOOK = enum.auto()
    ASK = enum.auto()
    WAIT = enum.auto()


@dataclass(slots=True, eq=False)
class Kind:
    """One kind of call.

    `looked` has, for each instance, the generation of artifacts in which none fitted. `asked` counts the orders for
    each instance, and `waiting` those without an answer. `refused` says why the kind is served eager for good;
    `is_to_remember` is set until later boots are told. `paths` are the artifacts made for it.
    `arrived` is the first generation with the last of these, and `misfit` says why none fits; if it `is_open`, that one
    is for all sizes. A kind that `is_planned` was in the warm-up. `likeness` is what it shares with kinds of other
    sizes; `used` counts up.
    """

    sizes: tuple[tuple[int, ...], ...]
    text: str
    likeness: Hashable
    used: int = 0
    looked: dict[nn.Module, int] = field(default_factory=dict)
    asked: dict[nn.Module, int] = field(default_factory=dict)
    waiting: int = 0
    arrived: int = -1
    is_planned: bool = False
    misfit: str = ""
    refused: str = ""
    is_to_remember: bool = False
    paths: list[str] = field(default_factory=list)
    is_open: bool = False

    def turn(self, module: nn.Module, generation: int) -> Turn:
        """What to do with a call of `module` while there are `generation` generations of artifacts."""
        if self.looked.get(module) != generation:
            return Turn.LOOK
        if self.waiting or self.refused or self.arrived > generation:
            return Turn.WAIT
        return Turn.ASK

    def ask(self, module: nn.Module) -> bool:
        """Note that an artifact is asked for; False if there were too many already."""
        count = self.asked.get(module, 0)
        if count >= _MOST_VARIANTS:
            self.refused = "a number or a flag changes from call to call, so that no compiled code fits for long"
            return False
        self.asked[module] = count + 1
        self.waiting += 1
        return True


class Kinds:
    """All kinds of one region. Too many, those without artifacts go first, then the one used longest ago."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Kind] = {}
        self._clock = itertools.count(1)
        # When artifacts last served a call, by path.
        self._served: dict[str, int] = {}
        self._lock = threading.Lock()
        # By everything but the sizes: the dimensions that one dynamic graph was asked for.
        self._dynamic: dict[Hashable, frozenset[tuple[int, int]]] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[Kind]:
        with self._lock:
            return iter(list(self._kinds.values()))

    @property
    def waiting(self) -> int:
        """Kinds that are served eager until their code arrives."""
        return sum(bool(kind.waiting) for kind in self)

    def of(self, key: Hashable, args: tuple[object, ...], kwargs: dict[str, object]) -> Kind:
        """The kind with this key; a new one if there is none."""
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._kinds[key] = Kind(*_sizes_and_text(args, kwargs), likeness_of(key))
            kind.used = next(self._clock)
            return kind

    def note_served(self, path: str) -> None:
        """Note that an artifact serves a call: its kind is used."""
        self._served[path] = next(self._clock)

    def known(self, key: Hashable) -> Kind | None:
        """The kind with this key, if there is one."""
        with self._lock:
            return self._kinds.get(key)

    def let_go(self) -> list[Kind]:
        """Forget kinds, if there are too many, but not the newest; those that were forgotten. They may come back."""
        with self._lock:
            count = len(self._kinds) - MOST_KINDS
            if count <= 0:
                return []
            newest = next(reversed(self._kinds))
            idle = [key for key, kind in self._kinds.items() if not kind.waiting and key != newest]
            idle.sort(key=lambda key: (bool(self._kinds[key].paths), self._last_use(self._kinds[key])))
            gone = [self._kinds.pop(key) for key in idle[:count]]
            for kind in gone:
                if kind.is_open:  # it may be asked for again
                    self._dynamic.pop(kind.likeness, None)
            return gone

    def _last_use(self, kind: Kind) -> int:
        return max([kind.used, *(self._served.get(path, 0) for path in kind.paths)])

    def varying(self, kind: Kind) -> tuple[tuple[int, int], ...]:
        """The (tensor, dimension) pairs to make dynamic for `kind`, once; empty while the kinds alike it are few, or
        differ in more than one dimension of a tensor."""
        with self._lock:
            alike = [
                other
                for other in self._kinds.values()
                if other.likeness == kind.likeness and _is_alike(other.sizes, kind.sizes)
            ]
            if len({other.sizes for other in alike}) < _SIZES_BEFORE_DYNAMIC:
                return ()
            pairs = {
                (number, dimension)
                for other in alike
                for number, (one, two) in enumerate(zip(other.sizes, kind.sizes, strict=True))
                for dimension, (size, own) in enumerate(zip(one, two, strict=True))
                if size != own
            }
            varying = frozenset(pairs)
            tensors = [number for number, _ in varying]
            if len(set(tensors)) != len(tensors) or self._dynamic.get(kind.likeness) == varying:
                return ()
            self._dynamic[kind.likeness] = varying
            return tuple(sorted(varying))


def _is_alike(one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...]) -> bool:
    """Whether all tensors have as many dimensions, and differ in one of them at most."""
    return len(one) == len(two) and all(
        len(first) == len(second) and sum(map(int.__ne__, first, second)) <= 1
        for first, second in zip(one, two, strict=True)
    )


def likeness_of(key: Hashable) -> Hashable:
    """A `kind_of_call` without the sizes and strides of its tensors."""
    assert isinstance(key, tuple)
    spec, leaves, *rest = key
    return spec, tuple(leaf[:3] + leaf[5:] for leaf in leaves), *rest


def _sizes_and_text(args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[tuple[tuple[int, ...], ...], str]:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    sizes = tuple(tuple(tensor.shape) for tensor in tensors)
    text = ", ".join("x".join(map(str, size)) or "scalar" for size in sizes[:6])
    return sizes, text + (", …" if len(sizes) > 6 else "")
