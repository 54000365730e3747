"""A program's own passes over graphs and preparations, which another process can import by name."""

from __future__ import annotations

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

REGISTERED: list[str] = []


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


def register() -> None:
    REGISTERED.append("registered")


def set_pass() -> None:
    """As a model family does: a pass that stays set in the calling thread."""
    config.joint_custom_post_pass = Versioned("of the family")


def fail() -> None:
    raise LookupError("no such attention")
