"""What the launches of our own Triton kernels have in common."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Hopper: the first generation whose kernels can begin before the one before them has ended.
_OVERLAPPING_CAPABILITY = (9, 0)


@cache
def kernel(name: str) -> Any:
    """One of `models/kernels/decode.py`, which imports Triton: a CPU does without."""
    from models.kernels import decode as decode_kernels

    return getattr(decode_kernels, name)


def power_of_2(number: int) -> int:
    """The least that is not smaller."""
    return 1 << (number - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel's programs can begin while those of the kernel before are still at work."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OVERLAPPING_CAPABILITY


def launch_options(overlaps: bool) -> dict[str, bool]:
    """Of a Triton kernel; the option is not known to all of Triton's backends."""
    return {"launch_pdl": True} if overlaps else {}
