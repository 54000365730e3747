"""What every benchmark prints: medians with their range, and markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median, quantiles


def spread(values: Iterable[float | None], digits: int = 2) -> str:
    """`1.20 (1.10–1.35)`: median, least and greatest; a dash where nothing was measured."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f}–{max(numbers):.{digits}f})"


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not pass."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]
