"""Blocks that fail in the second process, each in its own way, and blocks that cannot go there."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from background_blocks import Wide


def in_second_process() -> bool:
    """Whether this is the process that compiles: its folder is named by letters, the server's by digits."""
    return os.path.basename(os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")).isalpha()


class Dropping(Wide):
    """Random, so that no compiled answer is eager's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5, training=True)


class Cheating(Wide):
    """Compiled, it gives another answer than eager: what a miscompilation looks like from outside."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(super().forward(x), self.scale) if torch.compiler.is_compiling() else super().forward(x)


@torch.library.custom_op("faulty_blocks::crash", mutates_args=())
def crash(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@crash.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if in_second_process():
        os.abort()
    return torch.empty_like(x)


@torch.library.custom_op("faulty_blocks::hang", mutates_args=())
def hang(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@hang.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if in_second_process() and (file := os.environ.get("BACKGROUND_HANGS")):
        Path(file).touch()
        time.sleep(600)
    return torch.empty_like(x)


@torch.library.custom_op("faulty_blocks::devour", mutates_args=())
def devour(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@devour.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    if in_second_process():
        bytearray(1 << 60)  # no machine has as much
    return torch.empty_like(x)


class Crashing(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return crash(super().forward(x))


class Hanging(Wide):
    """Hangs where BACKGROUND_HANGS names a file, which it makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return hang(super().forward(x))


class Devouring(Wide):
    """Takes more memory than there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return devour(super().forward(x))


class Locked(Wide):
    """Holds what belongs to one process alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Doubling(Wide):
    """Holds a function that no other process can import."""

    def __init__(self) -> None:
        super().__init__()
        self.act = lambda x: x.mm(self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


IS_DOUBLED = False


class Flagged(Wide):
    """Depends on something that one process alone has changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x.T) * 2.0 if IS_DOUBLED else torch.mm(x, x.T)
