"""What `torch.compile` makes of one class: a graph for each kind of call, or several where something breaks it.

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

from compile_cache.aot.traced import call_region
from compile_cache.regions.inputs import kind_of_call
from compile_cache.regions.torch_settings import RECOMPILE_LIMIT, configure_torch

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
    """How a kind of call is served: by one graph, by several, or by those only that are there already, else eager."""

    WHOLE = enum.auto()
    IN_PARTS = enum.auto()
    AS_FOUND = enum.auto()


def _dynamo_errors(*names: str) -> tuple[type[Exception], ...]:
    """Those of Dynamo's errors that this torch has."""
    found = (getattr(torch._dynamo.exc, name, None) for name in names)
    return tuple(error for error in found if error is not None)


# What Dynamo raises where the model's code breaks a graph, or raises an error of its own: a data-dependent branch is a
# `UserError` on torch 2.13, and `Unsupported` on 2.11.
_BREAKS = _dynamo_errors("Unsupported", "UserError")
_LIMIT_ERRORS = _dynamo_errors("FailOnRecompileLimitHit")


class Graphs:
    """The compiled calls of one class. Nothing is compiled, nor is the compiler imported, before the first one."""

    def __init__(self, name: str, mode: str, dynamic: bool | None) -> None:
        self._name = f"call_{name}"
        self._options: dict[str, Any] = {"mode": None if mode == "default" else mode, "dynamic": dynamic}
        # By whether they are whole, and by the hooks for all modules, which torch 2.13 does not guard.
        self._functions: dict[tuple[bool, tuple[Any, ...]], Callable[..., Any]] = {}
        self._ways: dict[Hashable, _Way] = {}
        self._default = _Way.WHOLE
        self._is_plain = True  # nothing was broken or given up: no call needs its kind

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call by a graph that is there, or compile one."""
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
        """Serve a call by a graph that is there, else eager."""
        way = self._way(kind_of_call(module, args, kwargs))
        return self._without_compiling(self._function(way if way is not _Way.AS_FOUND else self._default))(
            module, args, kwargs
        )

    def knows(self, kind: Hashable) -> bool:
        """Whether calls of this kind were compiled."""
        return self._ways.get(kind, _Way.AS_FOUND) is not _Way.AS_FOUND

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember that calls of this kind are served as they are now, whatever becomes of others."""
        kind = kind_of_call(module, args, kwargs)
        self._ways[kind] = self._way(kind)

    def is_broken(self, error: Exception) -> bool:
        """Whether several graphs may serve a call that has failed with `error`; it may also be the model's own."""
        return isinstance(error, _BREAKS) and not has_begun(error)

    def break_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Serve calls of this kind, and of those that are not noted, by several graphs."""
        kind = kind_of_call(module, args, kwargs)
        self._ways[kind] = _Way.AS_FOUND if self._way(kind) is _Way.IN_PARTS else _Way.IN_PARTS
        self._default = _Way.IN_PARTS
        self._is_plain = False

    def give_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile calls of this kind no more."""
        self._ways[kind_of_call(module, args, kwargs)] = _Way.AS_FOUND
        self._is_plain = False

    def _way(self, kind: Hashable) -> _Way:
        given_up = sum(way is _Way.AS_FOUND for way in self._ways.values())
        return self._ways.get(kind, self._default if given_up < RECOMPILE_LIMIT else _Way.AS_FOUND)

    def _function(self, way: _Way) -> Callable[..., Any]:
        key = way is _Way.WHOLE, _global_hooks()
        if key not in self._functions:
            if key[1]:  # those that were made for other hooks
                self._functions = {other: made for other, made in self._functions.items() if not other[1]}
            self._functions[key] = self._compiled(fullgraph=key[0])
        return self._functions[key]

    def _compiled(self, fullgraph: bool) -> Callable[..., Any]:
        # Dynamo keeps graphs, limits, and whether it gave up, with the code of a function: each class, and each way to
        # compile it, has a copy.
        code = call_region.__code__.replace(co_name=self._name if fullgraph else f"{self._name}_in_parts")
        function = types.FunctionType(code, call_region.__globals__)
        return torch.compile(function, fullgraph=fullgraph, **self._options)


def is_beyond_limit(error: Exception) -> bool:
    """Whether torch refuses a graph because there are too many already."""
    return isinstance(error, _LIMIT_ERRORS)


def has_begun(error: Exception) -> bool:
    """Whether the traced function ran, compiled or not, before `error` was raised in it: then it may have changed the
    inputs, or anything else.

    A call that fails to compile has no frame of that function. torch cuts tracebacks, so the frames are followed back
    from the innermost one. Where torch compiled nothing at all, it says so after the call.
    """
    if "found no compiled frames" in str(error):
        return True
    code = call_region.__code__
    return any(
        frame.f_code.co_filename == code.co_filename and frame.f_code.co_firstlineno == code.co_firstlineno
        for frame in _frames(error)
    )


def was_compiling(error: Exception) -> bool:
    """Whether `error` was raised while Dynamo compiled something, and not by code that ran."""
    return any(frame.f_code.co_filename.endswith("torch/_dynamo/convert_frame.py") for frame in _frames(error))


def _frames(error: Exception) -> Iterator[types.FrameType]:
    """The frames of a traceback, and those that were cut out of it; without the one that caught it."""
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
    """The hooks that are registered for all modules."""
    return tuple(hook for hooks in _GLOBAL_HOOKS for hook in hooks.values()) if any(_GLOBAL_HOOKS) else ()
