"""Boots by version and kind: READY, hits, and times of calls."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from compile_cache.cli.report.parts import kind_of_boot
from compile_cache.cli.report.reading import StoredReport
from compile_cache.cli.report.stored import key_of
from compile_cache.key.cache_key import CacheKey
from compile_cache.regions.ladder import RegionReport


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """The boots of one key and one kind (`warm`, `cold` or `eager`), the newest first. `key` is None for boots that had
    none, such as those with compiling off. `first` is the first boot of the key, as its packs remember it. `timed` has
    each region that some boot timed, from the newest such boot."""

    key: CacheKey | None
    kind: str
    boots: Sequence[StoredReport]
    timed: Sequence[RegionReport] = ()

    @property
    def ready_s(self) -> tuple[float, float, float]:
        """The least, the median and the most seconds until READY."""
        times = [boot.report.ready_s for boot in self.boots]
        return min(times), statistics.median(times), max(times)

    @property
    def lookups(self) -> tuple[int, int]:
        """Functions loaded and lookups that hit, and lookups that missed, of all boots."""
        counts = [boot.report.counts for boot in self.boots]
        return sum(c.hits + c.precompiled_loaded for c in counts), sum(c.misses for c in counts)


def histories(reports: Sequence[StoredReport]) -> list[VersionHistory]:
    """The histories of each version, the latest boot's first."""
    boots: dict[CacheKey | None, dict[str, list[StoredReport]]] = {}
    for stored in reports:
        kinds = boots.setdefault(key_of(stored.report), {})
        kinds.setdefault(kind_of_boot(stored.report), []).append(stored)
    return [
        VersionHistory(key, kind, of_kind, _timed(of_kind))
        for key, kinds in boots.items()
        for kind, of_kind in kinds.items()
    ]


def _timed(boots: Sequence[StoredReport]) -> list[RegionReport]:
    newest: dict[str, RegionReport] = {}
    for boot in boots:
        for region in boot.report.regions:
            if region.speedup is not None:
                newest.setdefault(region.name, region)
    return list(newest.values())
