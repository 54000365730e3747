"""BootReport: the facts of one boot, as lines for people, as metrics and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compile_cache.errors import RefusedPack, log
from compile_cache.files import write_through
from compile_cache.inductor.counters import CompileCounts
from compile_cache.serving.region_report import RegionReport
from compile_cache.timeline import Span


@dataclass(slots=True)
class RestoreReport:
    """The result of the restore.

    | `outcome` | meaning |
    | --- | --- |
    | `hit` | the store had packs for this key |
    | `seeded` | the packs come from another version of the model, `seeded_from` |
    | `miss` | the store has nothing for this key |
    | `failed` | the store or the packs could not be used |
    | `discarded` | torch contradicted the environment of the key |
    | `off` | there is no store, or no cache directory |

    `reason` says why in one line. `problems` names the layers that could not be read.
    """

    outcome: str = "off"
    reason: str = ""
    seeded_from: str = ""
    problems: list[str] = field(default_factory=list)
    packs: int = 0
    files: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    refused: list[RefusedPack] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The main figures for a log. A plan has no times."""
        seeded = f" from version {self.seeded_from}" if self.seeded_from else ""
        times = f" in {self.seconds:.2f} s, waited {self.waited_s:.2f} s" if self.seconds or self.waited_s else ""
        return [
            f"restore: {self.outcome}{seeded}{f' ({self.reason})' if self.reason else ''}, "
            f"{self.files} files, {self.stored_bytes / 1e6:.1f} MB{times}",
            *(f"layer left out: {problem}" for problem in self.problems),
            *(f"{('unread', 'refused')[pack.is_final]} pack {pack.name}: {pack.reason}" for pack in self.refused),
        ]


@dataclass(slots=True)
class PublishReport:
    """The packs uploaded so far, and one line for each failure. `merged_packs` were merged into others."""

    packs: int = 0
    files: int = 0
    stored_bytes: int = 0
    merged_packs: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(slots=True)
class BootReport:
    """The report of one boot, and the `path` where it is saved, if any. All times are wall-clock seconds.

    `phases` has the caller's phases (import, weights), the wait for the restore (`join`), `compile_setup`, and
    `warm_up`, in which code is compared. `ready_s` counts from the start of the boot, `process_s` from the start of the
    process. `started_s` is the start of the boot in seconds since 1970. `spans` say which thread did what when.
    """

    model_name: str = ""
    model_version: str = ""
    environment: str = ""
    store: str = ""
    cache_dir: str = ""
    scope: str = ""
    mode: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    ready_s: float = 0.0
    process_s: float = 0.0
    restore: RestoreReport = field(default_factory=RestoreReport)
    publish: PublishReport = field(default_factory=PublishReport)
    counts: CompileCounts = field(default_factory=CompileCounts)
    regions: list[RegionReport] = field(default_factory=list)
    device_peak_bytes: int | None = None
    warnings: list[str] = field(default_factory=list)
    started_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    path: str | None = None

    @property
    def compare_s(self) -> float:
        """The seconds in which calls of regions were compared, or looked up a graph."""
        return sum(region.compare_s for region in self.regions)

    @property
    def fully_cached(self) -> bool:
        """Whether all planned regions are `late`, `precompiled`, or `graphs` and checked, with hits, loaded or late
        functions, and this boot compiled and benchmarked nothing."""
        counts = self.counts
        made_anew = counts.misses + counts.benchmarks + counts.kernels_compiled
        planned = [region for region in self.regions if not region.is_left_eager]
        regions_cached = bool(planned) and all(region.step in ("late", "graphs", "precompiled") for region in planned)
        are_checked = all(region.relative_error is not None for region in planned if region.step == "graphs")
        has_found = counts.hits + counts.precompiled_loaded > 0 or any(region.step == "late" for region in planned)
        return regions_cached and are_checked and has_found and made_anew == 0

    @property
    def fully_precompiled(self) -> bool:
        """Whether the boot is fully cached and traced nothing: all planned regions are `precompiled` or `late`."""
        return self.fully_cached and all(
            region.step in ("late", "precompiled") or region.is_left_eager for region in self.regions
        )

    def missing(self) -> list[str]:
        """Why the boot is not restored and fully precompiled; empty if it is. Regions that the user leaves eager do not
        count."""
        planned = [region for region in self.regions if not region.is_left_eager]
        why = [self.restore.lines()[0]] if self.restore.outcome != "hit" else []
        for region in [region for region in planned if region.step not in ("late", "precompiled")]:
            why.append(f"region {region.name}: {region.step} ({region.reason or 'no code is stored for its calls'})")
        is_whole = self.fully_precompiled or (self.regions and not planned)
        return why or ([] if is_whole else [self._counts_line()])

    def to_json(self) -> str:
        """The report as JSON, with the figures derived from it."""
        derived = ("compare_s", "fully_cached", "fully_precompiled")
        record = asdict(self) | {name: getattr(self, name) for name in derived}
        for region, told in zip(self.regions, record["regions"], strict=False):
            told["step"] = region.step
            if told["relative_error"] == math.inf:
                told["relative_error"] = "Infinity"
        return json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False)

    def save(self) -> None:
        """Write the JSON to `path`: a reader of the file sees this report or the one before. A failure costs only the
        file, and each cause is logged once."""
        try:
            if self.path is not None:
                write_through(Path(self.path), self.to_json().encode())
        except Exception as error:
            cause = f"the report is not written to {self.path}: {getattr(error, 'strerror', None) or repr(error)}"
            if cause not in self.warnings:
                self.warnings.append(cause)
                log.warning("report.failed error=%s", cause)

    def lines(self) -> list[str]:
        """The main figures for a setup log."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.phases.items())
        return [
            *self.restore.lines(),
            *(_region_line(region) for region in self.regions),
            self._counts_line(),
            *(f"warning: {warning}" for warning in self.warnings),
            f"ready after {self.ready_s:.2f} s ({phases}, of which comparing {self.compare_s:.2f} s)",
        ]

    def _counts_line(self) -> str:
        counts = self.counts
        return (
            f"precompiled: {counts.precompiled_loaded} loaded, {counts.precompiled_made} made; "
            f"lookups: {counts.hits} hits, {counts.misses} misses; anew: {counts.kernels_compiled} kernels, "
            f"{counts.benchmarks} benchmarks"
        )

    def metrics(self) -> dict[str, Any]:
        """The main figures by metric name, for `record_metric`."""
        speedups = {region.name: round(region.speedup, 2) for region in self.regions if region.speedup is not None}
        return {
            **({"compile_cache.speedup": speedups} if speedups else {}),
            "compile_cache.ready_s": round(self.ready_s, 3),
            "compile_cache.restore_s": round(self.restore.seconds, 3),
            "compile_cache.compare_s": round(self.compare_s, 3),
            "compile_cache.restore": self.restore.outcome,
            "compile_cache.regions": {region.name: region.step for region in self.regions},
            "compile_cache.precompiled": self.counts.precompiled_loaded,
            "compile_cache.hits": self.counts.hits,
            "compile_cache.misses": self.counts.misses,
        }


def _region_line(region: RegionReport) -> str:
    error = "" if region.relative_error is None else f", differs from eager by {region.relative_error:.1e}"
    reason = f" ({region.reason})" if region.reason else ""
    speed = "" if region.speedup is None else f", {region.speedup:.2f} x eager's speed"
    return f"region {region.name} x{region.instances}: {region.step}{reason}, {region.compare_s:.2f} s{error}{speed}"
