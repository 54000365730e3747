"""Read the digit in a drawn picture, with a classifier fitted on real handwriting.

The reader is a support vector machine fitted on the 1797 pictures of
``sklearn.datasets.load_digits`` (8x8 pixels, ink from 0 to 16). It converts a
canvas of any size to that form first. sklearn takes a second to import, so it
is imported where a picture is read.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from sklearn.svm import SVC

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

GRID = 8  # a real picture has 8x8 pixels
FULL_INK = 16.0  # the darkest pixel of a real picture
DIGIT_SHARE = 0.75  # the digit fills this share of the canvas's shorter side, centred


def load_real_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the real pictures (1797, 8, 8), ink from 0 to 16, and their digits (1797,)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.float32), digits.target


@cache
def fit_reader() -> "SVC":
    """Fit the classifier on all the real pictures; later calls return the same one."""
    from sklearn.svm import SVC

    pictures, labels = load_real_digits()
    return SVC(gamma=0.001, C=10.0).fit(pictures.reshape(len(pictures), -1), labels)


def crop_digit(image: Image.Image) -> Image.Image:
    """Crop the centred square that holds the digit."""
    side = DIGIT_SHARE * min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    return image.crop((round(left), round(top), round(left + side), round(top + side)))


def has_light_paper(image: Image.Image) -> bool:
    """Tell whether the picture is dark ink on light paper. The outermost pixels decide."""
    grey = np.asarray(image.convert("L"))
    edge = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
    return bool(edge.mean() > 127.5)


def shrink_to_grid(image: Image.Image) -> np.ndarray:
    """Return the digit in the form of a real picture: (8, 8), ink from 0 to 16."""
    small = crop_digit(image).convert("L").resize((GRID, GRID), Image.Resampling.BOX)
    light = np.asarray(small, dtype=np.float32) / 255
    return FULL_INK * (1 - light if has_light_paper(image) else light)


def read_digits(images: Sequence[Image.Image]) -> list[int]:
    """Read the digit in each picture."""
    grids = np.stack([shrink_to_grid(image).reshape(-1) for image in images])
    return [int(digit) for digit in fit_reader().predict(grids)]


def share_read(images: Sequence[Image.Image], digits: Sequence[int]) -> float:
    """Return the share of the pictures that are read as the requested digit."""
    return float(np.mean(np.equal(read_digits(images), digits)))
