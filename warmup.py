"""The warm-up: run every planned input like a prediction, until nothing more compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from compile_cache import Boot


def warm_up(boot: Boot, run: Callable[[Any], Any], plan: Sequence[Any]) -> None:
    """Run the whole plan as one warm-up. `run` is one prediction of a model of any family.

    `boot` repeats the plan if something was compiled, because a later input can make an earlier one compile again.
    """
    boot.warm_up(lambda: [run(inputs) for inputs in plan])
