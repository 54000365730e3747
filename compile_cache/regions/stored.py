"""The precompiled functions of one region: the ones that serve it, and the ones it makes for the next boot.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from torch import nn

from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.counters import uncounted
from compile_cache.regions.ladder import RegionReport
from compile_cache.timeline import note

if TYPE_CHECKING:
    from compile_cache.aot.artifacts import Artifacts, Found, Made

log = logging.getLogger("compile_cache")


class StoredFunctions:
    """Finds, makes and rejects artifacts for one region. Without `artifacts` it finds and makes none."""

    def __init__(self, artifacts: Artifacts | None, report: RegionReport) -> None:
        self._artifacts = artifacts
        self._report = report
        self.withheld: set[str] = set()
        # For each instance, the functions that served it, the latest first.
        self._found: dict[nn.Module, tuple[Found, ...]] = {}

    def adopt(self, module: nn.Module) -> int:
        """Add an instance, and return the number of instances."""
        self._found.setdefault(module, ())
        return len(self._found)

    def instances(self) -> tuple[nn.Module, ...]:
        """The instances, in the order of their adoption."""
        return tuple(self._found)

    @property
    def is_open(self) -> bool:
        """Whether artifacts can be found."""
        return self._artifacts is not None

    def open(self, artifacts: Artifacts) -> None:
        """Find artifacts from now on."""
        self._artifacts = artifacts

    def let_go(self, path: str) -> None:
        """Forget an artifact, and remove its file."""
        self.drop(path)
        if self._artifacts is not None:
            self._artifacts.let_go(path)

    def drop(self, path: str) -> None:
        """Serve no call by an artifact until it is found again."""
        for module, known in self._found.items():
            self._found[module] = tuple(other for other in known if other.path != path)

    def switch_off(self, reason: str) -> None:
        """Find and make nothing more, because of `reason`."""
        self._artifacts = None
        self._report.explain(f"not precompiled: {reason}")
        self._report.note_not_precompiled(reason)

    def fitting(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | None:
        """The function that fits this call, among those that have served `module` before."""
        known = self._found[module]
        for number, found in enumerate(known):
            try:  # not `attempt`, which would cost every call a microsecond
                is_fit = found.function.fits(module, args, kwargs)
            except Exception as error:
                log.info("precompiled.not_compared artifact=%s error=%r", found.path, error)
                continue
            if is_fit:
                if number:  # inputs of one kind come in a row
                    self._found[module] = (found, *known[:number], *known[number + 1 :])
                return found
        return None

    def look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found | str:
        """The artifact for this call, which does not serve before it is remembered. Returns why there is none
        otherwise; empty if none is wanted."""
        if self._artifacts is None:
            return ""
        _configure()
        found = attempt(self._artifacts.find, module, args, kwargs)
        return found.reason if isinstance(found, Failure) else found

    def remember(self, module: nn.Module, found: Found) -> None:
        """Let an artifact serve the calls of `module` that it fits, once it was compared."""
        if found not in self._found[module]:
            self._found[module] = (found, *self._found[module])

    def make(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made | None:
        """Compile a call ahead of time, if possible."""
        if self._artifacts is None:
            return None
        started = time.perf_counter()
        _configure()
        with uncounted():
            made = attempt(self._artifacts.make, module, args, kwargs)
        self._report.precompile_s += time.perf_counter() - started
        note("regions", f"{self._report.name}: compile ahead", started)
        if isinstance(made, Failure):
            made = made.reason
        if isinstance(made, str):
            self._report.explain(f"cannot be precompiled: {made}")
            self._report.note_not_precompiled(made)
            return None
        return made

    def take(self, made: Made, function: Any) -> None:
        """Let a new artifact that proved right serve this boot too."""
        if self._artifacts is not None:
            self._artifacts.take(made, function)

    def reject(self, path: str, reason: str) -> str:
        """Stop using an artifact, and keep it out of the store. Returns `reason`."""
        log.warning("precompiled.rejected artifact=%s reason=%s", path, reason)
        self._report.explain(f"not precompiled: {reason}")
        self._report.note_not_precompiled(reason)
        self.withheld.add(path)
        self.drop(path)
        if self._artifacts is not None:
            self._artifacts.reject(path, reason)
        return reason


def _configure() -> None:
    """Make this library's settings of torch in this thread. An artifact's name depends on them."""
    from compile_cache.regions.torch_settings import configure_torch

    configure_torch()
