"""The regions of a boot: finds the repeated blocks of a model by class, and surrounds the warm-up.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from compile_cache.background.orders import Orders
from compile_cache.calls.description import class_name
from compile_cache.errors import NotAModuleError, log
from compile_cache.inductor.counters import ended_steps
from compile_cache.inductor.toolchain import unread_files
from compile_cache.serving.moment import LOCK
from compile_cache.serving.region import Region
from compile_cache.serving.region_report import RegionReport
from compile_cache.serving.supply import Supply
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

_UNUSED = "nothing called it in the warm-up. Give the modules whose forward is called to boot.compile()"
_INSIDE = "nothing called it in the warm-up, but another torch.compile compiled code. Take that away if it is around it"
_FORKED = "a fork of a booted process has no second process. Boot in each process, or wait_compiled() before it forks"


class Regions:
    """All regions of a boot. `compile` makes them; `watching` surrounds the warm-up. `supply` is what they share.

    `is_hit`: the artifacts come from this very version of the model.
    """

    def __init__(
        self, settings: Settings, directory: CacheDirectory, is_hit: bool = False, orders: Orders | None = None
    ) -> None:
        self.supply = Supply(settings, directory, is_hit, self._count_calls, orders)
        self.by_class: dict[type[nn.Module], Region] = {}
        # How many roots of a class `compile` got, which tell their modules' places apart.
        self._roots = Counter[str]()
        self._others_at: int | None = None
        os.register_at_fork(after_in_child=functools.partial(_after_fork, weakref.ref(self)))

    def compile(
        self, root: nn.Module, whole: bool = False, shares_weights: bool = False, after_ready: bool = False
    ) -> None:
        """Serve `root`'s regions compiled from now on: its repeated blocks by class, or `root` itself. With
        `shares_weights`, the second process maps the same parameters. With `after_ready`, stored functions are loaded
        after READY.

        Raises:
            NotAModuleError: `root` is not a module, but a function, for example; or it is TorchScript.
        """
        if not isinstance(root, nn.Module):
            name = getattr(root, "__qualname__", repr(root))
            raise NotAModuleError(f"boot.compile() takes a torch.nn.Module, not {name}. Pass the module that it calls.")
        if isinstance(root, torch.jit.ScriptModule):
            raise NotAModuleError(f"{root.original_name} is TorchScript, which torch.compile cannot compile")
        self.supply.configure()
        self._roots[kind := class_name(type(root))] += 1
        paths = {id(module): path for path, module in root.named_modules()}
        for module in find_regions(root, "whole" if whole else self.supply.settings.scope):
            region = self._region(type(module))
            if region.report.is_left_eager:
                region.report.instances += 1
            else:
                region.supply.shares_weights &= shares_weights
                region.supply.is_late &= after_ready
                if not region.supply.is_late:
                    self.supply.look_again(region.supply.kinds)
                region.adopt(module, f"{kind} {self._roots[kind]} {paths[id(module)]}")

    def _region(self, module_class: type[nn.Module]) -> Region:
        if module_class not in self.by_class:
            # Classes may have one name, and those that a function made also one module.
            alike = [kind for kind in self.by_class if kind.__name__ == module_class.__name__]
            number = sum(class_name(kind) == class_name(module_class) for kind in alike) + 1
            owner = class_name(module_class) + (f" {number}" if number > 1 else "")
            report = RegionReport(name=owner if alike else module_class.__name__, instances=0)
            if module_class.__name__ in self.supply.settings.leave_eager:
                reason = "left eager by COMPILE_CACHE_LEAVE_EAGER"
                report = replace(report, settled="eager", reason=reason, is_left_eager=True)
            elif isinstance(why_not := self.supply.artifacts, str) and why_not:
                report.note_not_precompiled(why_not)
            self.by_class[module_class] = Region(report, owner, self.supply)
        return self.by_class[module_class]

    @property
    def reports(self) -> list[RegionReport]:
        """A report for each class; the classes that are left eager come last."""
        return sorted((region.report for region in self.by_class.values()), key=lambda report: report.is_left_eager)

    def unknown_class_warnings(self) -> list[str]:
        """A warning for each name in `COMPILE_CACHE_LEAVE_EAGER` and `COMPILE_CACHE_GRAPHS` that no class had."""
        names, settings = {kind.__name__ for kind in self.by_class}, self.supply.settings
        classes = ", ".join(sorted(names)) or "none"
        return [
            f"COMPILE_CACHE_{variable} names {name}, but this boot has no such region. Its regions: {classes}."
            for variable, given in (("LEAVE_EAGER", settings.leave_eager), ("GRAPHS", settings.graphs))
            for name in given
            if name not in names
        ]

    def _count_calls(self) -> int:
        return sum(sum(dict(region.served).values()) for region in list(self.by_class.values()))

    def warm_up(self, call: Callable[[], object], until_s: float = math.inf) -> bool:
        """Make calls of the warm-up. In `block`, then wait for the second process, which begins no order after
        `until_s` of `time.monotonic`. Whether it has answered any: then make them again, which compares."""
        with self._watching():
            call()
        return self.supply.await_orders(until_s)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """While the context lasts, calls are the warm-up's."""
        supply = self.supply
        supply.configure()
        supply.is_warming_up = True
        supply.moment.conclude(is_whole=False)  # calls so far are of no round
        try:
            yield
            supply.moment.conclude(is_whole=True)
        finally:
            supply.moment.pass_by()
            supply.is_warming_up = False

    def name_unused(self, graphs: int) -> None:
        """Report each class that the warm-up did not call. Called at READY; `graphs` says how many torch has compiled
        or found in this boot."""
        regions = list(self.by_class.values())
        why = _INSIDE if graphs > sum(region.report.graphs for region in regions) else _UNUSED
        for region in regions:
            if not region.served and not region.report.is_left_eager:
                region.report.explain(why)
                log.warning("nothing of %s is compiled: %s", region.report.name, why)

    @property
    def has_others(self) -> bool:
        """Whether `hand_over_others` has left files, or torch has worked since then."""
        return self._others_at != ended_steps()

    def hand_over_others(self) -> None:
        """Hand over the files that this process made, once they are finished: of the user's own `torch.compile`, of
        Triton kernels, of the toolchain."""
        steps, directory = ended_steps(), self.supply.directory
        others = directory.ledger.appeared()
        finished = directory.finished(others)
        directory.ledger.hand_over(finished)
        self._others_at = steps if finished == others else None

    def unread_files(self, paths: Iterable[str]) -> set[str]:
        """Those that no warm boot will read: candidates that autotuning did not choose."""
        return unread_files(paths)


def _after_fork(made: weakref.ref[Regions]) -> None:
    """In a fork, which has none of this process's threads, serve calls eager whose code nobody will bring. Loaded code
    serves as before."""
    if (regions := made()) is not None:
        regions.supply.order_nothing(_FORKED)
        for region in list(regions.by_class.values()):
            region.supply.give_up_orders(_FORKED)


os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


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
