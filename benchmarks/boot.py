"""Boots of the same predictor compared: eager, cold (nothing stored yet) and warm (restored from what cold stored).

Each boot is a fresh process. One eager boot that is not measured comes first, so that all measured ones read the
weights from the page cache; then the cold ones, then eager and warm in turn. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import ROOT, Boot, Plan, prepare, run_boot
from table import markdown, spread

KINDS = ("eager", "cold", "warm", "unpreloaded")
_COLUMNS = (
    "boot",
    "n",
    "process start to READY, s",
    "− eager, s",
    "boot to READY, s",
    "weights, s",
    "warm-up, s",
    "compile, s",
    "restore, s",
    "waited for it, s",
    "first prediction, s",
    "step, ms",
    "step / eager",
    "boot's peak, GB",
    "prediction's peak, GB",
)


def boot_function(is_under_cog: bool) -> Callable[[Plan, str, Path], Boot]:
    """What makes a boot: a process of the predictor alone, or one under Cog's server."""
    if not is_under_cog:
        return run_boot
    sys.path.append(str(ROOT / "demo"))
    from cog_boot import run_cog_boot

    return run_cog_boot


def run_all(
    plan: Plan, cold: int, warm: int, in_turn: Sequence[str], budget_s: float, is_under_cog: bool
) -> Iterator[Boot]:
    """All boots in their order: cold ones, then `warm` rounds of the kinds `in_turn`. None starts after `budget_s`."""
    boot = boot_function(is_under_cog)
    started = time.monotonic()
    stores = [plan.work / f"store-{number}" for number in range(cold)]
    order = [("cold", store) for store in stores]
    order += [(kind, stores[-1]) for _ in range(warm) for kind in in_turn]
    unmeasured = run_boot(plan, "eager", stores[-1])
    print(f"machine: {unmeasured.machine}")
    print(f"not measured, to fill the page cache: {describe(unmeasured)}", flush=True)
    for kind, store in order:
        if time.monotonic() - started > budget_s:
            print(f"no further boot after {budget_s:g} s")
            return
        yield boot(plan, kind, store)


def describe(boot: Boot) -> str:
    """One line on one boot."""
    report, counts, restore = boot.report, boot.report["counts"], boot.report["restore"]
    regions = ", ".join(f"{region['name']} {region['step']}" for region in report["regions"])
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["phases"].items())
    return (
        f"{boot.kind}: {report['process_s']:.2f} s to READY ({phases}); restore {restore['outcome']}, "
        f"{restore['files']} files, {restore['stored_bytes'] / 1e6:.1f} MB; {regions or 'no regions'}; "
        f"{hits(counts)} hits, {misses(counts)} misses, {counts['kernels_compiled']} kernels, "
        f"{counts['benchmarks']} benchmarks; first prediction {boot.first.seconds:.3f} s, step {boot.step_ms:.2f} ms, "
        f"picture {boot.first.sha256[:12]} of {boot.first.colours} colours"
    )


def hits(counts: dict[str, int]) -> int:
    """Lookups answered from the cache."""
    return counts["fxgraph_hits"] + counts["aotautograd_hits"]


def misses(counts: dict[str, int]) -> int:
    """Lookups that were not."""
    return sum(count for name, count in counts.items() if name.endswith(("_misses", "_bypasses")))


def ready_s(boot: Boot) -> float:
    """Seconds from the start of the process, or of Cog's server, to READY."""
    return boot.http_ready_s if boot.http_ready_s is not None else boot.report["process_s"]


def gigabytes(size_bytes: int | None) -> float | None:
    """In units of 10⁹ bytes; None stays None."""
    return None if size_bytes is None else size_bytes / 1e9


def row(kind: str, boots: Sequence[Boot], eager: Sequence[Boot]) -> list[str]:
    """One line of the table: medians, with their range."""

    def of(value: Callable[[Boot], float | None], digits: int = 2) -> str:
        return spread([value(boot) for boot in boots], digits)

    def against_eager(compare: Callable[[float, float], float], value: Callable[[Boot], float]) -> str:
        if kind == "eager" or not eager:
            return "–"
        return f"{compare(median(map(value, boots)), median(map(value, eager))):.2f}"

    return [
        kind,
        str(len(boots)),
        of(ready_s),
        against_eager(lambda one, other: one - other, ready_s),
        of(lambda boot: boot.report["ready_s"]),
        of(lambda boot: boot.report["phases"]["weights"]),
        of(lambda boot: boot.warm_up_s),
        of(lambda boot: boot.report["compile_s"]),
        of(lambda boot: boot.report["restore"]["seconds"]),
        of(lambda boot: boot.report["restore"]["waited_s"]),
        of(lambda boot: boot.first.seconds),
        of(lambda boot: boot.step_ms),
        against_eager(lambda one, other: one / other, lambda boot: boot.step_ms),
        of(lambda boot: gigabytes(boot.report["device_peak_bytes"])),
        of(lambda boot: gigabytes(boot.prediction_peak_bytes)),
    ]


