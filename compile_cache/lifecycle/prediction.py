"""A prediction: new code is taken between two of them, and the calls in it are counted. And the call of a warm-up,
which is made as Cog makes a prediction: with the inputs' defaults, and to the end of a stream."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
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


def call_as_cog(call: Callable[..., Any], inputs: Mapping[str, Any]) -> None:
    """Call `call` with `inputs`, and with the default of each other parameter that Cog's `Input()` declares. Take all
    pieces of a stream, and await what is asynchronous, on a thread of its own if the caller's runs an event loop.

    Raises:
        Exception: any error of `call`, with a note if an input that was not given may be the cause.
    """
    defaults = {name: default for name, default in _declared(call).items() if name not in inputs}
    try:
        answer = call(**defaults, **inputs)
        if inspect.isgenerator(answer):
            for _ in answer:
                pass
        elif inspect.iscoroutine(answer) or inspect.isasyncgen(answer):
            import asyncio
            from concurrent.futures import ThreadPoolExecutor

            from compile_cache.calls.caller import Caller

            if asyncio._get_running_loop() is None:
                with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # the thread keeps its own loop
                    runner.run(_end(answer))
            else:
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(Caller().run, partial(asyncio.run, _end(answer))).result()
    except Exception as error:
        if missing := [name for name, default in defaults.items() if default is None]:
            error.add_note(
                f"The warm-up called it with {'=None, '.join(missing)}=None. If it needs one of them, give it: "
                f"boot.warm_up(self.{getattr(call, '__name__', 'run')}, {missing[0]}=…)."
            )
        if (kind := _input_class()) and kind.__name__ in str(error):
            error.add_note(
                "The warm-up called it without all inputs, which are Cog's Input() objects then. Write "
                'boot.warm_up(self.run, prompt="…"), which gives the other inputs their defaults.'
            )
        raise


def _declared(call: Callable[..., Any]) -> dict[str, Any]:
    """The defaults of the parameters that Cog's `Input()` declares."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return {}
    kind = _input_class()
    return {p.name: p.default.default for p in parameters if kind and isinstance(p.default, kind)}


def _input_class() -> Any:
    """The class of what Cog's `Input()` returns, which has no public name; None without Cog."""
    cog: Any = sys.modules.get("cog")
    return type(cog.Input()) if hasattr(cog, "Input") else None


async def _end(answer: Any) -> None:
    if inspect.isasyncgen(answer):
        async for _ in answer:
            pass
    else:
        await answer
