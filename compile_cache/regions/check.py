"""Compiled against eager: how far two results differ, and how much device memory each call took."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

# Largest ‖compiled − eager‖ / ‖eager‖ of one output. A compiled block rounds less often than eager does; a wrong one is
# off by orders of magnitude. The half types: a few units in the last place (2⁻⁸, 2⁻¹¹) through a block's products.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def largest_relative_error(output: Any, reference: Any) -> tuple[float, float]:
    """The largest ‖output − reference‖ / ‖reference‖ of all tensors in two nested results, and its dtype's tolerance.

    Infinite for another structure or shape, for NaN on either side, and for integers that differ.
    """
    outputs, output_spec = pytree.tree_flatten(output)
    references, reference_spec = pytree.tree_flatten(reference)
    worst = (0.0, _TOLERANCES[torch.float32])
    if output_spec != reference_spec:
        return float("inf"), worst[1]
    for one, other in zip(outputs, references, strict=True):
        if isinstance(other, torch.Tensor):
            found = _relative_error(one, other), _TOLERANCES.get(other.dtype, 0.0)
            worst = max(worst, found, key=lambda pair: pair[0] / pair[1] if pair[1] else pair[0])
    return worst


def _relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return float("inf")
    if not reference.is_floating_point():
        return 0.0 if torch.equal(output, reference) else float("inf")
    wide = torch.float64 if reference.dtype in (torch.float32, torch.float64) else torch.float32
    difference = torch.linalg.vector_norm(output.to(wide) - reference.to(wide)).item()
    norm = torch.linalg.vector_norm(reference, dtype=wide).item()
    error = difference / norm if norm else difference
    return error if error == error else float("inf")


class PeakMemory:
    """Device memory in use at the peak of the context, above what was in use when it began; None without a GPU.

    torch keeps one peak, which this resets: `highest_bytes` is the peak of the whole process until then.
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
