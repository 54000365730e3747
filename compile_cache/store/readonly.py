"""Stores that are only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compile_cache.errors import StoreAccessDenied
from compile_cache.store.base import ObjectStore, StoredObject


class ReadOnly:
    """The half of `ObjectStore` that a store which is only read refuses."""

    @property
    def location(self) -> str:
        """Where it is, for people."""
        raise NotImplementedError

    def put(self, name: str, content: Path | bytes) -> None:
        """Refused."""
        raise self._refusal("put", name)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Refused."""
        raise self._refusal("put", name)

    def delete(self, name: str) -> None:
        """Refused."""
        raise self._refusal("delete", name)

    def _refusal(self, verb: str, name: str) -> StoreAccessDenied:
        return StoreAccessDenied(f"cannot {verb} {name}: {self.location} is only read; set COMPILE_CACHE_STORE")


class ReadOnlyStore(ReadOnly):
    """Another store, of which nothing is changed."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def location(self) -> str:
        """The other store's."""
        return self._store.location

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose name begins with `prefix`, oldest first."""
        return self._store.list(prefix)

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them."""
        return self._store.read(name, start, size_bytes)
