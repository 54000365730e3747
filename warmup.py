"""The warm-up: run every planned input as predictions run, until nothing compiles any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from compile_cache import Boot


class WarmUpModel(Protocol):
    """What the warm-up needs of a model of any family."""

    def run(self, inputs: Any) -> Any:
        """One prediction."""


def warm_up(boot: Boot, model: WarmUpModel, plan: Sequence[Any]) -> None:
    """Run the whole plan as one warm-up: `boot` repeats it if something was compiled, because a later input can make an
    earlier one compile again."""
    boot.warm_up(lambda: [model.run(inputs) for inputs in plan])
