"""The kinds of calls that met a region before their code existed, and the state of each.

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

from compile_cache.aot.options import RECOMPILE_LIMIT

# Artifacts for one kind of call of one instance. If more are needed, a number changes from call to call.
_MOST_VARIANTS = 8
# After so many calls that differ in one size only, a region asks for one graph for all sizes.
_SIZES_BEFORE_DYNAMIC = 3


class Turn(enum.Enum):
    """The next step for a call that no code fits."""

    LOOK = enum.auto()
    ASK = enum.auto()
    WAIT = enum.auto()


@dataclass(slots=True, eq=False)
class Kind:
    """One kind of call.

    | field | meaning |
    | --- | --- |
    | `looked` | for each instance, the generation of artifacts in which none fitted |
    | `later` | for each instance, the generation whose artifact it will be compared with later |
    | `asked` | how often each instance ordered code |
    | `waiting` | how many orders have no answer |
    | `refused` | why the kind is served eager for good |
    | `paths` | the artifacts that were made for it |
    | `arrived` | the first generation with the last of these artifacts |
    | `misfit` | why none of them fits |
    | `is_open` | a graph for all sizes was ordered for it, or has been made |
    | `in_warm_up` | the kind was in the warm-up |
    | `likeness` | the key without sizes |
    | `used` | the clock of the last use |
    """

    sizes: tuple[tuple[int, ...], ...]
    text: str
    likeness: Hashable
    used: int = 0
    looked: dict[nn.Module, int] = field(default_factory=dict)
    later: dict[nn.Module, int] = field(default_factory=dict)
    asked: dict[nn.Module, int] = field(default_factory=dict)
    waiting: int = 0
    arrived: int = -1
    in_warm_up: bool = False
    misfit: str = ""
    refused: str = ""
    paths: list[str] = field(default_factory=list)
    is_open: bool = False

    @property
    def may_go(self) -> bool:
        """Whether it may be forgotten: it waits for nothing, and is no call of the warm-up without an artifact."""
        return not self.waiting and (not self.in_warm_up or bool(self.paths))

    def turn(self, module: nn.Module, generation: int) -> Turn:
        """The next step for a call of `module` when `generation` generations of artifacts have arrived."""
        if self.looked.get(module) != generation:
            return Turn.LOOK
        if self.waiting or self.refused or self.arrived > generation:
            return Turn.WAIT
        return Turn.ASK

    def ask(self, module: nn.Module) -> bool:
        """Note an order for an artifact; False if there were too many already."""
        count = self.asked.get(module, 0)
        if count >= _MOST_VARIANTS:
            self.refused = "a number or a flag changes from call to call, so no compiled code fits for long"
            return False
        self.asked[module] = count + 1
        self.waiting += 1
        return True

    def take_back(self, module: nn.Module) -> None:
        """Undo an `ask` whose order is not made."""
        self.asked[module] -= 1
        self.waiting -= 1


class Kinds:
    """All kinds of one region. If there are too many, kinds without artifacts go first, then the least recently
    used."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Kind] = {}
        self._clock = itertools.count(1)
        # The clock when an artifact last served a call, by path.
        self._served: dict[str, int] = {}
        self._lock = threading.Lock()
        # By likeness: the dimensions for which a dynamic graph was ordered.
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
        """The kind with this key, made if it is new."""
        with self._lock:
            kind = self._kinds.get(key)
            if kind is None:
                kind = self._kinds[key] = Kind(*_sizes_and_text(args, kwargs), likeness_of(key))
            kind.used = next(self._clock)
            return kind

    def note_served(self, path: str) -> None:
        """Note that an artifact serves a call, and so its kind is in use."""
        self._served[path] = next(self._clock)

    def known(self, key: Hashable) -> Kind | None:
        """The kind with this key, if there is one."""
        with self._lock:
            return self._kinds.get(key)

    def let_go(self) -> list[Kind]:
        """Forget kinds if there are too many, but never the newest. Returns the forgotten kinds, which may come
        back."""
        with self._lock:
            count = len(self._kinds) - RECOMPILE_LIMIT
            if count <= 0:
                return []
            newest = next(reversed(self._kinds))
            idle = [key for key, kind in self._kinds.items() if kind.may_go and key != newest]
            idle.sort(key=lambda key: (bool(self._kinds[key].paths), self._last_use(self._kinds[key])))
            gone = [self._kinds.pop(key) for key in idle[:count]]
            for kind in gone:
                if kind.is_open:  # its graph may be ordered again
                    self._dynamic.pop(kind.likeness, None)
            return gone

    def _last_use(self, kind: Kind) -> int:
        return max([kind.used, *(self._served.get(path, 0) for path in kind.paths)])

    def varying(self, kind: Kind) -> tuple[tuple[int, int], ...]:
        """The (tensor, dimension) pairs to make dynamic for `kind`. Returned once; empty while few kinds are alike, or
        if they differ in more than one dimension of a tensor."""
        with self._lock:
            alike = [
                other
                for other in self._kinds.values()
                if other.likeness == kind.likeness and _is_alike(other.sizes, kind.sizes)
            ]
            if len({other.sizes for other in alike}) < _SIZES_BEFORE_DYNAMIC:
                return ()
            varying = frozenset[tuple[int, int]]().union(*(_differing(other.sizes, kind.sizes) for other in alike))
            tensors = [number for number, _ in varying]
            if len(set(tensors)) != len(tensors) or self._dynamic.get(kind.likeness) == varying:
                return ()
            self._dynamic[kind.likeness] = varying
            return tuple(sorted(varying))

    def is_covered(self, kind: Kind, generation: int) -> bool:
        """Whether a dynamic graph will fit this kind too: one that is on order, or comes after this generation."""
        with self._lock:
            varying = self._dynamic.get(kind.likeness)
            return varying is not None and any(
                other.is_open
                and (other.waiting > 0 or other.arrived > generation)
                and other.likeness == kind.likeness
                and _is_alike(other.sizes, kind.sizes)
                and _differing(other.sizes, kind.sizes) <= varying
                for other in self._kinds.values()
            )


def _differing(one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...]) -> frozenset[tuple[int, int]]:
    """The (tensor, dimension) pairs in which the sizes differ. Both have equally many tensors and dimensions."""
    return frozenset(
        (number, dimension)
        for number, (first, second) in enumerate(zip(one, two, strict=True))
        for dimension, (size, other) in enumerate(zip(first, second, strict=True))
        if size != other
    )


def _is_alike(one: tuple[tuple[int, ...], ...], two: tuple[tuple[int, ...], ...]) -> bool:
    """Whether all tensors have equally many dimensions and differ in at most one of them."""
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
