"""The classes that `COMPILE_CACHE_LEAVE_EAGER` names. They are not compiled, and the report says so.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from compile_cache.regions.ladder import RegionReport

_REASON = "left eager by COMPILE_CACHE_LEAVE_EAGER"


class LeftEager:
    """Finds the modules to leave eager, by class name, and reports them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._reports: dict[type[nn.Module], RegionReport] = {}

    def takes(self, module: nn.Module) -> bool:
        """Whether to leave `module` eager. If so, it is counted."""
        kind = type(module)
        if kind.__name__ not in self._names:
            return False
        report = self._reports.setdefault(
            kind, RegionReport(kind.__name__, 0, step="eager", reason=_REASON, is_left_eager=True)
        )
        report.instances += 1
        return True

    @property
    def reports(self) -> list[RegionReport]:
        """A report for each class that `takes` met."""
        return list(self._reports.values())

    def warnings(self, compiled: Sequence[str]) -> list[str]:
        """A warning for each name that no class had. `compiled` has the names of the other classes."""
        met = {report.name for report in self.reports}
        classes = ", ".join(sorted({*met, *compiled})) or "none"
        return [
            f"COMPILE_CACHE_LEAVE_EAGER names {name}, but this boot has no such region. Its regions: {classes}."
            for name in self._names
            if name not in met
        ]
