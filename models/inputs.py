"""The valid values of a prediction's inputs.

Cog validates inputs by its schema before it calls `run()`. A predictor without that schema, for example in a server
started by hand, gets unchecked inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST_SEED = 4294967295
_KIND_NAMES = {int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The valid values of one input: texts, or numbers from `least` to `most`, both included."""

    kind: type[int] | type[float] | type[str]
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    is_optional: bool = False

    def allow(self, value: Any) -> bool:
        """Whether an input may be `value`."""
        if value is None:
            return self.is_optional
        if not isinstance(value, (int, float) if self.kind is float else self.kind) or isinstance(value, bool):
            return False
        if self.choices:
            return value in self.choices
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        """`a whole number from 1 to 8`."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        least = "" if self.least is None else f" from {self.least}"
        return f"{_KIND_NAMES[self.kind]}{least}" + ("" if self.most is None else f" to {self.most}")


def check_inputs(inputs: object, bounds: Mapping[str, Bounds]) -> None:
    """Check the attributes of `inputs` that are named in `bounds`.

    Raises:
        ValueError: an input is out of its bounds. The message names each such input.
    """
    given = {name: getattr(inputs, name) for name in bounds}
    wrong = [
        f"{name} is {given[name]!r}; give {bound}" for name, bound in bounds.items() if not bound.allow(given[name])
    ]
    if wrong:
        raise ValueError("\n".join(wrong))
