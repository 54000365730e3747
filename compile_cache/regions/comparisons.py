"""The comparisons of a region's code with eager: which were made, and whether the next one is due.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

# Code that arrives after READY is compared with eager on every instance, each of which takes about two eager calls. So
# that one request does not pay for all of them, a class with many instances compares in one of so many calls.
_CALLS_PER_COMPARISON = 8
_MANY = 4


class Comparisons:
    """The comparisons of one region.

    `pairs`: an instance, and the artifact or the way that was compared with eager on it. The pair without an instance
    says that the code was compared at all. `calls` counts the region's calls so far.
    """

    def __init__(self, calls: Callable[[], int]) -> None:
        self.pairs: set[tuple[nn.Module | None, str]] = set()
        self._put_off: set[tuple[nn.Module, str]] = set()
        self._calls = calls
        self._last = -math.inf

    @property
    def paths(self) -> set[str]:
        """The artifacts that were compared on every instance that has called them."""
        waiting = {path for module, path in list(self._put_off) if (module, path) not in self.pairs}
        return {path for module, path in list(self.pairs) if module is None} - waiting

    def note(self, *pairs: tuple[nn.Module | None, str]) -> None:
        """Note comparisons that this call makes."""
        self.pairs.update(pairs)
        self._last = self._calls()

    def put_off(self, module: nn.Module, path: str) -> None:
        """Note that an artifact waits for a later call of `module`."""
        self._put_off.add((module, path))

    def is_too_soon(self, instances: int) -> bool:
        """Whether this call should not compare, because another one did a few calls ago."""
        return instances >= _MANY and self._calls() < self._last + _CALLS_PER_COMPARISON
