"""Pictures side by side in one file, enlarged and labelled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

_SIDE = 320  # pixels of an enlarged picture
_GAP = 24
_TITLE_SIZE = 22
_LABEL_SIZE = 16
_PAPER = "white"
_INK = "black"
_GREY = "#666666"


def side_by_side(pictures: Mapping[str, Path], labels: Mapping[str, str], title: str, path: Path) -> None:
    """Write square `pictures` into one PNG, left to right, each enlarged to 320x320 pixels, its name and label below.

    The pixels are repeated, not smoothed, so that a difference would be seen.
    """
    title_font, label_font = ImageFont.load_default(_TITLE_SIZE), ImageFont.load_default(_LABEL_SIZE)
    top = _GAP + _TITLE_SIZE + _GAP
    width = _GAP + len(pictures) * (_SIDE + _GAP)
    sheet = Image.new("RGB", (width, top + _SIDE + _TITLE_SIZE + _LABEL_SIZE + 2 * _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP), title, _INK, title_font)
    for number, (name, source) in enumerate(pictures.items()):
        left = _GAP + number * (_SIDE + _GAP)
        with Image.open(source) as picture:
            sheet.paste(picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.NEAREST), (left, top))
        draw.rectangle((left - 1, top - 1, left + _SIDE, top + _SIDE), outline=_GREY)
        below = top + _SIDE + _GAP // 3
        draw.text((left, below), name, _INK, title_font)
        draw.text((left, below + _TITLE_SIZE + 6), labels[name], _GREY, label_font)
    sheet.save(path)


def largest_difference(one: Path, other: Path) -> int:
    """The largest difference of two pictures of one size in any pixel's red, green or blue, of 255."""
    with Image.open(one) as first, Image.open(other) as second:
        pairs = zip(first.convert("RGB").tobytes(), second.convert("RGB").tobytes(), strict=True)
        return max(abs(a - b) for a, b in pairs)
