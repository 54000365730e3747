"""Functions that prepare a process to compile a model: they register attention interfaces, or set passes over graphs.

A model family registers them. Its own set-up calls them, and so does the compiling process, before anything else. This
module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from compile_cache.background.portable import pack, reference, resolve, unpack
from compile_cache.errors import StateNotMade


@dataclass(frozen=True, slots=True)
class Preparation:
    """A function's name, `module:qualified.name`, and its pickled positional arguments."""

    function: str
    arguments: bytes


_registered: dict[Preparation, None] = {}
# Set where torch's own context variables are: on torch 2.13 an option holds in one thread.
_RUN: ContextVar[frozenset[Preparation]] = ContextVar("compile_cache_preparations", default=frozenset())


def prepare_with(function: Callable[..., None], *arguments: Any) -> None:
    """Have the compiling process call `function` before it compiles anything: once in each thread that compiles.

    The same function with the same arguments is registered once. It is not called here.

    Raises:
        StateNotTaken: another process cannot import the function, or the arguments cannot be pickled.
    """
    name = reference(function)
    _registered[Preparation(name, pack(arguments, f"the arguments of {name}"))] = None


def registered() -> tuple[Preparation, ...]:
    """What was registered, in order."""
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
            resolve(each.function)(*unpack(each.arguments))
        except Exception as error:  # a model family's own code
            raise StateNotMade(f"{each.function} failed: {type(error).__name__}: {error}") from error
        _RUN.set(_RUN.get() | {each})
