"""The sizes of pictures. A model draws a fixed list of sizes, and is compiled once for each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

# Width to height: the choices of Replicate's image models.
ASPECT_RATIOS = ("1:1", "16:9", "9:16", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "21:9", "9:21")
# A size serves every aspect ratio within this factor: 1152x896 is 4:3 within 4 %.
_RATIO_TOLERANCE = 1.05
_NATIVE_STEP = 64


@dataclass(frozen=True, slots=True)
class Size:
    """A picture's size in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def parse_sizes(variable: str, text: str) -> tuple[Size, ...]:
    """Read sizes such as `1024x1024,1344x768`.

    Raises:
        ValueError: a part of `text` is not a size. The message names `variable` and that part.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    matches = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in parts]
    if None in matches:
        raise ValueError(f"{variable} has {parts[matches.index(None)]!r}; give sizes as 1024x1024,1344x768")
    return tuple(Size(int(match[1]), int(match[2])) for match in matches if match)


def native_sizes(resolution: int) -> tuple[Size, ...]:
    """A size for each aspect ratio: about `resolution`² pixels, in steps of 64 pixels."""

    def step(length: float) -> int:
        return max(1, round(length / _NATIVE_STEP)) * _NATIVE_STEP

    def size(ratio: float) -> Size:
        # The longer side is computed from the rounded shorter side. Rounding both separately can miss the ratio by 6 %.
        if ratio < 1:
            return Size(size(1 / ratio).height, size(1 / ratio).width)
        height = step(resolution / math.sqrt(ratio))
        return Size(step(height * ratio), height)

    return tuple(size(_ratio(aspect_ratio)) for aspect_ratio in ASPECT_RATIOS)


def offered_sizes(resolution: int) -> tuple[Size, ...]:
    """The native sizes, and those of a quarter of their pixels if half the resolution is a whole number of steps."""
    has_quarter = resolution % (2 * _NATIVE_STEP) == 0
    return native_sizes(resolution) + (native_sizes(resolution // 2) if has_quarter else ())


def sizes_of(sizes: Sequence[Size], megapixels: str) -> list[Size]:
    """`1`: the sizes with more than half of the largest one's pixels. `0.25`: the others. `match_input`: all.

    Raises:
        ValueError: there are none.
    """
    most = max(size.width * size.height for size in sizes)
    is_large = {"1": (True,), "0.25": (False,), "match_input": (True, False)}[megapixels]
    found = [size for size in sizes if (2 * size.width * size.height > most) in is_large]
    if not found:
        raise ValueError(f"megapixels {megapixels} is not available; this model draws {', '.join(map(str, sizes))}")
    return found


def choose_size(sizes: Sequence[Size], aspect_ratio: str | None, width: int | None, height: int | None) -> Size:
    """Choose one of `sizes`: exactly `width` x `height` if given, else the nearest to `aspect_ratio`, else the first.

    Raises:
        ValueError: there is no such size. The message lists the available sizes.
    """
    available = "this model draws " + ", ".join(map(str, sizes))
    if width is not None or height is not None:
        if width is None or height is None:
            raise ValueError(f"give both width and height, or an aspect_ratio; {available}")
        if (size := Size(width, height)) not in sizes:
            raise ValueError(f"{size} is not available; {available}")
        return size
    if aspect_ratio is None:
        return sizes[0]
    asked = _ratio(aspect_ratio)
    distances = [abs(math.log(size.width / size.height / asked)) for size in sizes]
    if min(distances) > math.log(_RATIO_TOLERANCE):
        raise ValueError(f"aspect_ratio {aspect_ratio} is not available; {available}")
    return sizes[distances.index(min(distances))]


def nearest_size(sizes: Sequence[Size], width: int, height: int) -> Size:
    """The size nearest to a picture's: first in its shape, where some percent are none, then in its pixels."""

    def distance(size: Size) -> tuple[float, float]:
        shape = abs(math.log(size.width / size.height * height / width)) - math.log(_RATIO_TOLERANCE)
        return round(max(0.0, shape), 2), abs(math.log(size.width * size.height / (width * height)))

    return min(sizes, key=distance)


def _ratio(aspect_ratio: str) -> float:
    width, _, height = aspect_ratio.partition(":")
    return int(width) / int(height)
