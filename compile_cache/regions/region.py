"""One module class and its instances: how each call is served, and how a region climbs and falls on the ladder.

precompiled → cached → cold → eager. What was compiled ahead of time serves the calls that it fits; the others go to
`torch.compile`, which finds a graph or compiles one; and what cannot be compiled, or computes something else, is
served eager.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils import _pytree as pytree

from compile_cache.aot.artifacts import Artifacts, Found, Made
from compile_cache.aot.describe import with_plain_strides
from compile_cache.lifecycle.report import CompileCounts, RegionReport
from compile_cache.regions.check import PeakMemory, largest_relative_error
from compile_cache.regions.counters import count_precompiled, read_counts, uncounted
from compile_cache.regions.torch_settings import RECOMPILE_LIMIT, configure_torch

log = logging.getLogger("compile_cache")

# From the highest step down: a region is on the lowest that one of its calls needed.
_LADDER = ("unused", "precompiled", "cached", "cold", "eager")


class Region:
    """One module class, compiled, and its instances. Serves eager once it has failed; `report` says why."""

    def __init__(
        self,
        module_class: type[nn.Module],
        mode: str,
        dynamic: bool | None,
        artifacts: Artifacts | None,
        new_files: Callable[[], set[str]],
    ) -> None:
        self.report = RegionReport(name=module_class.__name__, instances=0)
        self.watched = False
        self.withheld: set[str] = set()
        self._options: dict[str, Any] = {"mode": None if mode == "default" else mode, "dynamic": dynamic}
        self._fullgraph = True
        self._artifacts = artifacts
        self._new_files = new_files
        self._files: set[str] = set()
        self._compiled: dict[nn.Module, Callable[..., Any]] = {}
        # Of each instance, the precompiled functions that have served it, the last one first.
        self._found: dict[nn.Module, tuple[Found, ...]] = {}
        self._checked: set[str] = set()
        self._calls = 0

    def adopt(self, module: nn.Module) -> None:
        """Let calls of `module` come here, as `module.compile()` would let them go to the compiled code."""
        self._found.setdefault(module, ())
        self.report.instances = len(self._found)
        module._compiled_call_impl = functools.partial(self._call, module)

    def _torch_compiled(self, module: nn.Module) -> Callable[..., Any]:
        """What `torch.compile` makes of `module`: made when it is first needed, because it imports the compiler."""
        configure_torch()
        if module not in self._compiled:
            self._compiled[module] = torch.compile(module._call_impl, fullgraph=self._fullgraph, **self._options)
        return self._compiled[module]

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.report.step == "eager":
            return _eager(module, args, kwargs)
        args, kwargs = with_plain_strides(args, kwargs)
        if self.watched:
            return self._watched_call(module, args, kwargs)
        if found := self._fitting(module, args, kwargs):
            try:
                return found.function(module, args, kwargs)
            except torch.OutOfMemoryError:  # as it would be a step lower
                raise
            except Exception as failure:
                self._reject(found.path, f"{type(failure).__name__}: {_first_line(failure)}")
        try:
            return self._torch_compiled(module)(*args, **kwargs)
        except _COMPILE_ERRORS as error:
            return self._fall_back(module, args, kwargs, error)

    def _fitting(self, module: nn.Module, args: Any, kwargs: Any) -> Found | None:
        """Of the precompiled functions that have served `module` before, the one that fits this call."""
        known = self._found[module]
        for number, found in enumerate(known):
            if self._fits(found, module, args, kwargs):
                if number:  # inputs of one kind come in a row
                    self._found[module] = (found, *known[:number], *known[number + 1 :])
                return found
        return None

    def _fits(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> bool:
        try:
            return found.function.fits(module, args, kwargs)
        except Exception as error:  # an input that nobody has thought of: the next step takes it as it is
            log.info("precompiled.not_compared artifact=%s error=%r", found.path, error)
            return False

    def _watched_call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call that looks for a precompiled function, and is measured and checked where something is new."""
        started = time.perf_counter()
        found = self._fitting(module, args, kwargs) or self._find(module, args, kwargs)
        if isinstance(found, Found):
            return self._serve_precompiled(found, module, args, kwargs, started)
        return self._serve_compiled(module, args, kwargs, found)

    def _find(self, module: nn.Module, args: Any, kwargs: Any) -> Found | str:
        """The artifact that serves `module`, remembered; or why none does, empty where none is wanted."""
        if self._artifacts is None or not self._fullgraph:
            return ""
        try:
            found = self._artifacts.find(module, args, kwargs)
        except Exception as error:  # an input that nobody has thought of: the next step takes it as it is
            log.warning("precompiled.not_looked_up region=%s", self.report.name, exc_info=error)
            return f"{type(error).__name__}: {_first_line(error)}"
        if isinstance(found, Found):
            self._found[module] = (found, *self._found[module])
        return found

    def _serve_precompiled(self, found: Found, module: nn.Module, args: Any, kwargs: Any, started: float) -> Any:
        """Serve a call. Before its first one, an artifact is run on copies of the inputs and compared with eager; what
        differs is served by the next step of the ladder."""
        if found.path not in self._checked:
            if reason := self._difference(found, module, args, kwargs):
                return self._serve_compiled(module, args, kwargs, reason)
            self._checked.add(found.path)
            count_precompiled("loaded")
            self.report.loaded += 1
            self.report.compile_s += time.perf_counter() - started
        output = found.function(module, args, kwargs)
        self._take_step("precompiled")
        return output

    def _difference(self, found: Found, module: nn.Module, args: Any, kwargs: Any) -> str:
        """Why an artifact is not used after all, in words; empty if it computes what eager does."""
        tried = self._keep(module, args, kwargs)
        kept = self._keep(module, args, kwargs)
        try:
            with PeakMemory() as compiled_peak:
                output = found.function(module, *tried)
        except torch.OutOfMemoryError as failure:
            return _first_line(failure)
        except Exception as failure:
            return self._reject(found.path, f"{type(failure).__name__}: {_first_line(failure)}")
        reference = self._reference(module, *kept, compiled_peak.bytes)
        if reference is None:
            return ""
        error, tolerance = largest_relative_error(output, reference.output)
        if error > tolerance:
            return self._reject(found.path, f"it differs from eager by {error:.1e}, and {tolerance:.0e} is allowed")
        self._note_error(error, tolerance)
        return ""

    def _serve_compiled(self, module: nn.Module, args: Any, kwargs: Any, why_not_precompiled: str) -> Any:
        """Serve a call by `torch.compile`. What it compiles or finds is compared with eager on the same, unchanged
        inputs; and the call is compiled ahead of time as well, for the next boot: after it has run, because then it is
        on record what tuning has chosen, and the artifact has the kernels that won, and no others."""
        kept = self._keep(module, args, kwargs)
        before, started = read_counts(), time.perf_counter()
        try:
            with PeakMemory() as compiled_peak:
                output = self._torch_compiled(module)(*args, **kwargs)
        except Exception as error:  # whatever it is, the eager call below either serves or raises it again
            self._files |= self._new_files()
            return self._fall_back(module, *kept, error)
        self._calls += 1
        after = read_counts()
        if is_new := after.graphs > before.graphs:
            self._record(before, after, time.perf_counter() - started)
            if why_not_precompiled and self.report.step == "cached":
                self._explain(f"not precompiled: {why_not_precompiled}")
        made = self._make(module, args, kwargs) if why_not_precompiled else None
        if made:
            self._files |= self._new_files()
        if not is_new and made is None:
            return output
        unchanged = self._keep(module, *kept) if made else kept
        reference = self._reference(module, *kept, compiled_peak.bytes)
        if reference is None:
            if made:
                self._reject(made.path, "there was no memory to compare it with eager")
            return output
        if is_new and not self._passes(output, reference.output):
            if made:
                self._reject(made.path, "what torch.compile made of the same code differs from eager")
            _give_contents(kept, (args, kwargs))
            return reference.output
        if made:
            self._check_made(made, module, args, kwargs, unchanged, reference.output)
        return output

    def _make(self, module: nn.Module, args: Any, kwargs: Any) -> Made | None:
        """Compile the call ahead of time, if that is possible."""
        if self._artifacts is None or not self._fullgraph:
            return None
        started = time.perf_counter()
        try:
            configure_torch()
            with uncounted():  # it is for another boot
                made = self._artifacts.make(module, args, kwargs)
        except Exception as error:  # a full or read-only disk, or an input that nobody has thought of
            log.warning("precompiled.not_made region=%s error=%r", self.report.name, error)
            made = f"{type(error).__name__}: {_first_line(error)}"
        self.report.precompile_s += time.perf_counter() - started
        if isinstance(made, Made):
            return made
        self._explain(f"cannot be precompiled: {made}")
        return None

    def _check_made(
        self, made: Made, module: nn.Module, args: Any, kwargs: Any, unchanged: Any, reference: Any
    ) -> None:
        """Let an artifact serve, here and in other boots, only after it has computed, from `unchanged` inputs, what
        eager did, and fits the call that it was made of."""
        started = time.perf_counter()
        try:
            function = made.load()
            misfit = function.misfit(module, args, kwargs)
            output = function(module, *unchanged)
        except Exception as failure:
            self._reject(made.path, f"{type(failure).__name__}: {_first_line(failure)}")
            return
        error, tolerance = largest_relative_error(output, reference)
        self.report.precompile_s += time.perf_counter() - started
        if misfit or error > tolerance:
            differs = f"it differs from eager by {error:.1e}, and {tolerance:.0e} is allowed"
            self._reject(made.path, f"it does not fit its own call: {misfit}" if misfit else differs)
            return
        count_precompiled("made")
        self.report.made += 1
        self._checked.add(made.path)
        if self._artifacts is not None:
            self._artifacts.take(made, function)

    def _reject(self, path: str, reason: str) -> str:
        """Use an artifact no more, and withhold it from the store; `reason` again."""
        log.warning("precompiled.rejected artifact=%s reason=%s", path, reason)
        self._explain(f"not precompiled: {reason}")
        self.withheld.add(path)
        for module, known in self._found.items():
            self._found[module] = tuple(other for other in known if other.path != path)
        if self._artifacts is not None:
            self._artifacts.reject(path, reason)
        return reason

    def _keep(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copies of the inputs, which a call may change, with the same strides and the same tensors in common; the
        inputs themselves where they cannot be copied."""
        # An input may lead to the model: a cache or a processor that knows it.
        shared: dict[int, Any] = {id(part): part for part in module.modules()}
        try:
            return copy.deepcopy((args, kwargs), shared)
        except Exception as error:  # no memory, or an object that cannot be copied
            self._explain(f"checked on inputs that the call itself may have changed: {_first_line(error)}")
            return args, kwargs

    def _reference(
        self, module: nn.Module, args: Any, kwargs: Any, compiled_peak_bytes: int | None
    ) -> _Reference | None:
        """What eager answers; None where there is no memory for it."""
        try:
            with PeakMemory() as eager_peak:
                output = _eager(module, args, kwargs)
        except torch.OutOfMemoryError as error:
            self._explain(f"not checked against eager: {_first_line(error)}")
            return None
        if compiled_peak_bytes is not None and compiled_peak_bytes > (self.report.compiled_peak_bytes or 0):
            self.report.compiled_peak_bytes = compiled_peak_bytes
            self.report.eager_peak_bytes = eager_peak.bytes
        return _Reference(output)

    def _record(self, before: CompileCounts, after: CompileCounts, seconds: float) -> None:
        report = self.report
        if after.misses > before.misses:
            self._files |= self._new_files()
        report.graphs += after.graphs - before.graphs
        report.compile_s += seconds
        if after.misses > before.misses:
            self._take_step("cold")
            self._explain("lookups found nothing")
        elif after.hits > before.hits:
            self._take_step("cached")
        else:
            self._take_step("cold")
            self._explain("torch did not look it up: its caches are off")

    def _take_step(self, step: str) -> None:
        if _LADDER.index(step) > _LADDER.index(self.report.step):
            self.report.step = step

    def _note_error(self, error: float, tolerance: float) -> None:
        self.report.relative_error = max(error, self.report.relative_error or 0.0)
        self.report.tolerance = tolerance

    def _passes(self, output: Any, reference: Any) -> bool:
        """Compare each tensor of a compiled output with eager's; on a difference, demote the region."""
        error, tolerance = largest_relative_error(output, reference)
        self._note_error(error, tolerance)
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
            self._compiled.clear()
            self._explain(f"with graph breaks: {_first_line(error)}")
            return self._call(module, *args, **kwargs)
        output = _eager(module, args, kwargs)
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            self._explain(f"eager for further shapes: {RECOMPILE_LIMIT} are compiled; set COMPILE_CACHE_DYNAMIC=auto")
            return output
        log.warning("compile.failed region=%s", self.report.name, exc_info=error)
        self._demote(f"{type(error).__name__}: {_first_line(error)}")
        return output

    def _demote(self, reason: str) -> None:
        """Serve eager from now on, and withhold what was compiled from the store."""
        self.report.step, self.report.reason = "eager", reason
        self.withheld |= self._files

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


@dataclass(frozen=True, slots=True)
class _Reference:
    """What eager answered, which may be None."""

    output: Any


# What torch raises when compiling fails, as opposed to the model's own errors.
_COMPILE_ERRORS = (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def _eager(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The call that torch makes of a module that is not compiled, hooks included."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def _give_contents(source: Any, target: Any) -> None:
    """Copy the tensors of nested inputs to those of others: what eager has made of its copies to the caller's own."""
    for right, wrong in zip(pytree.tree_leaves(source), pytree.tree_leaves(target), strict=True):
        if isinstance(wrong, torch.Tensor) and wrong is not right and wrong.shape == right.shape:
            wrong.copy_(right)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
