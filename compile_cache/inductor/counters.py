"""torch's own counts of lookups, hits and compiles. They prove that a warm boot is warm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

# Rounds of a warm-up. In each, every kind of calls may get one more function.
_MOST_ROUNDS, _MOST_COMPILING = 64, 3
# torch notes the time of each such step under a name with one of these endings. Its counters of measurements do not
# serve: a lookup that finds a graph adds those of the graph's own compile, in another process.
_MEASUREMENTS = (
    "benchmark_all_configs",
    "coordinate_descent_tuning",
    "_autotune",
    "_autotuning",
    "benchmark_fused_nodes",
)


@dataclass(slots=True)
class CompileCounts:
    """What torch found and what it made anew since the boot began, from its counters, the regions and the files.

    `hits` counts the lookups that AOTAutograd's cache or Inductor's answered. Each of the others, the `misses`,
    compiled something; those that torch bypassed count as well. `benchmarks` counts the kernels and products for which
    candidates were measured. `kernels_compiled` counts the compiled kernels (`.so`, `.cubin`) in the cache directory
    that this boot did not restore.
    """

    graphs: int = 0
    hits: int = 0
    misses: int = 0
    benchmarks: int = 0
    precompiled_loaded: int = 0
    precompiled_made: int = 0
    kernels_compiled: int = 0

    def since(self, before: CompileCounts) -> CompileCounts:
        """The difference to the earlier counts `before`."""
        return CompileCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def read_counts() -> CompileCounts:
    """The totals of this process. Takes microseconds and imports nothing; without torch all counts are zero."""
    utils = sys.modules.get("torch._dynamo.utils")  # None if this process has not imported torch's compiler
    counters: Mapping[str, Mapping[str, Any]] = getattr(utils, "counters", {})
    # One step copies the counters, because another thread may be compiling.
    lookups = {**counters.get("inductor", {}), **counters.get("aot_autograd", {})}
    caches = ("fxgraph_cache", "autograd_cache")
    timed = dict(getattr(utils, "compilation_time_metrics", {}))
    return CompileCounts(
        graphs=counters.get("stats", {}).get("unique_graphs", 0),
        hits=sum(lookups.get(f"{cache}_hit", 0) for cache in caches),
        misses=sum(lookups.get(f"{cache}_{how}", 0) for cache in caches for how in ("miss", "bypass")),
        benchmarks=sum(len(times) for name, times in timed.items() if name.endswith(_MEASUREMENTS)),
    )


def repeated(warm_up: Callable[[], bool]) -> bool:
    """Call `warm_up` again as long as it returns True, which says that something was answered meanwhile, or torch has
    compiled for it: at most 64 times, and three times for torch. False if that was not enough."""
    compiled = 0
    for _ in range(_MOST_ROUNDS):
        misses = read_counts().misses
        if warm_up():
            continue
        compiled += 1
        if read_counts().misses == misses:
            return True
        if compiled == _MOST_COMPILING:
            break
    return False


def ended_steps() -> int:
    """How many steps of compiles have ended in this process. The last one of a compile ends after it has written."""
    timed = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    return sum(map(len, dict(timed).values()))
