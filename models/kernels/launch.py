"""Launching our Triton kernels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# Hopper is the first generation whose kernels can start before their predecessor has ended.
_OVERLAPPING_CAPABILITY = (9, 0)


@cache
def kernel(name: str) -> Any:
    """A kernel of triton_kernels.py. That module is imported late, because it needs Triton, which a CPU lacks."""
    from models.kernels import triton_kernels

    return getattr(triton_kernels, name)


def power_of_2(number: int) -> int:
    """The least power of 2 that is not smaller than `number`."""
    return 1 << (number - 1).bit_length()


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether a kernel can start while its predecessor still runs."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OVERLAPPING_CAPABILITY


def launch_options(overlaps: bool) -> dict[str, bool]:
    """Launch options of a Triton kernel. Some backends of Triton do not know `launch_pdl`."""
    return {"launch_pdl": True} if overlaps else {}
