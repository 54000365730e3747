"""The regions of a boot: finds the repeated blocks of a model by class, and keeps what all regions share.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.errors import ArtifactError, Failure, NotAModuleError, attempt
from compile_cache.inductor.counters import read_counts
from compile_cache.inductor.function_file import COMPARED, PRECOMPILED, SUFFIX, has_artifacts
from compile_cache.inductor.tuning import unread_files
from compile_cache.serving.moment import LOCK, Moment
from compile_cache.serving.region import Region
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

if TYPE_CHECKING:
    from compile_cache.background.orders import Orders
    from compile_cache.calls.spec import CallSpec
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Graphs
    from compile_cache.inductor.stored_functions import Artifacts

log = logging.getLogger("compile_cache")

# Code that was not compared on all instances is published after so long, if nothing contradicts it. The next boot
# compares it first.
_UNPROVED_S = 60.0
# The most that a setup takes to trace graphs out of stored files, the import of the compiler included.
_TRACING_S = 15.0
_COMPILER_S = 3.0
_FORKED = "a fork of a booted process has no second process. Boot in each process, or wait_compiled() before it forks"


class Compiler:
    """All regions of a boot, and what they have in common. `compile` makes them; `watching` surrounds the warm-up.

    `is_hit`: the artifacts come from this very version of the model. `moment` says when new code is taken. `artifacts`
    is None until torch's compiler is imported, and if nothing may be compiled ahead of time.

    torch's compiler is imported at once. If a second process compiles and nothing was restored, it is imported when the
    first artifact arrives.
    """

    def __init__(self, settings: Settings, directory: CacheDirectory, is_hit: bool = False) -> None:
        self._settings = settings
        self._directory = directory
        self.is_hit = is_hit
        self.moment = Moment()
        self.regions: dict[type[nn.Module], Region] = {}
        self.artifacts: Artifacts | None = None
        self.is_warming_up = False
        self.is_ending = False
        self._tracing_s = _TRACING_S
        self._seen = set(directory.scan())
        self._left_eager: dict[str, RegionReport] = {}
        self._why_not_precompiled = ""
        self._orders: Orders | None = None
        self._is_released = False
        self._opening = threading.Lock()
        # Held while this process makes or compares code: torch compiles for one thread at a time.
        self.making = threading.Lock()
        self._is_open = False
        self._deadline_s = math.inf
        self.why_no_orders = "" if settings.precompile else "nothing may be compiled ahead of time"
        _all.add(self)
        if settings.cold_start == "block" or has_artifacts(self._seen):
            self.open()

    def orders(self) -> Orders | None:
        """The calls for the second process; None if there can be none, and `why_no_orders`."""
        if self._orders is None and not self.why_no_orders:
            from compile_cache.background.orders import Orders

            with self._opening:
                if self._orders is None:
                    settings, folder = self._settings, self._directory
                    self._orders = Orders(settings, folder, self.open, self._load_arrived, self._count_calls)
                    if self._is_released:
                        self._orders.jobs.release()
        return self._orders

    def open(self) -> None:
        """Import torch's compiler, once, and find artifacts from now on."""
        with self._opening:
            if self._is_open:
                return
            self._is_open = True
            from compile_cache.inductor.switches import configure_torch, is_switched_off
            from compile_cache.inductor.toolchain import remember_toolchain

            configure_torch()
            remember_toolchain(self._directory.path)
            if self._settings.precompile and not is_switched_off():
                self._open_artifacts()

    def _open_artifacts(self) -> None:
        """Open the artifacts. They need private names of torch: if one is gone, the boot goes on without artifacts."""
        try:
            from compile_cache.inductor.stored_functions import Artifacts
        except (ImportError, AttributeError) as error:
            reason = f"torch {torch.__version__} lacks a name that precompiled regions need: {error}"
            log.warning("No precompiled regions in this boot: %s", reason)
            self._why_not_precompiled = reason
            for region in self.regions.values():
                region.report.note_not_precompiled(reason)
            return
        self.artifacts = Artifacts(self._settings, self._directory.path)

    def _load_arrived(self, path: str) -> Precompiled:
        """Load an artifact of the second process. Raises ArtifactError or OSError if it cannot be used."""
        if self.artifacts is None:
            raise ArtifactError(self._why_not_precompiled or "torch.compile is switched off, or cannot be imported")
        self._configure()  # the call may have been ordered before torch's compiler was imported
        return self.artifacts.arrive(path)

    def find(
        self, spec: CallSpec, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Precompiled | str:
        """The function for this call; why there is none otherwise, empty if none is wanted."""
        if self.artifacts is None:
            return ""
        self._configure()  # an artifact's name depends on these settings
        found = attempt(self.artifacts.find, spec, module, args, kwargs)
        return found.reason if isinstance(found, Failure) else found

    def is_proved(self, path: str) -> bool:
        """Whether an earlier boot of this very version has compared a function on all instances."""
        return self.is_hit and self.artifacts is not None and self.artifacts.is_compared(path)

    def reject(self, path: str, reason: str) -> None:
        """Use a record no more in this boot."""
        if self.artifacts is not None:
            self.artifacts.reject(path, reason)

    def policy(self) -> str:
        """What to do now with a call of a new kind: `background` or `block`; after READY also `eager` or `error`."""
        if not self.is_warming_up:
            return self._settings.unseen
        return "background" if time.monotonic() > self._deadline_s else self._settings.cold_start

    def _count_calls(self) -> int:
        return sum(sum(dict(region.served).values()) for region in list(self.regions.values()))

    def release(self) -> None:
        """Let the second process begin. Called at READY."""
        with self._opening:
            self._is_released = True
            if self._orders is not None:
                self._orders.jobs.release()

    def forget_second_process(self) -> None:
        """In a fork of this process: serve calls eager whose code nobody will bring. Loaded code serves as before."""
        self.why_no_orders, self._orders = _FORKED, None
        self.making, self._opening = threading.Lock(), threading.Lock()  # another thread may have held them
        self.moment.forget_threads()
        for region in list(self.regions.values()):
            region.give_up_orders(_FORKED)

    def hurry(self, deadline_s: float) -> None:
        """From `deadline_s` of `time.monotonic` on, let only the second process compile."""
        self._deadline_s = deadline_s

    @property
    def waiting(self) -> int:
        """How many calls the second process has not answered yet."""
        return self._orders.jobs.waiting if self._orders else 0

    def wait(self, timeout_s: float) -> bool:
        """Wait until the second process has answered every call; False after `timeout_s`."""
        return self._orders is None or self._orders.jobs.wait(timeout_s)

    @property
    def is_compiling(self) -> bool:
        """Whether a thread makes code now, so that files may be half-written."""
        return self.making.locked()

    def compile(self, root: nn.Module, whole: bool = False, shares_weights: bool = False) -> None:
        """Serve `root`'s regions compiled from now on: its repeated blocks by class, or `root` itself. With
        `shares_weights`, the second process maps the same parameters.

        Raises:
            NotAModuleError: `root` is not a module, but a function, for example; or it is TorchScript.
        """
        if not isinstance(root, nn.Module):
            name = getattr(root, "__qualname__", repr(root))
            raise NotAModuleError(f"boot.compile() takes a torch.nn.Module, not {name}. Pass the module that it calls.")
        if isinstance(root, torch.jit.ScriptModule):
            raise NotAModuleError(f"{root.original_name} is TorchScript, which torch.compile cannot compile")
        self._configure()
        for module in find_regions(root, "whole" if whole else self._settings.scope):
            if (name := type(module).__name__) in self._settings.leave_eager:
                reason = "left eager by COMPILE_CACHE_LEAVE_EAGER"
                left = RegionReport(name, 0, step="eager", reason=reason, is_left_eager=True)
                self._left_eager.setdefault(name, left).instances += 1
            else:
                region = self._region(type(module))
                region.shares_weights = shares_weights
                region.adopt(module)

    def _configure(self) -> None:
        """Make torch's settings in this thread, if the compiler is imported."""
        if self._is_open:
            from compile_cache.inductor.switches import configure_torch

            configure_torch()

    @property
    def reports(self) -> list[RegionReport]:
        """A report for each class; the classes that are left eager come last."""
        return [*(region.report for region in self.regions.values()), *self._left_eager.values()]

    def left_eager_warnings(self) -> list[str]:
        """A warning for each name in `COMPILE_CACHE_LEAVE_EAGER` that no class had."""
        classes = ", ".join(sorted({report.name for report in self.reports})) or "none"
        return [
            f"COMPILE_CACHE_LEAVE_EAGER names {name}, but this boot has no such region. Its regions: {classes}."
            for name in self._settings.leave_eager
            if name not in self._left_eager
        ]

    def _region(self, module_class: type[nn.Module]) -> Region:
        if module_class not in self.regions:
            report = RegionReport(name=module_class.__name__, instances=0)
            self.regions[module_class] = Region(report, self, len(self.regions))
            if self._why_not_precompiled:
                report.note_not_precompiled(self._why_not_precompiled)
        return self.regions[module_class]

    def may_trace(self, seconds: float) -> bool:
        """Whether the setup can still spend `seconds` on tracing stored graphs, the import of the compiler included."""
        return seconds + _COMPILER_S * (self._tracing_s == _TRACING_S) <= self._tracing_s

    def note_traced(self, seconds: float) -> None:
        """Take seconds from what the setup may spend on tracing."""
        self._tracing_s -= seconds + _COMPILER_S * (self._tracing_s == _TRACING_S)

    def graphs(self, name: str) -> Graphs:
        """A maker of graphs for one class. Imports torch's compiler."""
        self.open()
        from compile_cache.inductor.make import Graphs

        return Graphs(name, self._settings.mode, self._settings.dynamic)

    def new_files(self) -> set[str]:
        """The files of the cache directory that have appeared since the last call."""
        now = set(self._directory.scan())
        new, self._seen = now - self._seen, now
        return new

    @property
    def arrived(self) -> int:
        """How many records the second process has made so far."""
        return len(self._orders.arrived_s) if self._orders else 0

    def unread_files(self) -> set[str]:
        """The files that no warm boot will read: candidates that autotuning did not choose, and precompiled regions of
        another version that this boot's model did not use."""
        files = self._directory.scan()
        used = (self.artifacts.used if self.artifacts else set()) | set(self._orders.arrived_s if self._orders else ())
        used |= {f"{path.removesuffix(SUFFIX)}{COMPARED}" for path in used}
        unused = {path for path in files if path.startswith(f"{PRECOMPILED}/") and path not in used}
        return unread_files(files) | unused

    @property
    def withheld(self) -> set[str]:
        """The files that must not be published: code that failed; and code of the second process that arrived less than
        a minute ago and was not compared on all instances, unless the process ends before any call of its kind."""
        regions = list(self.regions.values())
        arrived = dict(self._orders.arrived_s) if self._orders else {}
        young = {path for path, arrived_s in arrived.items() if time.monotonic() < arrived_s + _UNPROVED_S}
        if self.is_ending:
            young &= set[str]().union(*(region.met for region in regions))
        unproved = young.difference(*(region.proved for region in regions))
        return unproved.union(*(region.withheld for region in regions))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the context lasts, calls are the warm-up's."""
        self._configure()
        if self.artifacts is not None:
            self.artifacts.forget_options()
        self.is_warming_up = True
        others = self._graphs_of_others()
        try:
            yield
        finally:
            self.moment.pass_by()
            self.is_warming_up = False
            for region in self.regions.values():
                region.end_warm_up(self._graphs_of_others() > others)

    def _graphs_of_others(self) -> int:
        """How many graphs torch has compiled or found for other code than the regions'."""
        return read_counts().graphs - sum(region.report.graphs for region in self.regions.values())


# All of this process. A fork has none of its threads.
_all: weakref.WeakSet[Compiler] = weakref.WeakSet()


def _after_fork() -> None:
    LOCK.release()
    for compiler in list(_all):
        compiler.forget_second_process()


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=_after_fork)


