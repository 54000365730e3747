"""Compares compiled code with eager: the answers of a call, and its device memory.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

# The largest allowed ‖compiled − eager‖ / ‖eager‖ of one output. A compiled block rounds less often than eager; a wrong
# block is off by orders of magnitude. The half types allow a few units in the last place (2⁻⁸, 2⁻¹¹), which grow in a
# block's products.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of a call, and the bytes of device memory that it took at its peak; None without a GPU."""

    output: Any
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The largest error of all outputs against eager, and the tolerance for that output's type."""

    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the answer may be used."""
        return self.error <= self.tolerance

    @property
    def difference(self) -> str:
        """The error in words; empty if the check passed."""
        return "" if self.passed else f"differs from eager by {self.error:.1e}; {self.tolerance:.0e} is allowed"


def measured(function: Callable[..., Any], *inputs: Any) -> Answer:
    """The answer of `function` to these inputs."""
    with PeakMemory() as peak:
        output = function(*inputs)
    return Answer(output, peak.bytes)


def compare(output: Any, reference: Any) -> Check:
    """Compare all tensors in two nested results by ‖output − reference‖ / ‖reference‖.

    The error is infinite if structures, shapes, integers or infinities differ, or if either side has a NaN.
    """
    outputs, output_spec = pytree.tree_flatten(output)
    references, reference_spec = pytree.tree_flatten(reference)
    worst = Check(0.0, _TOLERANCES[torch.float32])
    if output_spec != reference_spec:
        return Check(math.inf, worst.tolerance)
    for one, other in zip(outputs, references, strict=True):
        if isinstance(other, torch.Tensor):
            found = Check(_relative_error(one, other), _TOLERANCES.get(other.dtype.to_real(), 0.0))
            worst = max(worst, found, key=_severity)
    return worst


def _severity(check: Check) -> float:
    return check.error / check.tolerance if check.tolerance else check.error


def _relative_error(output: Any, reference: torch.Tensor) -> float:
    if not isinstance(output, torch.Tensor) or output.shape != reference.shape or output.dtype != reference.dtype:
        return math.inf
    if reference.is_complex():
        output, reference = torch.view_as_real(output.resolve_conj()), torch.view_as_real(reference.resolve_conj())
    if not reference.is_floating_point():
        return 0.0 if torch.equal(output, reference) else math.inf
    error = _norm_error(output, reference)
    if not math.isfinite(error):
        finite = reference.isfinite()
        if not torch.equal(output[~finite], reference[~finite]):
            return math.inf
        error = _norm_error(output[finite], reference[finite])
    return error if math.isfinite(error) else math.inf


def _norm_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    wide = torch.float64 if reference.dtype in (torch.float32, torch.float64) else torch.float32
    difference = float(torch.linalg.vector_norm(output.to(wide) - reference.to(wide)))
    norm = float(torch.linalg.vector_norm(reference, dtype=wide))
    return difference / norm if norm else difference


class PeakMemory:
    """The device memory that the context takes at its peak, beyond the memory in use at its start; None without a GPU.

    torch keeps one peak, and this resets it: `highest_bytes` is the peak of the process before the reset.
    """

    bytes: int | None = None
    highest_bytes = 0

    def __enter__(self) -> PeakMemory:
        if torch.cuda.is_available():
            PeakMemory.highest_bytes = max(PeakMemory.highest_bytes, torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        if torch.cuda.is_available():
            self.bytes = torch.cuda.max_memory_allocated() - self._before
