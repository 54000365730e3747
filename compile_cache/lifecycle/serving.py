"""A boot after READY: counts what serves predictions, and swaps a language model's code between two requests."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from compile_cache.lifecycle.report import BootReport
from compile_cache.regions.counters import CompileCounts, read_counts

if TYPE_CHECKING:
    from torch import nn

    from compile_cache.regions.compiler import Compiler

log = logging.getLogger("compile_cache")


class Serving:
    """The methods of a boot for a predictor that serves. `Boot` inherits them."""

    def __init__(self, report: BootReport) -> None:
        self.report = report
        self._compiler: Compiler | None = None
        self._named: set[str] = set()
        self._counted_before = read_counts()

    def swap(self, call: Callable[[], Any]) -> bool:
        """Let arrived code serve the modules that were compiled with `until_swap`. Call it between two requests.

        `call` calls the model as in the warm-up, so that the code is compared with eager. It may leave out calls for
        which `has_arrived` is false. If `call` is broken off, for example by a cancelled request, the next swap repeats
        it. Returns whether any code had arrived.

        Raises:
            Exception: any error of `call`.
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
        """In a swap, whether code has arrived for this call but does not serve yet. Calls nothing."""
        region = self._compiler.regions.get(type(module)) if self._compiler else None
        return region is not None and region.has_arrived(module, args, kwargs)

    def prediction(self) -> Prediction:
        """A counter of the calls that serve a prediction, from now on."""
        return Prediction(self.report, self._compiler)

    def count_again(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """Add the calls that `Prediction.served` counted once more, after a replay of their recording, such as a CUDA
        graph."""
        for region in self._compiler.regions.values() if self._compiler else ():
            region.served.update(served.get(region.report.name, {}))

    @property
    def waiting(self) -> int:
        """How many kinds of calls are served eager until the second process has compiled them."""
        return self._compiler.waiting if self._compiler else 0

    def wait_compiled(self, timeout_s: float) -> bool:
        """Wait until the second process has answered for every call so far; False after `timeout_s`."""
        return self._compiler is None or self._compiler.wait(timeout_s)

    def name_demoted(self) -> None:
        """Log each region that is served eager for good, once, with the reason."""
        for region in self.report.regions:
            if region.settled == "eager" and region.name not in self._named:
                self._named.add(region.name)
                log.warning("health.demoted region=%s reason=%s", region.name, region.reason)

    def counts(self) -> CompileCounts:
        """torch's lookups and compiles since this boot began, without `kernels_compiled`."""
        return read_counts().since(self._counted_before)


class Prediction:
    """Counts calls from its creation on. Predictions at the same time count one another's calls."""

    def __init__(self, report: BootReport, compiler: Compiler | None) -> None:
        self._report = report
        self._compiler = compiler
        self._counted = read_counts()
        self._before = self._serving()
        self._waited_s = self._waiting_s()

    def metrics(self) -> dict[str, Any]:
        """Values by metric name, for `record_metric`. Four are added to the boot's own:

        - `served`: the steps that served each region's calls
        - `compiled_now`: graphs that this process compiled meanwhile
        - `waited_s`: seconds that requests waited for these
        - `compiling`: kinds of calls that the second process has not answered yet
        """
        return {
            **self._report.metrics(),
            "compile_cache.served": {name: _words(steps) for name, steps in self.served().items()},
            "compile_cache.compiled_now": read_counts().since(self._counted).graphs,
            "compile_cache.waited_s": round(self._waiting_s() - self._waited_s, 3),
            "compile_cache.compiling": self._compiler.waiting if self._compiler else 0,
        }

    def served(self) -> dict[str, Counter[str]]:
        """For each region with calls, the number of calls by the step that served them."""
        served = {name: after - self._before[name] for name, after in self._serving().items()}
        return {name: steps for name, steps in served.items() if steps}

    def _serving(self) -> dict[str, Counter[str]]:
        regions = self._compiler.regions.values() if self._compiler else ()
        return {region.report.name: Counter(region.served) for region in regions}

    def _waiting_s(self) -> float:
        return sum(region.waited_s for region in self._compiler.regions.values()) if self._compiler else 0.0


def _words(calls: Counter[str]) -> str:
    """The steps of calls in words, the most frequent first: `precompiled, eager`."""
    return ", ".join(step for step, _ in calls.most_common())
