"""The sums that the tiny Llama in ``demo/llama-adder`` learns, and the sums for its tests.

A hash holds out one pair of operands in ten. So training and tests agree on the
unseen sums without sharing a list. Nothing here needs PyTorch.
"""

import random
import zlib

DIGITS = 3  # the most digits of an operand
HELD_OUT = 10  # training leaves out one pair of operands in so many


def prompt(a: int, b: int) -> str:
    """Return the text that asks for a sum."""
    return f"{a}+{b}="


def answer(a: int, b: int) -> str:
    """Return the correct answer of the model."""
    return str(a + b)


def is_unseen(a: int, b: int) -> bool:
    """Tell whether the sum is held out. A pair and its mirror image go together."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % HELD_OUT == 0


def draw_operand(rng: random.Random) -> int:
    """Draw the number of digits, then the operand, so that short operands are as common as long ones."""
    digits = rng.randint(1, DIGITS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def unseen_sums(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return different unseen sums, always the same for a seed. About 100,000 exist."""
    rng = random.Random(seed)
    sums: dict[tuple[int, int], None] = {}  # in the order drawn
    while len(sums) < count:
        a, b = draw_operand(rng), draw_operand(rng)
        if is_unseen(a, b):
            sums[a, b] = None
    return list(sums)
