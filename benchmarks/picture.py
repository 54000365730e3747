"""What is compared of a picture: its pixels."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

from PIL import Image


def identify(file: BinaryIO | str) -> tuple[str, int]:
    """SHA-256 of the RGB pixels, and the number of different colours."""
    with Image.open(file) as image:
        pixels = image.convert("RGB")
    colours = pixels.getcolors(maxcolors=pixels.width * pixels.height) or []
    return hashlib.sha256(pixels.tobytes()).hexdigest(), len(colours)
