"""A boot after READY: what serves each prediction, and the swap of a language model's code between two requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from compile_cache.lifecycle.report import BootReport
from compile_cache.regions.counters import CompileCounts, read_counts

if TYPE_CHECKING:
    from torch import nn

    from compile_cache.lifecycle.prediction import Prediction
    from compile_cache.regions.compiler import Compiler

log = logging.getLogger("compile_cache")


class Serving:
    """What a predictor asks of its boot while it serves. `Boot` is one."""

    def __init__(self, report: BootReport) -> None:
        self.report = report
        self._compiler: Compiler | None = None
        self._named: set[str] = set()
        self._counted_before = read_counts()

    def swap(self, call: Callable[[], Any]) -> bool:
        """Between two requests, let code serve that has arrived for a module compiled with `until_swap`. The model is
        then called as in the warm-up, so that the code is compared with eager. Returns whether any had arrived.

        `call` may leave out what `has_arrived` denies. If it is broken off, as by the request's cancellation, the next
        swap calls again.

        Raises:
            Exception: every error of `call`.
        """
        if self._compiler is None or not self._compiler.begin_swap():
            return False
        try:
            with self._compiler.watching(may_compile=False):
                call()
        except Exception:  # a cancelled request raises a BaseException
            self._compiler.end_swap()
            raise
        self._compiler.end_swap()
        return True

    def has_arrived(self, module: nn.Module, *args: Any, **kwargs: Any) -> bool:
        """In a swap: whether code for this call has arrived that does not serve yet. Calls nothing."""
        region = self._compiler.regions.get(type(module)) if self._compiler else None
        return region is not None and region.has_arrived(module, args, kwargs)

    def prediction(self) -> Prediction:
        """Begin to count what serves a prediction."""
        from compile_cache.lifecycle.prediction import Prediction

        return Prediction(self.report, self._compiler)

    def count_again(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """Count calls once more, as `Prediction.served` has counted them: a recording of them, such as a CUDA graph,
        was replayed."""
        for region in self._compiler.regions.values() if self._compiler else ():
            region.served.update(served.get(region.report.name, {}))

    @property
    def waiting(self) -> int:
        """Kinds of calls that are served eager until the second process has compiled them."""
        return self._compiler.waiting if self._compiler else 0

    def wait_compiled(self, timeout_s: float) -> bool:
        """Block until the second process has answered for every call so far; False after `timeout_s`."""
        return self._compiler is None or self._compiler.wait(timeout_s)

    def name_demoted(self) -> None:
        """Log each region that is served eager for good, and why, once."""
        for region in self.report.regions:
            if region.settled == "eager" and region.name not in self._named:
                self._named.add(region.name)
                log.warning("health.demoted region=%s reason=%s", region.name, region.reason)

    def counts(self) -> CompileCounts:
        """torch's lookups and compiles since this boot began, without `kernels_compiled`."""
        return read_counts().since(self._counted_before)
