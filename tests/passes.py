"""A program's own passes over graphs and preparations, which another process can import by name."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

REGISTERED: list[Any] = []


class Versioned(CustomGraphPass):
    def __init__(self, version: str) -> None:
        self.version = version

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Changes nothing."""

    def uuid(self) -> str:
        return self.version

    def method(self) -> None:
        """Belongs to one object."""


def leave(graph: torch.fx.Graph) -> None:
    """Changes nothing."""


def register(value: Any) -> None:
    REGISTERED.append(value)


def set_pass(version: str) -> None:
    """As a model family does: a pass that stays set in the calling thread."""
    config.joint_custom_post_pass = Versioned(version)


def fail() -> None:
    raise LookupError("no such attention")
