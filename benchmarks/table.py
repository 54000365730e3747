"""What benchmarks print: medians with their range, means with their interval, and markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean, median, quantiles, stdev

# Student's t: 95 % of the values are below, for 1, 2, … degrees of freedom.
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)


def spread(values: Iterable[float | None], digits: int = 2) -> str:
    """`1.20 (1.10–1.35)`: median, least and greatest; a dash where nothing was measured."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return "–"
    if len(numbers) == 1:
        return f"{numbers[0]:.{digits}f}"
    return f"{median(numbers):.{digits}f} ({min(numbers):.{digits}f}–{max(numbers):.{digits}f})"


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, its 90 % interval (Student's t), and all values."""
    middle = mean(values)
    each = ", ".join(f"{value:.{digits}f}" for value in values)
    if len(values) < 2:
        return f"{middle:.{digits}f}, n = 1"
    reach = _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / len(values) ** 0.5
    return (
        f"mean {middle:.{digits}f}, 90 % interval {middle - reach:.{digits}f} to {middle + reach:.{digits}f}, "
        f"median {median(values):.{digits}f}, n = {len(values)} ({each})"
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not pass."""
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else values[0]
