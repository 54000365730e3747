"""The part of a boot that compilation costs, cold against warm, on whatever machine this runs.

The compile part is the warm-up's seconds less those of an eager boot's warm-up, which runs the same predictions. A
cold boot runs them twice, because it repeats them until nothing is compiled any more. Eager, cold and warm boots take
turns, each a fresh process; each cold one begins with an empty store, from which the next warm one restores.
Beside it stands what the boots measured themselves: the calls of regions that compiled or looked up a graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from fresh_boot import Boot, Plan, prepare, run_boot
from table import markdown, spread

_KINDS = ("eager", "cold", "warm")
_COLUMNS = (
    "boot",
    "n",
    "warm-up, s",
    "compile part, s",
    "compiler set-up, s",
    "both, s",
    "compiling calls, s",
    "fully cached",
)


def main() -> None:
    """Boot in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/flux-digits")
    parser.add_argument("--sizes", default="64x64", help="all of them are warmed up")
    parser.add_argument("--rounds", type=int, default=3, help="boots of each kind")
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directory and logs")
    args = parser.parse_args()

    plan = Plan(args.model, args.sizes, (1, 2), prepare(args.store), pairs=1)
    boots: dict[str, list[Boot]] = {kind: [] for kind in _KINDS}
    for number in range(args.rounds):
        for kind in _KINDS:
            boot = run_boot(plan, kind, plan.work / f"store-{number}")
            boots[kind].append(boot)
            print(
                f"{kind}: warm-up {boot.warm_up_s:.2f} s, compiler set-up {boot.setup_s:.2f} s, "
                f"compiling calls {boot.report['compile_s']:.2f} s",
                flush=True,
            )
    print_results(boots)


def print_results(boots: dict[str, list[Boot]]) -> None:
    """The table, and the ratio.

    Raises:
        SystemExit: a warm boot compiled something, so that the table does not say what it seems to.
    """
    print(f"\nmachine: {boots['eager'][0].machine}\nmedian (least–greatest)\n")
    eager_s = median(boot.warm_up_s for boot in boots["eager"])
    parts_s = {kind: [boot.warm_up_s - eager_s for boot in boots[kind]] for kind in ("cold", "warm")}
    boths_s = {
        kind: [part_s + boot.setup_s for part_s, boot in zip(parts_s[kind], boots[kind], strict=True)]
        for kind in parts_s
    }
    calls_s = {kind: [boot.report["compile_s"] for boot in boots[kind]] for kind in parts_s}
    rows = [
        (
            kind,
            len(boots[kind]),
            spread(boot.warm_up_s for boot in boots[kind]),
            spread(parts_s.get(kind, ())),
            spread(boot.setup_s for boot in boots[kind]),
            spread(boths_s.get(kind, ())),
            spread(calls_s.get(kind, ())),
            f"{sum(boot.report['fully_cached'] for boot in boots[kind])} of {len(boots[kind])}",
        )
        for kind in _KINDS
    ]
    print(markdown(_COLUMNS, rows))
    print("\nwarm / cold, median of the pairs (least–greatest)")
    for what, seconds in {"compile part": parts_s, "with set-up": boths_s, "compiling calls": calls_s}.items():
        print(f"{what}: {ratios(seconds)}")
    if not all(boot.report["fully_cached"] for boot in boots["warm"]):
        raise SystemExit("FAILED: not every warm boot is fully cached")


def ratios(seconds: dict[str, list[float]]) -> str:
    """Warm over cold, of each pair."""
    return spread((warm / cold for warm, cold in zip(seconds["warm"], seconds["cold"], strict=True)), 3)


if __name__ == "__main__":
    main()
