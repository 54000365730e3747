"""A prediction: new code is taken between two of them, and the calls in it are counted."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from compile_cache.inductor.counters import read_counts
from compile_cache.lifecycle.boot_report import BootReport

if TYPE_CHECKING:
    from compile_cache.serving.regions import Regions


class Prediction:
    """One prediction. New code is taken when a prediction begins while none is open, so that it has one code.

    It counts calls from its creation on. Predictions at the same time count one another's calls.

    `has_new_code`: calls may be served by other code than in the prediction before, or are compared with it. A
    predictor that has recorded its calls, such as in CUDA graphs, drops the recordings then, calls the modules with its
    own inputs, and records them again.
    """

    def __init__(self, report: BootReport, regions: Regions | None) -> None:
        self._report = report
        self._regions = regions
        self.has_new_code = False
        self.count_from_now()

    def count_from_now(self) -> None:
        """Leave out the calls so far, such as those that were made to record calls again."""
        self._counted = read_counts()
        self._before = self._serving()

    def __enter__(self) -> Prediction:
        if self._regions is not None:
            self.has_new_code = self._regions.supply.moment.begin(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._regions is not None:
            self._regions.supply.moment.end(self, is_complete=kind is None)

    def metrics(self) -> dict[str, Any]:
        """Values by metric name, for `record_metric`. Three are added to the boot's own:

        - `served`: the steps that served each region's calls
        - `compiled_now`: graphs that this process compiled meanwhile, for a `torch.compile` of the program's own
        - `compiling`: kinds of calls that wait for the second process, or for their functions' load after READY
        """
        # The most frequent step first: `precompiled, eager`.
        served = {name: ", ".join(step for step, _ in steps.most_common()) for name, steps in self.served().items()}
        return {
            **self._report.metrics(),
            "compile_cache.served": served,
            "compile_cache.compiled_now": read_counts().since(self._counted).graphs,
            "compile_cache.compiling": self._regions.supply.waiting if self._regions else 0,
        }

    def served(self) -> dict[str, Counter[str]]:
        """For each region with calls, the number of calls by the step that served them."""
        served = {name: after - self._before.get(name, Counter()) for name, after in self._serving().items()}
        return {name: steps for name, steps in served.items() if steps}

    def _serving(self) -> dict[str, Counter[str]]:
        regions = self._regions.by_class.values() if self._regions else ()
        return {region.report.name: Counter(region.served) for region in regions}
