"""The first boot of a key says how it went, in a file of the cache directory that its packs carry. Each later boot
compares itself with it, so that a fleet that has become slow says so.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from compile_cache.files import replacing
from compile_cache.lifecycle.report import BootReport

log = logging.getLogger("compile_cache")

HISTORY = "history/first_boot.json"
_LARGEST_BYTES = 1 << 16
# A boot is much worse if its own part takes this much longer. Hosts of one kind differ by seconds in their imports.
_MUCH_LONGER = 3.0
_MUCH_LONGER_S = 10.0


@dataclass(frozen=True, slots=True)
class PastBoot:
    """How long a boot took until READY, without the caller's imports, which depend on the host's disk."""

    own_s: float

    @classmethod
    def of(cls, report: BootReport) -> PastBoot:
        """That of a boot that is READY."""
        return cls(report.ready_s - report.phases.get("import", 0.0))


def remember_first(directory: Path, report: BootReport) -> None:
    """Write how this boot went, unless an earlier one has. Call it before artifacts are published.

    Raises:
        OSError: the cache directory cannot be written.
    """
    path = directory / HISTORY
    if not path.is_file() and report.ready_s:
        with replacing(path) as file:
            file.write(json.dumps(asdict(PastBoot.of(report))).encode())


def compare_with_first(directory: Path, report: BootReport) -> str:
    """One line that says how much worse this boot is than the first one of its key; empty if it is not."""
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
    """The boot in a file that `remember_first` has written; None where there is no file, or it is damaged."""
    if not path.is_file():
        return None
    try:
        own_s = float(json.loads(path.read_bytes()[:_LARGEST_BYTES])["own_s"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.info("history.not_read error=%r", error)
        return None
    return PastBoot(own_s) if math.isfinite(own_s) and own_s >= 0 else None
