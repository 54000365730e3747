"""torch's own counters of lookups, hits and compiles. They prove that a warm boot is warm."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

# Here tuning.py counts, under the same names, the work that torch's counters replay but this process did not do.
REPLAYED = "compile_cache_replayed"
_precompiled: Counter[str] = Counter()
_BENCHMARK_COUNTERS = ("benchmarking.", "coordesc_tuning_bench", "combo_autotune_bench", "select_algorithm_autotune")


@dataclass(slots=True)
class CompileCounts:
    """What torch found and what it made anew since the boot began, from its counters and the files.

    `refused` counts kinds of calls that later boots serve eager at once. `kernels_compiled` counts the compiled kernels
    (`.so`, `.cubin`) in the cache directory that this boot did not restore.
    """

    graphs: int = 0
    fxgraph_hits: int = 0
    fxgraph_misses: int = 0
    fxgraph_bypasses: int = 0
    aotautograd_hits: int = 0
    aotautograd_misses: int = 0
    aotautograd_bypasses: int = 0
    benchmarks: int = 0
    precompiled_loaded: int = 0
    precompiled_made: int = 0
    kernels_compiled: int = 0

    def since(self, before: CompileCounts) -> CompileCounts:
        """The difference to the earlier counts `before`."""
        return CompileCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def hits(self) -> int:
        """Lookups that the cache answered."""
        return self.fxgraph_hits + self.aotautograd_hits

    @property
    def misses(self) -> int:
        """Lookups that the cache did not answer, bypasses included: each compiled something."""
        return self.fxgraph_misses + self.fxgraph_bypasses + self.aotautograd_misses + self.aotautograd_bypasses


def read_counts() -> CompileCounts:
    """The totals of this process. Takes microseconds and imports nothing; without torch all counts are zero."""
    counters: Mapping[str, Mapping[str, Any]] = _torch_counters() or {}
    # One step copies the counters, because another thread may be compiling.
    inductor, aotautograd = dict(counters.get("inductor", {})), counters.get("aot_autograd", {})
    for name, count in dict(counters.get(REPLAYED, {})).items():
        inductor[name] = inductor.get(name, 0) - count
    return CompileCounts(
        graphs=counters.get("stats", {}).get("unique_graphs", 0),
        fxgraph_hits=inductor.get("fxgraph_cache_hit", 0),
        fxgraph_misses=inductor.get("fxgraph_cache_miss", 0),
        fxgraph_bypasses=inductor.get("fxgraph_cache_bypass", 0),
        aotautograd_hits=aotautograd.get("autograd_cache_hit", 0),
        aotautograd_misses=aotautograd.get("autograd_cache_miss", 0),
        aotautograd_bypasses=aotautograd.get("autograd_cache_bypass", 0),
        benchmarks=sum(count for name, count in inductor.items() if name.startswith(_BENCHMARK_COUNTERS)),
        precompiled_loaded=_precompiled["loaded"],
        precompiled_made=_precompiled["made"],
    )


def are_counted() -> bool:
    """Whether torch has the counters that this module reads."""
    return _torch_counters() is not None


def _torch_counters() -> Any:
    """torch's counters; None if this process has not imported torch's compiler."""
    return getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Reset torch's counters after the context: code compiled ahead of time belongs to another boot."""
    counters = _torch_counters() or {}
    groups = ("stats", "inductor", "aot_autograd", REPLAYED) if counters else ()
    before = {group: dict(counters[group]) for group in groups}
    try:
        yield
    finally:
        for group, counts in before.items():
            counters[group].clear()
            counters[group].update(counts)


def count_precompiled(what: str) -> None:
    """Add one to a count: precompiled functions `loaded` or `made`, or calls `refused`."""
    _precompiled[what] += 1
