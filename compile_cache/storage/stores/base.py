"""The protocol of a store of packs, and the table of URLs that open one.

A new kind of store needs a module here with a class that satisfies `ObjectStore`, a line in `_OPENERS`, a scheme in the
settings, and a line in the tests that all stores share (tests/test_stores.py).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Protocol, cast

from compile_cache.errors import SettingsError, StoreAccessDenied
from compile_cache.settings import PREFIX, Settings, split_url, without_user

# For each scheme: the function that opens a URL, and the extra that installs its package.
_OPENERS = {
    "file": ("compile_cache.storage.stores.local:open_local", ""),
    "s3": ("compile_cache.storage.stores.s3:open_s3", "s3"),
    "gs": ("compile_cache.storage.stores.cloud:open_cloud", "clouds"),
    "az": ("compile_cache.storage.stores.cloud:open_cloud", "clouds"),
    "https": ("compile_cache.storage.stores.cloud:open_mirror", "clouds"),
    "http": ("compile_cache.storage.stores.cloud:open_mirror", "clouds"),
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing. `modified_s` is the store's own clock, in seconds since 1970."""

    name: str
    size_bytes: int
    modified_s: float


class ObjectStore(Protocol):
    """The methods that a cache needs of a store.

    They are thread-safe, and raise only `StoreError` and its subclasses. A call to a remote store that takes longer
    than `transfer.limit_s` raises `StoreUnavailable`.
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

    def delete(self, name: str) -> None:
        """Refused."""
        raise self._refusal("delete", name)

    def _refusal(self, verb: str, name: str) -> StoreAccessDenied:
        return StoreAccessDenied(f"cannot {verb} {name}: {self.location} is only read; set COMPILE_CACHE_STORE")


def open_stores(settings: Settings) -> Stores:
    """The layers and the store that `settings` name. Connects to nothing yet.

    Raises:
        StoreError: an endpoint is not a URL, or credentials cannot be read.
        SettingsError: the scheme of a URL is unknown, or the scheme's package is not installed.
    """
    from compile_cache.storage.stores.layered import LayeredStore

    writing = None if settings.store == "off" else open_url(settings.store)
    layers = [open_url(layer) for layer in settings.layers]
    if not layers and writing is not None:
        return Stores(writing, writing)
    return Stores(LayeredStore([*layers, writing] if writing is not None else layers), writing)


def open_url(url: str) -> ObjectStore:
    """The store at a local folder, `file://`, `s3://`, `gs://`, `az://`, `https://` or `http://`.

    Raises:
        StoreError: the endpoint is not a URL, or credentials cannot be read.
        SettingsError: the scheme is unknown, or the scheme's package is not installed.
    """
    scheme, _ = split_url(url)
    if scheme not in _OPENERS:
        raise SettingsError(
            f"{PREFIX}STORE={without_user(url)!r}: give a local folder, s3://bucket/prefix, gs://, az:// or off"
        )
    opener, extra = _OPENERS[scheme]
    try:
        return cast(ObjectStore, resolve_name(opener)(url))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise SettingsError(
            f"{scheme}:// needs the package {package}: pip install '.[{extra}]' in a checkout of cog-compile-cache"
        ) from error
