"""Results of the demo's boots: a table, a headline, and failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from families import Family, Prediction
from rich.table import Table

# Steps of the ladder that a restored boot may take.
RESTORED_STEPS = ("precompiled", "graphs")
# Boots that differ by less are called equally long: one boot varies that much.
_ALIKE_S = 0.3
_ALIKE_SHARE = 0.1

WHY_A_STEP_GAINS_LITTLE = (
    "Compiled steps gain little here. On a CPU, compiled code leaves matrix products, attention and convolutions to "
    "the same libraries as eager. On an H200, a compiled step of FLUX.1 takes 135 ms instead of 177 "
    "(benchmarks/README.md)."
)


@dataclass(frozen=True, slots=True)
class DemoBoot:
    """One boot. `ready_s` is wall-clock, from the server's start to its READY. `more` are answers that only it gave."""

    name: str
    ready_s: float
    prediction: Prediction
    report: dict[str, Any]
    more: list[Prediction] = field(default_factory=list)


def headline(family: str, eager_s: float, cold_s: float, restored_s: float) -> str:
    """What the restore saved, in a sentence. All times are from a server's start to its READY."""
    more_s = restored_s - eager_s
    if abs(more_s) <= max(_ALIKE_S, _ALIKE_SHARE * eager_s):
        compared = "as long as"
    else:
        compared = f"{abs(more_s):.1f} s {'longer' if more_s > 0 else 'less'} than"
    return (
        f"{family}: a cold boot took {cold_s:.1f} s, the restored one {restored_s:.1f} s: {compared} an eager boot "
        f"({eager_s:.1f} s)"
    )


def table(family: Family, boots: list[DemoBoot]) -> Table:
    """One row a boot."""
    columns = ("boot", "ready s", "compile s", f"{family.timed} ms", "hits", "misses", "regions")
    result = Table(*columns, title=f"{family.name.capitalize()}: three boots", title_justify="left")
    for entry in boots:
        counts = entry.prediction.metrics
        result.add_row(
            entry.name,
            f"{entry.ready_s:.1f}",
            f"{sum(region['compare_s'] + region['compile_s'] for region in entry.report['regions']):.1f}",
            f"{entry.prediction.seconds * 1e3:.1f}",
            str(counts["hits"]),
            str(counts["misses"]),
            ", ".join(sorted(set(counts["regions"].values()))) or "eager",
        )
    return result


def failures(cold: DemoBoot, restored: DemoBoot) -> list[str]:
    """What the restored boot did wrong, in words."""
    report, counts = restored.report, restored.report["counts"]
    anew = {name: counts[name] for name in ("misses", "kernels_compiled", "benchmarks")}
    below = {region["name"]: region["step"] for region in report["regions"] if region["step"] not in RESTORED_STEPS}
    found = []
    if not report["fully_cached"]:
        found.append(f"the restored boot was not fully cached: anew {anew}, regions below graphs {below}")
    if compiled := restored.prediction.metrics["compiled_now"]:
        found.append(f"the first prediction after READY compiled {compiled} graphs")
    if restored.prediction.answer != cold.prediction.answer:
        found.append("the restored boot gave another answer than the cold one")
    return found
