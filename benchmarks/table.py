"""What every benchmark prints: medians with their range, and markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeVar

T = TypeVar("T")


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


@dataclass(frozen=True)
class Row(Generic[T]):
    """The records of one row, and those of another that it is compared with; none where it is that one itself."""

    records: Sequence[T]
    reference: Sequence[T] = ()

    def of(self, value: Callable[[T], float | None], digits: int = 2) -> str:
        """A cell: the median of a value, with its range."""
        return spread([value(record) for record in self.records], digits)

    def against(self, compare: Callable[[float, float], float], value: Callable[[T], float]) -> str:
        """A cell: this row's median and the reference's, compared; a dash without a reference."""
        if not self.reference:
            return "–"
        return f"{compare(median(map(value, self.records)), median(map(value, self.reference))):.2f}"
