"""What a store of packs is. `opening` makes one from a URL.

To add a kind of store: a module here with a class that satisfies `ObjectStore`, a line in `opening`, and a line in the
tests that all stores share (tests/test_stores.py).
"""

from __future__ import annotations

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
    """What a cache needs of a store.

    Several threads may call each method at once. The methods raise `StoreError` and its subclasses only. No call to a
    remote store takes longer than `deadline.limit_s` allows; a call that does raises `StoreUnavailable`.
    """

    @property
    def location(self) -> str:
        """Where the store is, for people: a path or a URL, without secrets."""

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose name begins with `prefix`, oldest first, however many there are."""

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them."""

    def put(self, name: str, content: Path | bytes) -> None:
        """Store an object whole or not at all. It replaces an object of the same name.

        Works while the interpreter exits, on a thread that was started before.
        """

    def put_if_absent(self, name: str, content: bytes) -> None:
        """Store a small object, unless one of that name is there. Read it back to see whose it is: two writers at once
        may both store one where the store has no conditional writes."""

    def delete(self, name: str) -> None:
        """Remove an object. A missing one is no error."""


@dataclass(frozen=True, slots=True)
class Stores:
    """The store that a boot reads, with all layers, and the store that it writes, if any."""

    reading: ObjectStore
    writing: ObjectStore | None


class ReadOnly:
    """The half of `ObjectStore` that a store without writes refuses."""

    @property
    def location(self) -> str:
        """Where the store is, for people."""
        raise NotImplementedError

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
