"""The warm-up: run every planned input like a prediction, until nothing more compiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from compile_cache import Boot


class WarmUpModel(Protocol):
    """A model of any family: the part that the warm-up needs."""

    def run(self, inputs: Any) -> Any:
        """One prediction."""


def warm_up(boot: Boot, model: WarmUpModel, plan: Sequence[Any]) -> None:
    """Run the whole plan as one warm-up.

    `boot` repeats the plan if something was compiled, because a later input can make an earlier one compile again.
    """
    boot.warm_up(lambda: [model.run(inputs) for inputs in plan])
