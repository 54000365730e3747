"""Boots of predict.py compared: eager, cold (nothing stored), warm (restored), and those of an older checkout in turn.

    python benchmarks/boot.py --store /tmp/boots --warm 3
    python benchmarks/boot.py --model /tmp/flux1 --sizes 1024x1024 --against ../before --warm 8 --store /tmp/boots
    python benchmarks/boot.py --model /tmp/llama --text --against ../before --warm 8 --store /tmp/boots-llama

Each boot is a fresh process of its checkout's code, with the store and the cache directory of its checkout. An eager
boot that is not measured comes first, so that all others read the weights from the page cache; then a cold boot of each
checkout, which fills its store; then rounds of eager and warm boots. Checkouts take turns at being first. A boot is
added to --out as a JSON line when it is done. A call goes on where the last one stopped: it skips the boots that --out
has. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from fresh_boot import (
    ROOT,
    Model,
    add_line,
    add_model_options,
    boot_environment,
    conclude,
    new_log,
    read_lines,
    run_process,
    within,
)
from table import markdown, spread

# A boot as JSON: what one_boot.py printed, and which boot of the run it is.
Boot = dict[str, Any]
KINDS = ("eager", "cold", "warm")
_COLUMNS = (
    "checkout",
    "boot",
    "n",
    "READY, s",
    "− eager, s",
    "compile, s",
    "restore, s",
    "step or token, ms",
    "boot's peak, GB",
)
# Student's t: 95 % of the values are below, for 1, 2, … degrees of freedom.
_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746)


@dataclass(frozen=True, slots=True)
class Checkout:
    """A state of the code, with a store, a cache directory and logs of its own in `work`."""

    name: str
    root: Path
    work: Path

    def boot(self, kind: str, model: Model, args: Any) -> Boot:
        """One boot of this checkout's code in a process of its own.

        Raises:
            SystemExit: it failed; names its log.
        """
        environ = boot_environment(self.work, kind, self.work / "store", self.root)
        environ |= {"MODEL": str(model.folder), "COMPILE_CACHE_COLD_START": "block", **model.variables}
        command = [sys.executable, str(ROOT / "benchmarks" / "one_boot.py"), json.dumps(model.inputs)]
        log = new_log(self.work, kind)
        line = run_process(kind, command + ["--text"] * model.is_text, environ, log, args.timeout)
        return {"checkout": self.name, "kind": kind, **json.loads(line)}


def steps(args: Any) -> Iterator[tuple[str, str, int]]:
    """Checkout, kind and round of each boot, in order."""
    names = ["this", *(["other"] if args.against else [])]
    yield from ((name, "cold", 1) for name in names)
    for number in range(1, args.warm + 1):
        yield "this", "eager", number
        yield from ((name, "warm", number) for name in (names if number % 2 else names[::-1]))


def run(model: Model, args: Any, done: list[Boot]) -> None:
    """Boot what is missing, as far as the time allows, and add it to `done`."""
    checkouts = {"this": Checkout("this", ROOT, args.store / "this")}
    if args.against:
        checkouts["other"] = Checkout("other", args.against.resolve(), args.store / "other")
    known = {(boot["checkout"], boot["kind"], boot["round"]) for boot in done}
    left = [step for step in steps(args) if step not in known]
    for name, kind, number in within([("this", "eager", 0), *left] if left else [], args.limit_s):
        checkouts[name].work.mkdir(parents=True, exist_ok=True)
        boot = {"model": model.folder.name, "round": number, **checkouts[name].boot(kind, model, args)}
        print(describe(boot), flush=True)
        if number:
            done.append(boot)
            add_line(args.out, boot)


def describe(boot: Boot) -> str:
    """One line on one boot."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in boot["report"]["phases"].items())
    which = f"{boot['checkout']} {boot['kind']} {boot['round'] or 'not measured'}"
    return f"{which}: READY after {ready_s(boot):.2f} s ({phases}); {misses(boot)} misses; {step_ms(boot):.3f} ms"


def ready_s(boot: Boot) -> float:
    """Seconds from the start of the process to READY."""
    return float(boot["report"]["process_s"])


def step_ms(boot: Boot) -> float:
    """Milliseconds of a denoising step, or of a token."""
    return float(boot["step_ms"])


def misses(boot: Boot) -> int:
    """Lookups that the cache did not answer."""
    return int(boot["report"]["counts"]["misses"])


def select(boots: Sequence[Boot], checkout: str, kind: str) -> list[Boot]:
    """The boots of one kind."""
    return [boot for boot in boots if (boot["checkout"], boot["kind"]) == (checkout, kind)]


def pairs(ours: Sequence[Boot], theirs: Sequence[Boot], value: Callable[[Boot], float]) -> list[tuple[float, float]]:
    """The values of two boots of one round each."""
    of_round = {boot["round"]: value(boot) for boot in theirs}
    return [(value(boot), of_round[boot["round"]]) for boot in ours if boot["round"] in of_round]


