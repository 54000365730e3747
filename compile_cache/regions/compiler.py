"""Regions: the repeated blocks of a model, compiled once a class, checked against eager, and demoted where they fail.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.aot.files import PRECOMPILED
from compile_cache.aot.toolchain import remember_toolchain
from compile_cache.errors import NotAModuleError
from compile_cache.regions.autotuner import unread_files
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.check import PeakMemory
from compile_cache.regions.ladder import RegionReport
from compile_cache.regions.left_eager import LeftEager
from compile_cache.regions.region import Region
from compile_cache.regions.torch_settings import configure_torch, is_switched_off
from compile_cache.settings import Settings
from compile_cache.versions.directory import CacheDirectory

if TYPE_CHECKING:
    from compile_cache.aot.artifacts import Artifacts

log = logging.getLogger("compile_cache")


class Compiler:
    """All regions of a boot. `compile` makes them, `watching` surrounds the warm-up, in which they climb the ladder.

    `is_hit` says that the artifacts come from this very version of the model. The boot that published them has compared
    every instance of a region with eager, so that this one compares an artifact once.
    """

    def __init__(self, settings: Settings, directory: CacheDirectory, is_hit: bool = False) -> None:
        configure_torch()
        remember_toolchain(directory.path)
        self._settings = settings
        self._directory = directory
        self._is_hit = is_hit
        self._seen = set(directory.scan())
        self.regions: dict[type[nn.Module], Region] = {}
        self._left_eager = LeftEager(settings.leave_eager)
        self._precompiled: Artifacts | None = None
        self._why_not_precompiled = ""
        if settings.precompile and not is_switched_off():
            self._open_artifacts()
        self._compiling = threading.Event()
        _signal_compiles(self._compiling)

    def _open_artifacts(self) -> None:
        """Precompiled regions rest on names that are private to torch: where one is gone, the boot does without."""
        try:
            from compile_cache.aot.artifacts import Artifacts
        except (ImportError, AttributeError) as error:
            self._do_not_precompile(f"torch {torch.__version__} has other names than precompiled regions need: {error}")
            return
        self._precompiled = Artifacts(self._settings, self._directory.path)

    def _do_not_precompile(self, reason: str) -> None:
        log.warning("regions are not precompiled in this boot: %s", reason)
        self._precompiled, self._why_not_precompiled = None, reason
        for region in self.regions.values():
            region.stored.switch_off(reason)

    def prefetch(self) -> int:
        """Load the precompiled regions of the cache directory; how many it has."""
        return self._precompiled.prefetch() if self._precompiled else 0

    @property
    def is_compiling(self) -> bool:
        """Whether some thread is in the middle of a compile, whose files may be half-written."""
        return self._compiling.is_set()

    def compile(self, root: nn.Module, whole: bool = False) -> None:
        """Serve `root`'s regions compiled from now on: its repeated blocks by class, or `root` itself.

        Raises:
            NotAModuleError: it is something else, such as a function.
        """
        if not isinstance(root, nn.Module):
            name = getattr(root, "__qualname__", repr(root))
            raise NotAModuleError(f"boot.compile() takes a torch.nn.Module, not {name}: pass the module that it calls.")
        configure_torch()
        for module in find_regions(root, "whole" if whole else self._settings.scope):
            if not self._left_eager.takes(module):
                self._region(type(module)).adopt(module)

    @property
    def reports(self) -> list[RegionReport]:
        """A report for each class, those that are left eager last."""
        return [*(region.report for region in self.regions.values()), *self._left_eager.reports]

    def left_eager_warnings(self) -> list[str]:
        """A line for each name in `COMPILE_CACHE_LEAVE_EAGER` that no class had."""
        return self._left_eager.warnings([region.report.name for region in self.regions.values()])

    def _region(self, module_class: type[nn.Module]) -> Region:
        if module_class not in self.regions:
            settings = self._settings
            region = Region(module_class, settings.mode, settings.dynamic, self._precompiled, self._new_artifacts)
            region.compares_every_instance = not self._is_hit
            self.regions[module_class] = region
            if self._why_not_precompiled:
                region.stored.switch_off(self._why_not_precompiled)
        return self.regions[module_class]

    def _new_artifacts(self) -> set[str]:
        """The artifacts that have appeared since the last call."""
        now = set(self._directory.scan())
        new, self._seen = now - self._seen, now
        return new

    def unread_files(self) -> set[str]:
        """The artifacts that no warm boot will read: what autotuning tried and did not choose, and precompiled regions
        that this boot's model had no use for, which came from another version."""
        files = self._directory.scan()
        used = self._precompiled.used if self._precompiled else set()
        unused = {path for path in files if path.startswith(f"{PRECOMPILED}/") and path not in used}
        return unread_files(files) | unused

    @property
    def withheld(self) -> set[str]:
        """The files that must not be published: what computes something else than eager does, or failed to compile."""
        return set[str]().union(*(region.withheld for region in self.regions.values()))

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory that tensors took before torch's own peak was last reset here; 0 without a GPU."""
        return PeakMemory.highest_bytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the context lasts, every graph that a region compiles or finds is checked against eager, and
        precompiled functions are looked for, and made."""
        configure_torch()
        if self._precompiled and isinstance(noted := attempt(self._precompiled.note_options), Failure):
            self._do_not_precompile(f"Inductor's options cannot be described: {noted.reason}")
        for region in self.regions.values():
            region.watched = True
        try:
            yield
        finally:
            for region in self.regions.values():
                region.watched = False
                region.conclude()


def _signal_compiles(compiling: threading.Event) -> None:
    """Have the event set while torch compiles, where torch says when it does."""
    try:
        from torch._dynamo import callback

        start: Any = callback.on_compile_start
        end: Any = callback.on_compile_end
    except (ImportError, AttributeError) as error:
        log.warning("torch %s does not say when it compiles: %s", torch.__version__, error)
        return
    start(lambda _: compiling.set())
    end(lambda _: compiling.clear())


def find_regions(root: nn.Module, scope: str) -> list[nn.Module]:
    """The modules to compile: all instances of the repeated block classes, none inside another; `root` itself where the
    scope is `whole` or nothing repeats.

    The classes are those that diffusers (`_repeated_blocks`) or transformers (`_no_split_modules`) name, else those
    with several instances in one `ModuleList`.
    """
    if scope == "whole":
        return [root]
    named = set(getattr(root, "_repeated_blocks", None) or getattr(root, "_no_split_modules", None) or ())
    classes = {type(module) for module in root.modules() if type(module).__name__ in named} or _listed_classes(root)
    return list(_outermost(root, classes)) or [root]


def _listed_classes(root: nn.Module) -> set[type[nn.Module]]:
    """Classes with two instances or more in one `ModuleList`, and with children: a list of plain layers is no block."""
    found = set()
    for module in root.modules():
        if isinstance(module, nn.ModuleList):
            classes = [type(child) for child in module if any(True for _ in child.children())]
            found |= {kind for kind in classes if classes.count(kind) > 1}
    return found


def _outermost(module: nn.Module, classes: set[type[nn.Module]]) -> Iterator[nn.Module]:
    if type(module) in classes:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, classes)