def check(boots: dict[str, list[Boot]]) -> dict[str, bool]:
    """Every claim of the table that has a yes or no."""
    warm = boots["warm"] + boots["unpreloaded"]
    compiled = boots["cold"] + warm
    everything = compiled + boots["eager"]
    return {
        "there are cold, eager and warm boots": all(boots[kind] for kind in ("cold", "eager", "warm")),
        "every warm boot is fully cached": all(boot.report["fully_cached"] for boot in warm),
        "every region of a compiled boot is compiled": all(
            boot.report["regions"] and all(region["step"] in ("cold", "cached") for region in boot.report["regions"])
            for boot in compiled
        ),
        "compiled regions differ from eager, as rounding does": all(map(differs_within_tolerance, compiled)),
        "cold and warm boots draw the same picture": len({boot.first.sha256 for boot in compiled}) == 1,
        "all eager boots draw the same picture": len({boot.first.sha256 for boot in boots["eager"]}) == 1,
        "no picture is of one colour": all(boot.first.colours > 1 for boot in everything),
        "first predictions compile nothing": not any(boot.first.graphs_compiled for boot in everything),
        "eager boots compile nothing": not any(boot.report["counts"]["graphs"] for boot in boots["eager"]),
        "no boot warns": not any(boot.report["warnings"] for boot in everything),
    }


def differs_within_tolerance(boot: Boot) -> bool:
    """Whether every region's output differs from eager, which proves that it is compiled, by no more than allowed."""
    return all(0 < float(region["relative_error"] or 0) <= region["tolerance"] for region in boot.report["regions"])


def pair_of_numbers(text: str) -> tuple[int, int]:
    """`4,12` → (4, 12)."""
    few, many = map(int, text.split(","))
    if few >= many:
        raise ValueError("the first number must be the smaller one")
    return few, many


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/flux-digits", help="a folder or hub id")
    parser.add_argument("--sizes", default="64x64", help="as 1024x1024,1344x768; all are warmed up, the first is drawn")
    parser.add_argument("--cold", type=int, default=1, help="cold boots, each with an empty store of its own")
    parser.add_argument("--warm", type=int, default=5, help="warm boots, and as many eager ones")
    parser.add_argument("--steps", type=pair_of_numbers, default=(4, 12), help="two numbers of denoising steps")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of predictions for the time of a step")
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directory and logs")
    parser.add_argument("--scope", choices=("regional", "whole"), default="regional")
    parser.add_argument("--compare-preload", action="store_true", help="also warm boots without boot.preload()")
    parser.add_argument("--cog-server", action="store_true", help="boot under Cog's server, predict over HTTP")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one boot and its predictions")
    parser.add_argument("--budget", type=float, default=float("inf"), help="start no boot after so many seconds")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    args = parser.parse_args()
    if args.cold < 1:
        parser.error("--cold must be 1 or more: warm boots restore what a cold one stored")
    return args


def main() -> None:
    """Boot, compare, check."""
    args = parse_arguments()
    plan = Plan(args.model, args.sizes, args.steps, prepare(args.store), args.pairs, args.scope, args.timeout)
    print(
        f"{args.model}, {args.sizes}, scope {args.scope}; attention: torch's SDPA in its default order, for all boots"
    )
    in_turn = ("eager", "warm", "unpreloaded") if args.compare_preload else ("eager", "warm")
    boots: dict[str, list[Boot]] = {kind: [] for kind in KINDS}
    for boot in run_all(plan, args.cold, args.warm, in_turn, args.budget, args.cog_server):
        boots[boot.kind].append(boot)
        print(describe(boot), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(boot)) + "\n")

    rows = [row(kind, boots[kind], boots["eager"]) for kind in KINDS if boots[kind]]
    print(f"\nmedian (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    results = check(boots)
    for claim, holds in results.items():
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    if not all(results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
