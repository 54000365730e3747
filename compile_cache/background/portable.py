"""Pickles values for the compiling process: functions and classes by name, everything else by value.

This module imports no torch.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable
from typing import Any

from compile_cache import importable
from compile_cache.errors import StateNotTaken


class _Pickler(pickle.Pickler):
    """Refuses functions and classes that only this process can import."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, type | types.FunctionType) and (reason := importable.why_not(value.__module__)):
            raise pickle.PicklingError(f"{value!r}: {reason}")
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
    try:
        name = importable.reference(function)
        if reason := importable.why_not(function.__module__):
            raise LookupError(f"{name}: {reason}")
    except LookupError as error:
        raise StateNotTaken(
            f"the compiling process cannot import {error}. Define the function at the top level of a module that can "
            "be imported."
        ) from error
    return name
