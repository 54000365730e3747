"""Object stores: where packs are kept.

To add one: a module here with a class that satisfies `ObjectStore`, a line in `open_url`, and one in the conformance
tests (tests/test_stores.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compile_cache.errors import SettingsError
from compile_cache.settings import PREFIX, Settings, split_url

_EXTRAS = {"s3": "s3", "gs": "clouds", "az": "clouds", "https": "web", "http": "web"}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing. `modified_s` is the store's own clock, seconds since 1970."""

    name: str
    size_bytes: int
    modified_s: float


class ObjectStore(Protocol):
    """What a cache needs of a store. Every method may be called from several threads at once, and raises `StoreError`,
    or one of its kinds, and nothing else."""

    @property
    def location(self) -> str:
        """Where it is, for people: a path or URL without secrets."""

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose name begins with `prefix`, oldest first. Complete, however many there are."""

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes from `start` on, at most `size_bytes` of them."""

    def put(self, name: str, content: Path | bytes) -> None:
        """Store an object whole, or not at all; one of the same name is replaced. Works while the interpreter exits, if
        called on a thread that was started before."""

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Store a small object unless there is one of that name; whether it was stored. A store without conditional
        writes does its best: two writers at once may both be told that they succeeded."""

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""


@dataclass(frozen=True, slots=True)
class Stores:
    """What a boot reads from, layers first, and what it writes to, if anything."""

    reading: ObjectStore
    writing: ObjectStore | None


def open_stores(settings: Settings) -> Stores:
    """The layers and the store that `settings` name. Connects to nothing yet.

    Raises:
        StoreError: an endpoint is no URL.
        SettingsError: a URL is not one of a known store, or a package that it needs is not installed.
    """
    writing = None if settings.store == "off" else open_url(settings.store, settings.s3_endpoint_url)
    layers = [open_url(layer, settings.s3_endpoint_url) for layer in settings.layers]
    if not layers and writing is not None:
        return Stores(writing, writing)
    from compile_cache.store.layered import LayeredStore

    return Stores(LayeredStore([*layers, writing] if writing is not None else layers), writing)


def open_url(url: str, s3_endpoint_url: str | None = None) -> ObjectStore:
    """The store at a local folder, `file://`, `s3://`, `gs://`, `az://`, `https://` or `http://`.

    Raises:
        StoreError: the endpoint is no URL, or credentials cannot be read.
        SettingsError: the scheme is not known, or a package that it needs is not installed.
    """
    try:
        return _open(url, s3_endpoint_url)
    except ModuleNotFoundError as error:
        scheme, _ = split_url(url)
        package = (error.name or "").partition(".")[0]
        raise SettingsError(
            f"{scheme}:// needs the package {package}: "
            f"pip install '.[{_EXTRAS[scheme]}]' in a checkout of cog-compile-cache"
        ) from error


def _open(url: str, s3_endpoint_url: str | None) -> ObjectStore:
    scheme, rest = split_url(url)
    bucket, _, prefix = rest.partition("/")
    if scheme == "file":
        from compile_cache.store.local import LocalStore

        return LocalStore(Path(rest).absolute())
    if scheme == "s3":
        from compile_cache.store.s3 import S3Store

        return S3Store(bucket, prefix.strip("/"), s3_endpoint_url)
    if scheme in ("gs", "az"):
        from compile_cache.store.cloud import open_cloud

        return open_cloud(url)
    if scheme in ("https", "http"):
        from compile_cache.store.web import WebStore

        return WebStore(url)
    raise SettingsError(f"{PREFIX}STORE={url!r}: give a local folder, s3://bucket/prefix, gs://, az:// or off")
