"""Regions: the repeated blocks of a model, compiled once a class, checked against eager, and demoted where they fail.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._inductor.config
from torch import nn
from torch.utils import _pytree as pytree

from compile_cache.counters import read_counts
from compile_cache.directory import CacheDirectory
from compile_cache.kernels import configure_autotuner, unread_files
from compile_cache.numerics import PeakMemory, largest_relative_error
from compile_cache.report import CompileCounts, RegionReport
from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

# A class that is compiled for several image sizes and input strides passes Dynamo's own limit of 8 graphs a function.
_RECOMPILE_LIMIT = 64


class Compiler:
    """All regions of a boot. `compile` makes them, `watching` surrounds the warm-up, in which they climb the ladder."""

    def __init__(self, settings: Settings, directory: CacheDirectory) -> None:
        _configure_torch()
        self._settings = settings
        self._directory = directory
        self._seen = set(directory.scan())
        self.regions: dict[type[nn.Module], Region] = {}
        self.withheld: set[str] = set()
        self._compiling = threading.Event()
        torch._dynamo.callback.on_compile_start(lambda _: self._compiling.set())
        torch._dynamo.callback.on_compile_end(lambda _: self._compiling.clear())

    @property
    def is_compiling(self) -> bool:
        """Whether some thread is in the middle of a compile, whose files may be half-written."""
        return self._compiling.is_set()

    def compile(self, root: nn.Module) -> None:
        """Serve `root`'s regions compiled from now on: its repeated blocks by class, or `root` itself."""
        for module in find_regions(root, self._settings.scope):
            region = self.regions.setdefault(type(module), Region(type(module), self._options(), self._new_artifacts))
            region.adopt(module)

    def _options(self) -> dict[str, Any]:
        mode = None if self._settings.mode == "default" else self._settings.mode
        return {"mode": mode, "dynamic": self._settings.dynamic}

    def _new_artifacts(self) -> set[str]:
        """The artifacts that have appeared since the last call."""
        now = set(self._directory.scan())
        new, self._seen = now - self._seen, now
        return new

    def unread_files(self) -> set[str]:
        """The artifacts that no warm boot will read: what autotuning tried and did not choose."""
        return unread_files(self._directory.scan())

    @property
    def device_peak_bytes(self) -> int:
        """The most device memory that tensors took before torch's own peak was last reset here; 0 without a GPU."""
        return PeakMemory.highest_bytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the context lasts, every graph that a region compiles or finds is checked against eager."""
        for region in self.regions.values():
            region.watched = True
        try:
            yield
        finally:
            for region in self.regions.values():
                region.watched = False
                region.conclude()
                self.withheld |= region.withheld


def _configure_torch() -> None:
    """Inductor settings without which a warm boot would do again what a cold one has done."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    # Precompiled headers lie outside the cache directory, and every boot would run g++ to see whether they are current.
    torch._inductor.config.cpp_cache_precompile_headers = False
    # torch 2.11 tries a smaller block at run time and, if it is the best, does not know it again on the next boot: it
    # benchmarks anew, and may choose otherwise. 2.13 finds it (CachingAutotuner.recheck_autotune_cache).
    if torch.__version__ < "2.13":
        torch._inductor.config.dynamic_scale_rblock = False
    configure_autotuner()
    with contextlib.suppress(ImportError):
        from torch._dynamo import funcname_cache

        funcname_cache.cache = _NoFunctionNames()


class _NoFunctionNames(dict[str, dict[int, str]]):
    """Stands for Dynamo's names of traced functions by file and line, which go into debug logs alone.

    Dynamo finds them by tokenizing each traced file whole, whether it logs or not: a tenth of a warm boot's
    compiling (benchmarks/README.md).
    """

    def __contains__(self, filename: object) -> bool:
        return True

    def __getitem__(self, filename: str) -> dict[int, str]:
        return {}


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


