"""A plot of lines over a logarithmic scale, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 640, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 20, 50
_COLOURS = {False: "#888888", True: "#0b6e99"}
_STEPS = (1, 1.5, 2, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Line:
    """Points from left to right; what is dashed or highlighted."""

    name: str
    is_highlighted: bool
    is_dashed: bool
    points: tuple[tuple[float, float], ...]


def plot(lines: Sequence[Line], across: str, up: str) -> str:
    """The picture. The scale from bottom to top is logarithmic."""
    points = [point for line in lines for point in line.points] or [(1.0, 1.0)]
    most_x = max(x for x, _ in points) * 1.05
    least, most = math.log10(min(y for _, y in points) / 1.2), math.log10(max(y for _, y in points) * 1.2)

    def place_x(x: float) -> float:
        return _LEFT + x / most_x * (_WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return _HEIGHT - _BOTTOM - (math.log10(y) - least) / (most - least) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *_axes(across, up, sorted({0.0, *(x for x, _ in points)}), (least, most), place_x, place_y),
    ]
    for number, line in enumerate(lines):
        parts += _drawn(line, number, place_x, place_y)
    return "\n".join([*parts, "</svg>", ""])


def _axes(
    across: str,
    up: str,
    marked: Sequence[float],
    powers: tuple[float, float],
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
) -> Iterator[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for value in _round_values(*powers):
        y = place_y(value)
        yield f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e0e0e0"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value in marked:
        yield f'<text x="{place_x(value):.1f}" y="{bottom + 18}" text-anchor="middle">{value:.3g}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>'
    yield f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{across}</text>'
    middle = (_TOP + bottom) / 2
    yield f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">{up}</text>'


def _round_values(least: float, most: float) -> Iterator[float]:
    """1, 1.5, 2, 3, 5, 7, 10, 15 … between two powers of ten."""
    for power in range(math.floor(least), math.ceil(most) + 1):
        yield from (step * 10.0**power for step in _STEPS if least <= math.log10(step * 10.0**power) <= most)


def _drawn(
    line: Line, number: int, place_x: Callable[[float], float], place_y: Callable[[float], float]
) -> Iterator[str]:
    look = f'stroke="{_COLOURS[line.is_highlighted]}" stroke-width="2"' + (' stroke-dasharray="6 4"' * line.is_dashed)
    places = [(place_x(x), place_y(y)) for x, y in line.points]
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" fill="none" {look}/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[line.is_highlighted]}"/>' for x, y in places)
    y = _TOP + 10 + 20 * number
    left = _WIDTH - _RIGHT + 12
    yield f'<line x1="{left}" x2="{left + 28}" y1="{y}" y2="{y}" {look}/>'
    yield f'<text x="{left + 34}" y="{y + 4}">{line.name}</text>'
