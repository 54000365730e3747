"""A pack that a boot does not use. Reports name it, so this module imports next to nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RefusedPack:
    """A pack that counts as absent, and why. `is_final` is False if it could not be read, or has no room now: the next
    look may use it."""

    name: str
    reason: str
    is_final: bool = True
