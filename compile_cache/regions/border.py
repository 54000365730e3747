"""The border at which what fails in a region's call becomes a value, and so a slower call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from compile_cache.errors import CompileCacheError

log = logging.getLogger("compile_cache")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """What a step has raised."""

    error: Exception

    @property
    def reason(self) -> str:
        """The error's first line, with its type where that says more."""
        line = first_line(self.error)
        return line if isinstance(self.error, CompileCacheError) else f"{type(self.error).__name__}: {line}"


def attempt(step: Callable[..., _Result], *inputs: Any) -> _Result | Failure:
    """The result of a step that a call can do without: a full disk, no memory, an input that nobody has thought of."""
    try:
        return step(*inputs)
    except Exception as error:
        log.info("region.failed step=%s error=%r", getattr(step, "__qualname__", step), error, exc_info=error)
        return Failure(error)


def first_line(error: BaseException) -> str:
    """An error's message, for a line of a report."""
    lines = [*filter(None, map(str.strip, str(error).splitlines())), type(error).__name__]
    # Dynamo says which back end has failed, and in the next line how.
    return " ".join(lines[: 2 if lines[0].endswith("raised:") else 1])[:300]
