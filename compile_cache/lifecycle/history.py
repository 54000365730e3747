"""Compares a boot with the first boot of its key, so that a fleet that has become slow says so.

The first boot writes its times into a file of the cache directory. Its packs carry that file to each later boot.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from compile_cache.files import replacing
from compile_cache.lifecycle.report import BootReport

log = logging.getLogger("compile_cache")

HISTORY = "history/first_boot.json"
_LARGEST_BYTES = 1 << 16
# A boot is much slower if its own part takes this many times as long. Imports are not counted: between hosts of one
# kind they differ by seconds.
_MUCH_LONGER = 3.0
_MUCH_LONGER_S = 10.0
# No boot takes a year.
_LONGEST_S = 3.2e7


@dataclass(frozen=True, slots=True)
class PastBoot:
    """The seconds of a boot until READY, without the caller's imports, which depend on the host's disk."""

    own_s: float

    @classmethod
    def of(cls, report: BootReport) -> PastBoot:
        """The seconds of a boot that is READY."""
        return cls(report.ready_s - report.phases.get("import", 0.0))


def remember_first(directory: Path, report: BootReport) -> None:
    """Write this boot's times, unless an earlier boot has. Call it before artifacts are published.

    Raises:
        OSError: the cache directory cannot be written.
    """
    path = directory / HISTORY
    if not path.is_file() and report.ready_s:
        with replacing(path) as file:
            file.write(json.dumps(asdict(PastBoot.of(report))).encode())


def compare_with_first(directory: Path, report: BootReport) -> str:
    """A line that says how much slower this boot is than the first one of its key; empty if it is not."""
    counts = report.counts
    is_compiling = any(region.waiting or region.settled == "cold" for region in report.regions)
    if report.restore.outcome == "hit" and is_compiling and not counts.precompiled_loaded + counts.hits:
        return (
            "NOTHING OF WHAT WAS RESTORED SERVES THIS BOOT. The regions above say why. `compile-cache explain` "
            "compares this machine with the stored environments."
        )
    first, now = read_first(directory / HISTORY), PastBoot.of(report)
    if first is None or now.own_s < first.own_s * _MUCH_LONGER + _MUCH_LONGER_S:
        return ""
    return (
        f"THIS BOOT IS MUCH SLOWER than the first one of its version on this kind of machine: {now.own_s:.1f} s until "
        f"READY without imports, against {first.own_s:.1f} s. Look at the restore and at the regions' steps above."
    )


def read_first(path: Path) -> PastBoot | None:
    """The times in a file of `remember_first`; None if the file is missing or damaged."""
    if not path.is_file():
        return None
    try:
        own_s = float(json.loads(path.read_bytes()[:_LARGEST_BYTES])["own_s"])
    except (OSError, ArithmeticError, LookupError, ValueError, TypeError, RecursionError) as error:
        log.info("history.not_read error=%r", error)
        return None
    return PastBoot(own_s) if 0 <= own_s < _LONGEST_S else None
