"""A boot after READY: predictions, between which new code is taken, and what serves them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from compile_cache.inductor.counters import CompileCounts, read_counts
from compile_cache.lifecycle.report import BootReport

if TYPE_CHECKING:
    from compile_cache.serving.compiler import Compiler

log = logging.getLogger("compile_cache")


class Serving:
    """The methods of a boot for a predictor that serves. `Boot` inherits them."""

    def __init__(self, report: BootReport) -> None:
        self.report = report
        self._compiler: Compiler | None = None
        self._named: set[str] = set()
        self._counted_before = read_counts()

    def prediction(self) -> Prediction:
        """A prediction: use it as a context manager around the work of one. It counts its calls from now on."""
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
    """One prediction. New code is taken when a prediction begins while none is open, so that it has one code.

    It counts calls from its creation on. Predictions at the same time count one another's calls.

    `has_new_code`: calls may be served by other code than in the prediction before, or are compared with it. A
    predictor that has recorded its calls, such as in CUDA graphs, drops the recordings then, calls the modules with its
    own inputs, and records them again.
    """

    def __init__(self, report: BootReport, compiler: Compiler | None) -> None:
        self._report = report
        self._compiler = compiler
        self.has_new_code = False
        self.count_from_now()

    def count_from_now(self) -> None:
        """Leave out the calls so far, such as those that were made to record calls again."""
        self._counted = read_counts()
        self._before = self._serving()
        self._waited_s = self._waiting_s()

    def __enter__(self) -> Prediction:
        if self._compiler is not None:
            self.has_new_code = self._compiler.moment.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._compiler is not None:
            self._compiler.moment.end(is_complete=kind is None, had_new_code=self.has_new_code)

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
