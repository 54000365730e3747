"""Finds the attribute that keeps a call from being handed over, and names it in words."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

from compile_cache.errors import NotHandedOver, first_line

# The dictionaries in which a module keeps its parts. A path for the user leaves these names out.
_INNER = ("_parameters", "_buffers", "_modules")
_NOT_PICKLED = re.compile(r"cannot pickle '([^']+)' (?:object|instances)")


class TracingPickler(pickle._Pickler):  # type: ignore[misc, name-defined, unused-ignore]
    """Python's own pickler without C, which keeps the path: `chain` has the objects from the root to the current one.

    It is many times slower, so it is used only after a call has failed. Subclasses mix the reductions in.
    """

    def __init__(self) -> None:
        super().__init__(BytesIO(), pickle.HIGHEST_PROTOCOL)
        self.chain: list[Any] = []

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Pickle an object. A failure leaves `chain` as it was at that moment."""
        self.chain.append(obj)
        super().save(obj, save_persistent_id)  # type: ignore[misc]
        self.chain.pop()


def obstacle(pickler: TracingPickler, call: tuple[Any, Any, Any], error: Exception) -> str:
    """The attribute that cannot be handed over, and why: "attention.lock: a _thread.lock cannot be pickled".

    This pickles the call again to find the attribute. If that succeeds, the result is `error` in words.
    """
    try:
        pickler.dump(call)
    except RecursionError:
        return "it is nested too deeply"
    except Exception as repeated:
        path = _path(pickler.chain)
        return f"{path}: {_words(repeated)}" if path else _words(repeated)
    return _words(error)


def _words(error: Exception) -> str:
    if isinstance(error, NotHandedOver):
        return str(error)
    if found := _NOT_PICKLED.match(str(error)):
        return f"a {found[1]} cannot be pickled"
    return f"it cannot be pickled: {type(error).__name__}: {first_line(error)}"


def _path(chain: Sequence[Any]) -> str:
    """The attribute names from a call to the object that failed."""
    if len(chain) < 2:
        return ""
    call, start = chain[0], chain[1]
    module, args, kwargs = call
    if start is module:
        return _names(chain[1:]).lstrip(".")
    if len(chain) == 2:
        return "the inputs"
    first = next((f"input {number}" for number, value in enumerate(args) if value is chain[2]), "the inputs")
    if start is kwargs:
        first = next((f"input {name}" for name, value in kwargs.items() if value is chain[2]), "the inputs")
    return first + _names(chain[2:])


def _names(chain: Sequence[Any]) -> str:
    names = ""
    # Whether the next object, a dictionary or a tuple, is the state of another object.
    is_state = False
    for parent, child in pairwise(chain):
        if isinstance(parent, dict):
            key = next((key for key, value in parent.items() if value is child), None)
            is_inner = is_state and key in _INNER
            if key is not None and not is_inner:
                names += f".{key}" if is_state else f"[{key!r}]"
            is_state = is_inner
        elif isinstance(parent, list | tuple):
            if not is_state:
                names += next((f"[{number}]" for number, value in enumerate(parent) if value is child), "")
            is_state = is_state and isinstance(child, dict)
        else:
            is_state = True
    return names