class Region:
    """One module class, compiled, and its instances. Serves eager once it has failed; `report` says why."""

    def __init__(
        self, module_class: type[nn.Module], options: dict[str, Any], new_artifacts: Callable[[], set[str]]
    ) -> None:
        self.report = RegionReport(name=module_class.__name__, instances=0)
        self.watched = False
        self.withheld: set[str] = set()
        self._options = options
        self._fullgraph = True
        self._new_artifacts = new_artifacts
        self._artifacts: set[str] = set()
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        self._calls = 0

    def adopt(self, module: nn.Module) -> None:
        """Let calls of `module` come here, as `module.compile()` would let them go to the compiled code."""
        self._compile(module)
        self.report.instances = len(self._compiled)
        module._compiled_call_impl = functools.partial(self._call, module)

    def _compile(self, module: nn.Module) -> None:
        self._compiled[module] = torch.compile(module._call_impl, fullgraph=self._fullgraph, **self._options)

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.report.step == "eager":
            return _eager(module, args, kwargs)
        if self.watched:
            return self._watched_call(module, args, kwargs)
        try:
            return self._compiled[module](*args, **kwargs)
        except _COMPILE_ERRORS as error:
            return self._fall_back(module, args, kwargs, error)

    def _watched_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call that measures what it compiled, and checks it against eager on the same, unchanged inputs."""
        kept_args, kept_kwargs = self._keep(args, kwargs)
        before, started = read_counts(), time.perf_counter()
        try:
            with PeakMemory() as compiled_peak:
                output = self._compiled[module](*args, **kwargs)
        except Exception as error:  # whatever it is, the eager call below either serves or raises it again
            self._artifacts |= self._new_artifacts()
            return self._fall_back(module, kept_args, kept_kwargs, error)
        self._calls += 1
        after = read_counts()
        if after.graphs == before.graphs:
            return output
        self._record(before, after, time.perf_counter() - started)
        try:
            with PeakMemory() as eager_peak:
                reference = _eager(module, kept_args, kept_kwargs)
        except torch.OutOfMemoryError as error:
            self._explain(f"not checked against eager: {_first_line(error)}")
            return output
        self._record_peaks(compiled_peak.bytes, eager_peak.bytes)
        return output if self._passes(output, reference) else reference

    def _keep(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copies of the inputs, which a call may change; the inputs themselves where there is no memory for copies."""
        try:
            return pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))  # type: ignore[no-any-return]
        except torch.OutOfMemoryError as error:
            self._explain(f"checked on inputs that the call itself may have changed: {_first_line(error)}")
            return args, kwargs

    def _record(self, before: CompileCounts, after: CompileCounts, seconds: float) -> None:
        report = self.report
        if after.misses > before.misses:
            self._artifacts |= self._new_artifacts()
        report.graphs += after.graphs - before.graphs
        report.compile_s += seconds
        if after.misses > before.misses:
            report.step = "cold"
            self._explain("lookups found nothing")
        elif after.hits > before.hits and report.step == "unused":
            report.step = "cached"
        elif after.hits == before.hits:
            report.step = "cold"
            self._explain("torch did not look it up: its caches are off")

    def _record_peaks(self, compiled_bytes: int | None, eager_bytes: int | None) -> None:
        if compiled_bytes is not None and compiled_bytes > (self.report.compiled_peak_bytes or 0):
            self.report.compiled_peak_bytes = compiled_bytes
            self.report.eager_peak_bytes = eager_bytes

    def _passes(self, output: Any, reference: Any) -> bool:
        """Compare each tensor of a compiled output with eager's; on a difference, demote the region."""
        error, tolerance = largest_relative_error(output, reference)
        self.report.relative_error = max(error, self.report.relative_error or 0.0)
        self.report.tolerance = tolerance
        if error <= tolerance:
            return True
        self._demote(f"differs from eager by {error:.1e}, and {tolerance:.0e} is allowed")
        return False

    def _fall_back(self, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """Serve this call without what failed: with graph breaks if one was in the way, else eager.

        Raises:
            Exception: the model's own, where eager fails as well; the region then stays as it is.
        """
        if self._fullgraph and isinstance(error, torch._dynamo.exc.Unsupported):
            # Whose error is it? The model's own, which Dynamo met in tracing, is raised here, and nothing changes.
            _eager(module, *pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs)))
            log.info("compile.graph_break region=%s error=%s", self.report.name, _first_line(error))
            self._fullgraph = False
            for instance in self._compiled:
                self._compile(instance)
            self._explain(f"with graph breaks: {_first_line(error)}")
            return self._call(module, *args, **kwargs)
        output = _eager(module, args, kwargs)
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            self._explain(f"eager for further shapes: {_RECOMPILE_LIMIT} are compiled; set COMPILE_CACHE_DYNAMIC=auto")
            return output
        log.warning("compile.failed region=%s", self.report.name, exc_info=error)
        self._demote(f"{type(error).__name__}: {_first_line(error)}")
        return output

    def _demote(self, reason: str) -> None:
        """Serve eager from now on, and withhold what was compiled from the store."""
        self.report.step, self.report.reason = "eager", reason
        self.withheld |= self._artifacts

    def _explain(self, reason: str) -> None:
        """Add a reason to the report, once."""
        if reason not in self.report.reason:
            log.info("compile.note region=%s reason=%s", self.report.name, reason)
            self.report.reason = "; ".join(filter(None, (self.report.reason, reason)))

    def conclude(self) -> None:
        """After the warm-up: a region that was called, but for which torch compiled nothing, is eager."""
        if self._calls and not self.report.graphs and self.report.step == "unused":
            self._demote(
                "torch.compile made no graph: TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE is set, "
                "or this process has compiled the class in an earlier boot"
            )


# What torch raises when compiling fails, as opposed to the model's own errors.
_COMPILE_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def _eager(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The call that torch makes of a module that is not compiled, hooks included."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
