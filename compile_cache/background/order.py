"""What the server asks of the compiling process, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_cache.background.state import ServerState
    from compile_cache.regions.speed import Speed
    from compile_cache.settings import Settings


@dataclass(frozen=True, slots=True)
class Place:
    """Where the process compiles, and by which settings. It gets this once."""

    settings: Settings
    path: str


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call that another process can build, and whether all of its tensors are on a GPU."""

    content: bytes
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of call: the call as `hand_over` packs it, the server's state, and the (tensor, dimension) pairs whose
    size the code must leave open."""

    call: bytes
    state: ServerState
    dynamic: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Making:
    """What came of an order: an artifact's path and all files that belong to it, or the reason why there is none.

    `seconds` is how long that took. `speed` is the device time of the call, compiled and eager, where it was measured.
    If the reason is not `lasting`, another boot may succeed.
    """

    path: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    speed: Speed | None = None
    lasting: bool = True
