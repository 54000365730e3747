"""The graphs that `torch.compile` makes of one class: one for each kind of call, or several if something breaks it.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch.nn.modules.module as torch_module
from torch import nn

from compile_cache.aot.options import RECOMPILE_LIMIT
from compile_cache.aot.traced import call_region
from compile_cache.regions.inputs import kind_of_call
from compile_cache.regions.torch_settings import configure_torch

_GLOBAL_HOOKS = tuple(
    getattr(torch_module, name, {})
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)


class _Way(enum.Enum):
    """How a kind of call is served: by one graph, by several, or only by graphs that exist already."""

    WHOLE = enum.auto()
    IN_PARTS = enum.auto()
    AS_FOUND = enum.auto()


def _dynamo_errors(*names: str) -> tuple[type[Exception], ...]:
    """The named errors of Dynamo, if this torch has them."""
    found = (getattr(torch._dynamo.exc, name, None) for name in names)
    return tuple(error for error in found if error is not None)


# Dynamo raises these if the model's code breaks a graph or raises an error itself. A data-dependent branch is a
# `UserError` on torch 2.13, and `Unsupported` on 2.11.
_BREAKS = _dynamo_errors("Unsupported", "UserError")
_LIMIT_ERRORS = _dynamo_errors("FailOnRecompileLimitHit")


class Graphs:
    """The compiled calls of one class. The first call imports the compiler."""

    def __init__(self, name: str, mode: str, dynamic: bool | None) -> None:
        self._name = f"call_{name}"
        self._options: dict[str, Any] = {"mode": None if mode == "default" else mode, "dynamic": dynamic}
        # The key: whether the graph is whole, and the hooks for all modules, which torch 2.13 does not guard.
        self._functions: dict[tuple[bool, tuple[Any, ...]], Callable[..., Any]] = {}
        self._ways: dict[Hashable, _Way] = {}
        self._default = _Way.WHOLE
        self._is_plain = True  # no kind was broken up or given up, so a call need not know its kind

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call by a graph that exists or a new one."""
        configure_torch()
        way = self._default if self._is_plain else self._way(kind_of_call(module, args, kwargs))
        function = self._function(way if way is not _Way.AS_FOUND else self._default)
        if way is _Way.AS_FOUND:
            function = self._without_compiling(function)
        return function(module, args, kwargs)

    @staticmethod
    def _without_compiling(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch._dynamo.run(function) if hasattr(torch._dynamo, "run") else call_region

    def as_found(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call by a graph that exists, else eager."""
        way = self._way(kind_of_call(module, args, kwargs))
        return self._without_compiling(self._function(way if way is not _Way.AS_FOUND else self._default))(
            module, args, kwargs
        )

    def knows(self, kind: Hashable) -> bool:
        """Whether calls of this kind were compiled."""
        return self._ways.get(kind, _Way.AS_FOUND) is not _Way.AS_FOUND

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep serving calls of this kind as now, even if other kinds change."""
        kind = kind_of_call(module, args, kwargs)
        self._ways[kind] = self._way(kind)

    def is_broken(self, error: Exception) -> bool:
        """Whether several graphs may serve a call that failed with `error`. `error` may also be the model's own."""
        return isinstance(error, _BREAKS) and not has_begun(error)

    def break_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Serve calls of this kind by several graphs, and calls of kinds that `note` never got."""
        kind = kind_of_call(module, args, kwargs)
        self._ways[kind] = _Way.AS_FOUND if self._way(kind) is _Way.IN_PARTS else _Way.IN_PARTS
        self._default = _Way.IN_PARTS
        self._is_plain = False

    def give_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stop compiling calls of this kind."""
        self._ways[kind_of_call(module, args, kwargs)] = _Way.AS_FOUND
        self._is_plain = False

    def _way(self, kind: Hashable) -> _Way:
        given_up = sum(way is _Way.AS_FOUND for way in self._ways.values())
        return self._ways.get(kind, self._default if given_up < RECOMPILE_LIMIT else _Way.AS_FOUND)

    def _function(self, way: _Way) -> Callable[..., Any]:
        key = way is _Way.WHOLE, _global_hooks()
        if key not in self._functions:
            if key[1]:  # drop the functions for other hooks
                self._functions = {other: made for other, made in self._functions.items() if not other[1]}
            self._functions[key] = self._compiled(fullgraph=key[0])
        return self._functions[key]

    def _compiled(self, fullgraph: bool) -> Callable[..., Any]:
        # Dynamo keeps a function's graphs and limits with its code object. So each class, and each way, has a copy.
        code = call_region.__code__.replace(co_name=self._name if fullgraph else f"{self._name}_in_parts")
        function = types.FunctionType(code, call_region.__globals__)
        return torch.compile(function, fullgraph=fullgraph, **self._options)


def is_beyond_limit(error: Exception) -> bool:
    """Whether torch refuses a graph because the function has too many."""
    return isinstance(error, _LIMIT_ERRORS)


def has_begun(error: Exception) -> bool:
    """Whether the traced function had begun to run when `error` was raised. Then it may have changed its inputs.

    A call that fails to compile has no frame of that function. torch cuts tracebacks, so this follows the frames back
    from the innermost. If torch compiled nothing at all, it says so after the call.
    """
    if "found no compiled frames" in str(error):
        return True
    code = call_region.__code__
    return any(
        frame.f_code.co_filename == code.co_filename and frame.f_code.co_firstlineno == code.co_firstlineno
        for frame in _frames(error)
    )


def was_compiling(error: Exception) -> bool:
    """Whether Dynamo raised `error` while it compiled, and not code that ran."""
    return any(frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py") for frame in _frames(error))


def _frames(error: Exception) -> Iterator[types.FrameType]:
    """The frames of a traceback, with those cut out of it, without the frame that caught the error."""
    traceback = error.__traceback__
    if traceback is None:
        return
    outermost = innermost = traceback.tb_frame
    while traceback := traceback.tb_next:
        innermost = traceback.tb_frame
        yield innermost
    frame: types.FrameType | None = innermost
    while frame is not None and frame is not outermost:
        yield frame
        frame = frame.f_back


def _global_hooks() -> tuple[Any, ...]:
    """The hooks registered for all modules."""
    return tuple(hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()) if any(_GLOBAL_HOOKS) else ()
