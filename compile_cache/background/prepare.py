"""Functions that prepare a process to compile a model, such as one that registers an attention interface.

A model family registers them here and calls them in its own set-up. The compiling process calls them before it
compiles. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from compile_cache.background.portable import pack, reference, unpack
from compile_cache.errors import StateNotMade
from compile_cache.importable import find


@dataclass(frozen=True, slots=True)
class Preparation:
    """A function's name, `module:qualified.name`, and its pickled positional arguments."""

    function: str
    arguments: bytes


_registered: dict[Preparation, None] = {}
# A context variable, as torch's options are: on torch 2.13 an option holds in one thread only.
_RUN: ContextVar[frozenset[Preparation]] = ContextVar("compile_cache_preparations", default=frozenset())


def prepare_with(function: Callable[..., None], *arguments: Any) -> None:
    """Register `function`: the compiling process calls it once in each thread, before that thread compiles.

    The same function with the same arguments is registered once. This process does not call it.

    Raises:
        StateNotTaken: another process cannot import the function, or the arguments cannot be pickled.
    """
    name = reference(function)
    _registered[Preparation(name, pack(arguments, f"the arguments of {name}"))] = None


def registered() -> tuple[Preparation, ...]:
    """The registered preparations, in order."""
    return tuple(_registered)


def run_once(preparations: Iterable[Preparation]) -> None:
    """Call the functions that this thread has not called yet, in order.

    Raises:
        StateNotMade: a function cannot be imported here, or fails.
    """
    for each in preparations:
        if each in _RUN.get():
            continue
        try:
            find(each.function)(*unpack(each.arguments))
        except Exception as error:  # a model family's own code
            raise StateNotMade(f"{each.function} failed: {type(error).__name__}: {error}") from error
        _RUN.set(_RUN.get() | {each})