def interval(values: Sequence[float], digits: int) -> str:
    """The mean, its 90 % interval (Student's t), and all values."""
    middle = mean(values)
    each = ", ".join(f"{value:.{digits}f}" for value in values)
    if len(values) < 2:
        return f"{middle:.{digits}f}, n = 1"
    reach = _T[min(len(values) - 1, len(_T)) - 1] * stdev(values) / len(values) ** 0.5
    return (
        f"mean {middle:.{digits}f}, 90 % interval {middle - reach:.{digits}f} to {middle + reach:.{digits}f}, "
        f"median {median(values):.{digits}f}, n = {len(values)} ({each})"
    )


def row(boots: Sequence[Boot], eager: Sequence[Boot]) -> list[str]:
    """One line of the table: medians, with their range."""

    def of(value: Callable[[Boot], float | None], digits: int = 2) -> str:
        return spread([value(boot) for boot in boots], digits)

    is_eager = boots[0]["kind"] == "eager"
    return [
        boots[0]["checkout"],
        boots[0]["kind"],
        str(len(boots)),
        of(ready_s),
        "–" if is_eager or not eager else f"{median(map(ready_s, boots)) - median(map(ready_s, eager)):.2f}",
        of(lambda boot: boot["report"]["compare_s"]),
        of(lambda boot: boot["report"]["restore"]["seconds"]),
        of(step_ms, 3),
        of(lambda boot: peak / 1e9 if (peak := boot["report"]["device_peak_bytes"]) is not None else None),
    ]


def comparisons(boots: Sequence[Boot]) -> Iterator[str]:
    """Differences and ratios in pairs of one round: warm against eager, and this checkout against the other."""
    eager, warm, other = (select(boots, *of) for of in (("this", "eager"), ("this", "warm"), ("other", "warm")))
    for name, theirs in (("eager", eager), ("the other", other)):
        if not pairs(warm, theirs, ready_s):
            continue
        found = [one - two for one, two in pairs(warm, theirs, ready_s)]
        yield f"warm − {name}, READY, s: {interval(found, 2)}"
        ratios = [one / two for one, two in pairs(warm, theirs, step_ms)]
        yield f"warm / {name}, step or token: {interval(ratios, 4)}"


def check(boots: Sequence[Boot], args: Any) -> dict[str, bool]:
    """Every claim that has a yes or no."""
    warm = [boot for boot in boots if boot["kind"] == "warm"]
    eager, compiled = ([b for b in boots if (b["kind"] == "eager") == is_eager] for is_eager in (True, False))
    regions = [[one for one in boot["report"]["regions"] if not one["is_left_eager"]] for boot in compiled]
    errors = [[float(region["relative_error"] or 0) / region["tolerance"] for region in found] for found in regions]
    return {
        "all boots were made": len(boots) == len(list(steps(args))),
        "every warm boot is fully precompiled": all(boot["report"]["fully_precompiled"] for boot in warm),
        "warm boots miss, compile and benchmark nothing": not any(
            misses(boot) + boot["report"]["counts"]["kernels_compiled"] + boot["report"]["counts"]["benchmarks"]
            for boot in warm
        ),
        "compiled regions differ from eager, as rounding does": all(
            0 < max(found, default=0.0) <= 1 for found in errors
        ),
        "warm boots of a checkout answer alike": all(
            len({boot["sha256"] for boot in select(boots, name, "warm")}) <= 1 for name in ("this", "other")
        ),
        "eager boots answer alike, and compile nothing": len({boot["sha256"] for boot in eager}) == 1
        and not any(boot["report"]["counts"]["graphs"] for boot in eager),
        "predictions compile nothing": not any(boot["graphs_after_ready"] for boot in boots),
        "no boot warns": not any(boot["report"]["warnings"] for boot in boots),
    }


def main() -> None:
    """Boot what is missing, compare all, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--warm", type=int, default=5, help="rounds of eager and warm boots")
    parser.add_argument("--store", type=Path, required=True, help="folder of stores, cache directories and logs")
    parser.add_argument("--out", type=Path, help="file of all boots; boots.jsonl in the store's folder if not given")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one boot and its predictions")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds of everything")
    args = parser.parse_args()
    args.store = args.store.resolve()
    args.store.mkdir(parents=True, exist_ok=True)
    args.out = args.out or args.store / "boots.jsonl"
    model = Model.of(args)
    boots = read_lines(args.out)
    run(model, args, boots)
    if not boots:
        raise SystemExit("no boot yet")
    eager = select(boots, "this", "eager")
    found = (select(boots, name, kind) for kind in KINDS for name in ("this", "other"))
    rows = [row(of_kind, eager) for of_kind in found if of_kind]
    print(f"\n{model.folder.name}, {boots[-1]['machine']}; median (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    for line in comparisons(boots):
        print(line)
    conclude(check(boots, args))


if __name__ == "__main__":
    main()
