"""Blocks that fail in the second process, each in its own way."""

from __future__ import annotations

import os
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


def hang() -> None:
    if file := os.environ.get("BACKGROUND_HANGS"):
        Path(file).touch()
        time.sleep(600)


FAILURES = {"crash": os.abort, "hang": hang, "devour": lambda: bytearray(1 << 60)}  # no machine has as much memory


@torch.library.custom_op("faulty_blocks::fail", mutates_args=())
def fail(x: torch.Tensor, how: str) -> torch.Tensor:
    return x.clone()


@fail.register_fake
def _(x: torch.Tensor, how: str) -> torch.Tensor:
    if in_second_process():
        FAILURES[how]()
    return torch.empty_like(x)


class Crashing(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fail(super().forward(x), "crash")


class Hanging(Wide):
    """Hangs where BACKGROUND_HANGS names a file, which it makes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fail(super().forward(x), "hang")


class Devouring(Wide):
    """Takes more memory than there is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fail(super().forward(x), "devour")


IS_DOUBLED = False


class Flagged(Wide):
    """Depends on something that one process alone has changed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x.T) * 2.0 if IS_DOUBLED else torch.mm(x, x.T)