def find_regions(root: nn.Module, scope: str) -> list[nn.Module]:
    """The modules to compile: all instances of the repeated block classes, none inside another.

    `root` itself is compiled if the scope is `whole` or nothing repeats. diffusers (`_repeated_blocks`) or transformers
    (`_no_split_modules`, where embeddings may stand beside the blocks) name the classes; else they are the classes with
    several instances in one `ModuleList`.
    """
    if scope == "whole":
        return [root]
    counts = Counter(type(module) for module in root.modules())
    blocks = getattr(root, "_repeated_blocks", None)
    named = set(blocks or getattr(root, "_no_split_modules", None) or ())
    classes = {kind for kind in counts if kind.__name__ in named}
    if not blocks:
        classes = {kind for kind in classes if counts[kind] > 1} or classes or _listed_classes(root)
    return list(_outermost(root, classes)) or [root]


def _listed_classes(root: nn.Module) -> set[type[nn.Module]]:
    """Classes that have children and several instances in one `ModuleList`. A list of plain layers is no block, nor is
    one of lists, which nothing calls."""
    found = set()
    for module in root.modules():
        if isinstance(module, nn.ModuleList):
            classes = [type(child) for child in module if any(True for _ in child.children())]
            classes = [kind for kind in classes if not issubclass(kind, nn.ModuleList | nn.ModuleDict)]
            found |= {kind for kind in classes if classes.count(kind) > 1}
    return found


def _outermost(module: nn.Module, classes: set[type[nn.Module]]) -> Iterator[nn.Module]:
    if type(module) in classes:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, classes)
