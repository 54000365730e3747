"""Orders of the server to the compiling process, and its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_cache.background.state import ServerState
    from compile_cache.inductor.speed import Speed
    from compile_cache.settings import Settings


@dataclass(frozen=True, slots=True)
class Place:
    """The folder in which the process compiles, and its settings. Sent once."""

    settings: Settings
    path: str


@dataclass(frozen=True, slots=True)
class PackedCall:
    """A call in bytes for another process. `on_gpu`: all its tensors are on a GPU."""

    content: bytes
    on_gpu: bool


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of call to compile: the bytes of `hand_over`, the server's state, and the dimensions to leave open.

    `dynamic` has (tensor, dimension) pairs. The code must fit any size of these dimensions.
    """

    call: bytes
    state: ServerState
    dynamic: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Making:
    """The answer to an order: an artifact's path and all its files, or the reason why there is none.

    Files without an artifact are those of graphs, which later boots trace again. `seconds` is the time that the order
    took. `speed` has the compiled and the eager time of the call, if measured.
    """

    path: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    speed: Speed | None = None
