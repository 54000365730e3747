"""Object stores: where packs are kept.

To add one: a module here with a class that satisfies `ObjectStore`, and a line in `open_store`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compile_cache.errors import SettingsError
from compile_cache.settings import PREFIX, Settings


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

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no error."""


def open_store(settings: Settings) -> ObjectStore:
    """The store that `COMPILE_CACHE_STORE` names: `s3://bucket/prefix`, or a local folder. Connects to nothing yet.

    Raises:
        StoreError: the endpoint is no URL.
        SettingsError: the URL's scheme is not known, which `Settings` refuses first.
    """
    scheme, separator, rest = settings.store.partition("://")
    if not separator or scheme == "file":
        from compile_cache.store.local import LocalStore

        return LocalStore(Path(rest if separator else settings.store).absolute())
    if scheme == "s3":
        from compile_cache.store.s3 import S3Store

        bucket, _, prefix = rest.partition("/")
        return S3Store(bucket, prefix.strip("/"), settings.s3_endpoint_url)
    raise SettingsError(f"{PREFIX}STORE={settings.store!r}: give a local folder or s3://bucket/prefix")
