"""The sums that the tiny Llama in ``demo/llama-adder`` learns, and those kept from it.

One pair of operands in ten is held out by a hash, so that training and tests
agree on which sums are unseen without sharing a list. Nothing here needs PyTorch.
"""

import random
import zlib

DIGITS = 3  # an operand has at most so many
HELD_OUT = 10  # one pair of operands in so many is never trained on


def prompt(a: int, b: int) -> str:
    """Return the text that asks for a sum."""
    return f"{a}+{b}="


def answer(a: int, b: int) -> str:
    """Return the text that the model is to answer."""
    return str(a + b)


def is_unseen(a: int, b: int) -> bool:
    """Tell whether the sum is held out; a pair goes together with its mirror image."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % HELD_OUT == 0


def draw_operand(rng: random.Random) -> int:
    """Draw the number of digits, then the operand, so that short ones are as common as long ones."""
    digits = rng.randint(1, DIGITS)
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def unseen_sums(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Return different sums that were never trained on, the same for each seed; there are about 100,000 in all."""
    rng = random.Random(seed)
    sums: dict[tuple[int, int], None] = {}  # in the order drawn
    while len(sums) < count:
        a, b = draw_operand(rng), draw_operand(rng)
        if is_unseen(a, b):
            sums[a, b] = None
    return list(sums)
