"""A pack that a boot does not use. Reports import this module, so it imports almost nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedPack:
    """A pack that counts as absent, and the reason. `is_final` is False if it could not be read or the limits left no
    room: the next look may use it."""

    name: str
    reason: str
    is_final: bool = True
