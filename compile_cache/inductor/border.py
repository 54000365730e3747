"""The border of a region's call: here an exception becomes a value, and the call gets slower instead of failing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from compile_cache.errors import CompileCacheError, first_line

log = logging.getLogger("compile_cache")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that a step raised."""

    error: Exception

    @property
    def reason(self) -> str:
        """The error's first line, after its type if that says more."""
        line = first_line(self.error)
        return line if isinstance(self.error, CompileCacheError) else f"{type(self.error).__name__}: {line}"


def attempt(step: Callable[..., _Result], *inputs: Any) -> _Result | Failure:
    """The result of a step that a call does not need, or its `Failure`: no memory, a full disk, an unforeseen input."""
    try:
        return step(*inputs)
    except Exception as error:
        is_known = isinstance(error, CompileCacheError)
        name = getattr(step, "__qualname__", step)
        log.info("region.failed step=%s error=%r", name, error, exc_info=None if is_known else error)
        return Failure(error)
