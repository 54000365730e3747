"""Pickles values for the compiling process: functions and classes by name, everything else by value.

This module imports no torch.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
import types
from collections.abc import Callable
from importlib import import_module
from typing import Any

from compile_cache.errors import StateNotTaken


class _Pickler(pickle.Pickler):
    """Refuses functions and classes that only this process can import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType):
            check_module(value.__module__)
        return NotImplemented


def pack(value: Any, name: str) -> bytes:
    """`value`, pickled for another process. An error calls it `name`.

    Raises:
        StateNotTaken: `value` cannot be pickled, or another process cannot import a part of it.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:  # whatever a value's own __reduce__ raises
        raise StateNotTaken(
            f"{name} cannot be handed to the compiling process: {error}. Define functions and classes at the top "
            "level of a module that can be imported."
        ) from error
    return buffer.getvalue()


def unpack(packed: bytes) -> Any:
    """The value that `pack` pickled. Imports the modules of its functions and classes.

    Raises:
        Exception: any, if a module cannot be imported or a value cannot be built.
    """
    return pickle.loads(packed)


def reference(function: Callable[..., Any]) -> str:
    """`module:qualified.name` of a function that another process can import.

    Raises:
        StateNotTaken: the function has no such name.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    try:
        if not module or not name:
            raise ValueError(f"{function!r} has no name")
        check_module(module)
        if resolve(f"{module}:{name}") is not function:
            raise ValueError(f"{module}:{name} is another object")
    except Exception as error:  # whatever the lookup of a module meets
        raise StateNotTaken(
            f"the compiling process cannot import {module}:{name}: {error}. Define the function at the top level of a "
            "module that can be imported."
        ) from error
    return f"{module}:{name}"


def resolve(reference: str) -> Any:
    """The object with this name.

    Raises:
        Exception: any, if the module cannot be imported or has no such name.
    """
    module, _, name = reference.partition(":")
    return operator.attrgetter(name)(import_module(module))


def check_module(name: str) -> None:
    """Check that another process can find a module. This process may have made a module of that name itself.

    Raises:
        ImportError: another process cannot find it.
    """
    parent = name.rpartition(".")[0]
    if parent:
        check_module(parent)
    path = sys.modules[parent].__path__ if parent else None
    finders = [finder.find_spec for finder in sys.meta_path if hasattr(finder, "find_spec")]
    if name == "__main__" or all(find(name, path) is None for find in finders):
        raise ImportError(f"no module {name} can be imported by another process", name=name)
