"""How well the demo model draws, compiled: digits drawn by the predictor, read by a classifier of the real ones.

Exits with 1 unless every region was compiled and at least 90 % of the pictures are read as the digit asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "demo")]

from read_digits import DIGIT_WORDS, share_read  # noqa: E402

BAR = 0.90


def settings(size: str, store: str) -> dict[str, str]:
    """The demo model, in one size; an eager one if `COMPILE_CACHE_SCOPE` is set to `off`."""
    return {
        "MODEL": str(ROOT / "demo" / "flux-digits"),
        "IMAGE_SIZES": size,
        "COMPILE_CACHE_STORE": f"{store}/store",
        "COMPILE_CACHE_DIR": f"{store}/cache",
        "HF_HUB_OFFLINE": "1",
    }


def main() -> int:
    """Draw, read, print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=20, help="pictures of each digit")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--size", default="64x64")
    args = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as store:
        os.environ.update(settings(args.size, store))
        from predict import Predictor

        predictor = Predictor()
        predictor.setup()
        predictor.boot.wait_published(60)
    from models.image.pipeline import ImageInputs

    digits = [digit for digit in range(10) for _ in range(args.each)]
    pictures = [
        predictor.model.run(
            ImageInputs(
                f"a handwritten {DIGIT_WORDS[digit]}", predictor.model.sizes[0], seed, num_inference_steps=args.steps
            )
        )
        for seed, digit in enumerate(digits)
    ]
    share = share_read(pictures, digits)
    steps = {region.name: region.step for region in predictor.boot.report.regions}
    print(f"{len(digits)} pictures of {args.size}, {args.steps} steps, regions {steps}: {share:.1%} read as asked for")
    compiled = bool(steps) and set(steps.values()) <= {"cold", "cached"}
    return 0 if compiled and share >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
