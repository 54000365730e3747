"""The protocol of a store of packs. `opening` makes a store from a URL.

A new kind of store needs a module here with a class that satisfies `ObjectStore`, a line in `opening`, and a line in
the tests that all stores share (tests/test_stores.py).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compile_cache.errors import StoreAccessDenied


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing. `modified_s` is the store's own clock, in seconds since 1970."""

    name: str
    size_bytes: int
    modified_s: float


class ObjectStore(Protocol):
    """The methods that a cache needs of a store.

    They are thread-safe, and raise only `StoreError` and its subclasses. A call to a remote store that takes longer
    than `deadline.limit_s` raises `StoreUnavailable`.
    """

    @property
    def location(self) -> str:
        """The store's path or URL for people, without secrets."""

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, oldest first."""

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """At most `size_bytes` of the object's bytes, from `start` on."""

    def put(self, name: str, content: Path | bytes) -> None:
        """Store an object whole or not at all. It replaces an object of the same name.

        Works while the interpreter exits, on a thread that was started earlier.
        """

    def put_if_absent(self, name: str, content: bytes) -> None:
        """Store a small object, unless its name is taken. Read it back to see who won: without conditional writes in
        the store, two writers at once may both store one."""

    def delete(self, name: str) -> None:
        """Remove an object. A missing object is no error."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The store that a boot reads, with all its layers, and the store that it writes, if any."""

    reading: ObjectStore
    writing: ObjectStore | None


class ReadOnly(abc.ABC):
    """The writing half of `ObjectStore` for a read-only store: it refuses."""

    @property
    @abc.abstractmethod
    def location(self) -> str:
        """The store's path or URL for people."""

    def put(self, name: str, content: Path | bytes) -> None:
        """Refused."""
        raise self._refusal("put", name)

    def put_if_absent(self, name: str, content: bytes) -> None:
        """Refused."""
        raise self._refusal("put", name)

    def delete(self, name: str) -> None:
        """Refused."""
        raise self._refusal("delete", name)

    def _refusal(self, verb: str, name: str) -> StoreAccessDenied:
        return StoreAccessDenied(f"cannot {verb} {name}: {self.location} is only read; set COMPILE_CACHE_STORE")
