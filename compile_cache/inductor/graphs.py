"""The graphs that `torch.compile` makes of one class: one for each kind of call, or several if something breaks it.

This module imports torch's compiler.
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.utils
from torch import nn

from compile_cache.errors import first_line
from compile_cache.inductor.torch_settings import configure_torch
from compile_cache.inductor.traced import call_region


def _dynamo_errors(*names: str) -> tuple[type[Exception], ...]:
    """The named errors of Dynamo, if this torch has them."""
    found = (getattr(torch._dynamo.exc, name, None) for name in names)
    return tuple(error for error in found if error is not None)


# Dynamo raises these if the model's code breaks a graph or raises an error itself. A data-dependent branch is a
# `UserError` on torch 2.13, and `Unsupported` on 2.11.
_BREAKS = _dynamo_errors("Unsupported", "UserError")
# Words of these errors where a branch depends on the values of tensors.
_ON_DATA = re.compile(r"data[- ]dependent|\.item\b|\.tolist\b|dynamic control flow", re.IGNORECASE)
_LIMIT_ERRORS = _dynamo_errors("FailOnRecompileLimitHit")


def is_beyond_limit(error: Exception) -> bool:
    """Whether torch refuses a graph because the function has too many."""
    return isinstance(error, _LIMIT_ERRORS)


@dataclass(frozen=True, slots=True)
class Traced:
    """The graphs of one call: whether it is one, whether a branch depends on the values of tensors, and the seconds
    that tracing and compiling took. `broken_by` says what broke the graph."""

    is_whole: bool
    depends_on_data: bool
    seconds: float
    broken_by: str = ""


def trace(graphs: Graphs, copies: Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]) -> Traced:
    """Run a copy of a call by one graph, or by several if something breaks it.

    Raises:
        Exception: the model's own, or the compiler's.
    """
    started = time.perf_counter()
    try:
        graphs.run(True, *copies())
        return Traced(True, False, time.perf_counter() - started)
    except Exception as error:
        if not isinstance(error, _BREAKS):
            raise
        broken_by = first_line(error)
    counters = torch._dynamo.utils.counters["graph_break"]
    before = set(counters)
    graphs.run(False, *copies())
    reasons = (broken_by, *(set(counters) - before))
    depends = any(_ON_DATA.search(str(reason)) for reason in reasons)
    return Traced(False, depends, time.perf_counter() - started, broken_by)


class Graphs:
    """The compiled calls of one class. The first call imports the compiler."""

    def __init__(self, name: str, mode: str, dynamic: bool | None) -> None:
        self._name = f"call_{name}"
        self._options: dict[str, Any] = {"mode": None if mode == "default" else mode, "dynamic": dynamic}
        self._functions: dict[bool, Callable[..., Any]] = {}

    def run(self, is_whole: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by a graph that exists or a new one; unless it `is_whole`, by several.

        Raises:
            Exception: the model's own, or the compiler's.
        """
        configure_torch()
        return self._function(is_whole)(module, args, kwargs)

    def run_as_found(self, is_whole: bool, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by a graph that exists, else eager. This compiles nothing."""
        run = getattr(torch._dynamo, "run", None)
        return (run(self._function(is_whole)) if run else call_region)(module, args, kwargs)

    def _function(self, is_whole: bool) -> Callable[..., Any]:
        if is_whole not in self._functions:
            # Dynamo keeps a function's graphs and limits with its code object. So each class, and each way, has a copy.
            name = self._name if is_whole else f"{self._name}_in_parts"
            function = types.FunctionType(call_region.__code__.replace(co_name=name), call_region.__globals__)
            self._functions[is_whole] = torch.compile(function, fullgraph=is_whole, **self._options)
        return self._functions[is_whole]
