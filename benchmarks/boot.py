"""Boots of the same predictor compared: eager, cold (nothing stored yet), warm (restored from what cold stored) and
cached (as warm, without precompiled regions: torch traces them, and finds their graphs).

Each boot is a fresh process. One eager boot that is not measured comes first, so that all measured ones read the
weights from the page cache; then the cold ones, then eager and warm in turn. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import RESTORED_STEPS, ROOT, Boot, Plan, prepare, run_boot
from table import Row, markdown

KINDS = ("eager", "cold", "warm", "cached", "unpreloaded")
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


def in_order(work: Path, cold: int, warm: int, in_turn: Sequence[str], budget_s: float) -> Iterator[tuple[str, Path]]:
    """Kind and store of each measured boot: cold ones with a store each, then `warm` rounds of the kinds `in_turn` with
    the last of these. None starts after `budget_s`."""
    started = time.monotonic()
    stores = [work / f"store-{number}" for number in range(cold)]
    order = [("cold", store) for store in stores]
    order += [(kind, stores[-1]) for _ in range(warm) for kind in in_turn]
    for kind, store in order:
        if time.monotonic() - started > budget_s:
            print(f"no further boot after {budget_s:g} s")
            return
        yield kind, store


def collect(boots: Iterable[Any], describe: Callable[[Any], str], out: Path | None) -> dict[str, list[Any]]:
    """The boots by kind. Each is printed, and added to the file `out`, as soon as it is done."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for boot in boots:
        found[boot.kind].append(boot)
        print(describe(boot), flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(boot)) + "\n")
    return found


def describe(boot: Boot) -> str:
    """One line on one boot."""
    return (
        f"{describe_report(boot.kind, boot.report)}; first prediction {boot.first.seconds:.3f} s, "
        f"step {boot.step_ms:.2f} ms, picture {boot.first.sha256[:12]} of {boot.first.colours} colours"
    )


