"""The functions that earlier boots have compiled ahead of time, as a region finds them.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.inductor.border import Failure, attempt
from compile_cache.serving.kinds import Code
from compile_cache.serving.report import RegionReport

if TYPE_CHECKING:
    from compile_cache.inductor.artifacts import Artifacts, CachedRecord
    from compile_cache.inductor.precompiled import Precompiled


class Stored:
    """Finds functions for one region. Without `artifacts` it finds none.

    `is_hit`: the functions come from this very version of the model, so a mark that one was compared counts.
    """

    def __init__(self, artifacts: Artifacts | None, report: RegionReport, is_hit: bool) -> None:
        self.artifacts = artifacts
        self._report = report
        self._is_hit = is_hit

    def switch_off(self, reason: str) -> None:
        """Find and make nothing more, because of `reason`."""
        self.artifacts = None
        self._report.explain(f"not precompiled: {reason}")
        self._report.note_not_precompiled(reason)

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Precompiled | str:
        """The function for this call; why there is none otherwise, empty if none is wanted."""
        if self.artifacts is None:
            return ""
        # An artifact's name depends on these.
        from compile_cache.inductor.torch_settings import configure_torch

        configure_torch()
        found = attempt(self.artifacts.find, module, args, kwargs)
        return found.reason if isinstance(found, Failure) else found

    def cached(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CachedRecord | None:
        """The record of graphs that an earlier boot has made for this call, if there is one."""
        return self.artifacts.cached(module, args, kwargs) if self.artifacts is not None else None

    def is_proved(self, code: Code) -> bool:
        """Whether an earlier boot of this version compared the function on all instances."""
        return self._is_hit and self.artifacts is not None and self.artifacts.is_compared(code.path)

    def prove(self, path: str) -> None:
        """Mark a function as compared on all instances, for later boots."""
        if self.artifacts is not None and path:
            attempt(self.artifacts.mark_compared, path)

    def reject(self, path: str, reason: str) -> None:
        """Use a function no more in this process."""
        self._report.explain(f"not precompiled: {reason}")
        if self.artifacts is not None:
            self.artifacts.reject(path, reason)
