"""How long does a picture wait for an artifact that arrives while it is drawn?

    OMP_NUM_THREADS=1 python benchmarks/arrivals.py --store /tmp/arrivals

The model compiles its artifacts in its setup. Then pictures are drawn in pairs, with a pause before each. While the
first one of a pair is drawn, a thread loads an artifact again: never, at once, or in the first gap between the regions'
calls, in turn. Counts is the slower one of the pair. One thread for torch leaves a core to the loading thread, so that
both wait for Python's lock alone.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from boot_process import describe_machine
from fresh_boot import PROMPT, ROOT, SEED, prepare
from served import InProcess
from table import markdown, spread

_PAUSE_S = 0.2
_LONGEST_ARRIVAL_S = 30.0


def slower_of_two(draw: Callable[[], float], arrive: Callable[[], None], delay_s: float) -> float:
    """Seconds of the slower one of two pictures. `arrive` begins `delay_s` after the first one has begun."""
    thread = threading.Timer(delay_s, arrive)
    thread.start()
    seconds = max(draw(), draw())
    thread.join(_LONGEST_ARRIVAL_S)
    return seconds


def main() -> None:
    """Boot, draw in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "demo" / "flux-digits", help="a pipeline's folder")
    parser.add_argument("--sizes", default="64x64", help="of pictures; the first is drawn")
    parser.add_argument("--store", type=Path, required=True, help="new folder for the store and the cache directory")
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    work = prepare(args.store).resolve()
    os.environ |= {
        "MODEL": str(args.model.resolve()),
        "IMAGE_SIZES": args.sizes,
        "WARM_UP_SIZES": args.sizes,
        "COMPILE_CACHE_COLD_START": "block",
        "COMPILE_CACHE_STORE": str(work / "store"),
        "COMPILE_CACHE_DIR": str(work / "directory"),
    }
    sys.path.insert(0, str(ROOT))
    from predict import Predictor

    predictor = Predictor()
    predictor.setup()
    served = InProcess(predictor)
    compiler: Any = predictor.boot._compiler
    paths = sorted(compiler._precompiled.used)
    rng = random.Random(SEED)

    def draw() -> float:
        time.sleep(_PAUSE_S)
        return served.answer(prompt=PROMPT, seed=SEED, num_inference_steps=4).seconds

    def load() -> None:
        compiler._load_arrived(rng.choice(paths))

    def load_in_gap() -> None:
        compiler.backlog().wait_for_gap()
        load()

    ways = {"nothing arrives": lambda: None, "loaded at once": load, "loaded in a gap": load_in_gap}
    usual_s = median(draw() for _ in range(10))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, arrive in ways.items():
            delay_s = _PAUSE_S + rng.uniform(0, usual_s)
            found[name].append(slower_of_two(draw, arrive, delay_s) / usual_s)
    rows = [[name, spread(ratios, 3), f"{sorted(ratios)[-2]:.3f}"] for name, ratios in found.items()]
    print(f"machine: {describe_machine()}\nartifacts: {len(paths)}; a picture takes {usual_s * 1e3:.0f} ms\n")
    print(markdown(("the slower of two pictures / the usual time", f"n = {args.rounds}", "second largest"), rows))


if __name__ == "__main__":
    main()