def describe_report(kind: str, report: Mapping[str, Any]) -> str:
    """What a line on a boot of any model begins with."""
    counts, restore = report["counts"], report["restore"]
    regions = ", ".join(f"{region['name']} {region['step']}" for region in report["regions"])
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["phases"].items())
    return (
        f"{kind}: {report['process_s']:.2f} s to READY ({phases}); restore {restore['outcome']}, "
        f"{restore['files']} files, {restore['stored_bytes'] / 1e6:.1f} MB; {regions or 'no regions'}; "
        f"{hits(counts)} hits, {misses(counts)} misses, {counts['kernels_compiled']} kernels, "
        f"{counts['benchmarks']} benchmarks"
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
    shown = Row(boots, () if kind == "eager" else eager)
    return [
        kind,
        str(len(boots)),
        shown.of(ready_s),
        shown.against(lambda one, other: one - other, ready_s),
        shown.of(lambda boot: boot.report["ready_s"]),
        shown.of(lambda boot: boot.report["phases"]["weights"]),
        shown.of(lambda boot: boot.warm_up_s),
        shown.of(lambda boot: boot.report["compile_s"]),
        shown.of(lambda boot: boot.report["restore"]["seconds"]),
        shown.of(lambda boot: boot.report["restore"]["waited_s"]),
        shown.of(lambda boot: boot.first.seconds),
        shown.of(lambda boot: boot.step_ms),
        shown.against(lambda one, other: one / other, lambda boot: boot.step_ms),
        shown.of(lambda boot: gigabytes(boot.report["device_peak_bytes"])),
        shown.of(lambda boot: gigabytes(boot.prediction_peak_bytes)),
    ]


def compare(boots: dict[str, list[Boot]]) -> Iterator[str]:
    """What the table does not show: differences of boots that ran one after the other, and of steps."""
    extra = [ready_s(warm) - ready_s(eager) for eager, warm in zip(boots["eager"], boots["warm"], strict=False)]
    if extra:
        shown = ", ".join(f"{seconds:.2f}" for seconds in extra)
        yield f"each warm boot − the eager one before it, s: {shown}; median {median(extra):.2f}"
    if boots["cached"]:
        steps = [[boot.step_ms for boot in boots[kind]] for kind in ("warm", "cached")]
        yield f"step, precompiled / cached: {median(steps[0]) / median(steps[1]):.3f}"
    pictures = {kind: sorted({boot.first.sha256[:12] for boot in found}) for kind, found in boots.items() if found}
    yield f"pictures: {pictures}"


def check(boots: dict[str, list[Boot]]) -> dict[str, bool]:
    """Every claim of the table that has a yes or no."""
    warm = boots["warm"] + boots["unpreloaded"]
    compiled = boots["cold"] + warm + boots["cached"]
    everything = compiled + boots["eager"]
    return {
        "there are cold, eager and warm boots": all(boots[kind] for kind in ("cold", "eager", "warm")),
        "every warm boot is fully precompiled": all(boot.report["fully_precompiled"] for boot in warm),
        "every cached boot is fully cached": all(boot.report["fully_cached"] for boot in boots["cached"]),
        "every region of a compiled boot is compiled": all(
            has_regions(boot.report, ("cold", *RESTORED_STEPS)) for boot in compiled
        ),
        "compiled regions differ from eager, as rounding does": all(
            differs_within_tolerance(boot.report) for boot in compiled
        ),
        "all warm boots draw the same picture": len({boot.first.sha256 for boot in warm}) == 1,
        "all eager boots draw the same picture": len({boot.first.sha256 for boot in boots["eager"]}) == 1,
        "no picture is of one colour": all(boot.first.colours > 1 for boot in everything),
        "first predictions compile nothing": not any(boot.first.graphs_compiled for boot in everything),
        "eager boots compile nothing": not any(boot.report["counts"]["graphs"] for boot in boots["eager"]),
        "no boot warns": not any(boot.report["warnings"] for boot in everything),
    }


def has_regions(report: Mapping[str, Any], steps: Sequence[str]) -> bool:
    """Whether there are regions, and each is at one of these steps of the ladder."""
    return bool(report["regions"]) and all(region["step"] in steps for region in report["regions"])


def differs_within_tolerance(report: Mapping[str, Any]) -> bool:
    """Whether every region's output differs from eager, which proves that it is compiled, by no more than allowed."""
    return all(0 < float(region["relative_error"] or 0) <= region["tolerance"] for region in report["regions"])


def conclude(results: Mapping[str, bool]) -> None:
    """Print every claim and whether it holds.

    Raises:
        SystemExit: one does not.
    """
    for claim, holds in results.items():
        print(f"{'ok    ' if holds else 'FAILED'} {claim}")
    if not all(results.values()):
        raise SystemExit(1)


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
    parser.add_argument("--steps", type=pair_of_numbers, default=(4, 12), help="two numbers of denoising steps")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of predictions for the time of a step")
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directory and logs")
    parser.add_argument("--scope", choices=("regional", "whole"), default="regional")
    parser.add_argument("--compare-cached", action="store_true", help="also warm boots without precompiled regions")
    parser.add_argument("--compare-preload", action="store_true", help="also warm boots without boot.preload()")
    parser.add_argument("--cog-server", action="store_true", help="boot under Cog's server, predict over HTTP")
    return parse_boots(parser)


def parse_boots(parser: argparse.ArgumentParser) -> Any:
    """The command line, with what all comparisons of boots have in common."""
    parser.add_argument("--cold", type=int, default=1, help="cold boots, each with an empty store of its own")
    parser.add_argument("--warm", type=int, default=5, help="warm boots, and as many eager ones")
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
    compared = {"cached": args.compare_cached, "unpreloaded": args.compare_preload}
    in_turn = ("eager", "warm", *(kind for kind, is_wanted in compared.items() if is_wanted))
    unmeasured = run_boot(plan, "eager", plan.work / "store-0")
    print(f"machine: {unmeasured.machine}")
    print(f"not measured, to fill the page cache: {describe(unmeasured)}", flush=True)
    run = boot_function(args.cog_server)
    order = in_order(plan.work, args.cold, args.warm, in_turn, args.budget)
    boots = collect((run(plan, kind, store) for kind, store in order), describe, args.out)

    rows = [row(kind, boots[kind], boots["eager"]) for kind in KINDS if boots[kind]]
    print(f"\nmedian (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    for line in compare(boots):
        print(line)
    conclude(check(boots))


if __name__ == "__main__":
    main()
