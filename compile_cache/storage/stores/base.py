"""The protocol of a store of packs, the table of URLs that open one, and several stores read as one.

A new kind of store needs a module here with a class that satisfies `ObjectStore`, a line in `_OPENERS`, a scheme in the
settings, and a line in the tests that all stores share (tests/test_stores.py).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Protocol, cast

from msgspec import Meta

from compile_cache.errors import ObjectNotFound, SettingsError, StoreError, redacted
from compile_cache.settings import Settings, split_url

_LATEST_S = 1 << 53

# For each scheme: the function that opens a URL, and the extra that installs its package.
_OPENERS = {
    "file": ("compile_cache.storage.stores.local:open_local", ""),
    "s3": ("compile_cache.storage.stores.s3:S3Store", "s3"),
    "gs": ("compile_cache.storage.stores.cloud:open_cloud", "clouds"),
    "az": ("compile_cache.storage.stores.cloud:open_cloud", "clouds"),
    "https": ("compile_cache.storage.stores.cloud:open_mirror", "clouds"),
    "http": ("compile_cache.storage.stores.cloud:open_mirror", "clouds"),
}


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One line of a listing. `modified_s` is the store's own clock, in seconds since 1970. Anybody may have written a
    mirror's listing, so sizes and times have limits there."""

    name: str
    size_bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    modified_s: Annotated[float, Meta(gt=-_LATEST_S, lt=_LATEST_S)]


def oldest_first(entries: Iterable[StoredObject], prefix: str) -> Sequence[StoredObject]:
    """The listing of the objects whose names begin with `prefix`."""
    found = [entry for entry in entries if entry.name.startswith(prefix)]
    return sorted(found, key=lambda entry: (entry.modified_s, entry.name))


class ReadableStore(Protocol):
    """The methods that a boot needs of a store that it reads.

    They are thread-safe, and raise only `StoreError` and its subclasses. A call to a remote store that takes longer
    than `transfer.limit_s` raises `StoreUnavailable`.
    """

    @property
    def location(self) -> str:
        """The store's path or URL for people, without secrets."""

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, oldest first."""

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """At most `size_bytes`, which are one or more, of the object's bytes, from `start` on."""


class ObjectStore(ReadableStore, Protocol):
    """A store that can also be written, under the same rules."""

    def put(self, name: str, content: Path | bytes) -> None:
        """Store an object whole or not at all. It replaces an object of the same name.

        Works while the interpreter exits, on a thread that was started earlier.
        """

    def delete(self, name: str) -> None:
        """Remove an object. A missing object is no error."""


@contextlib.contextmanager
def translated(
    what: str, kinds: tuple[type[Exception], ...], meaning: Callable[[Any], tuple[type[StoreError], str]]
) -> Iterator[None]:
    """Turn errors of these kinds into the store's errors. `meaning` has the kind of an error, and its text with advice
    for the user."""
    try:
        yield
    except kinds as error:
        kind, told = meaning(error)
        error.args = tuple(redacted(part) if isinstance(part, str) else part for part in error.args)
        raise kind(f"cannot {what}: {told}") from error


class LayeredStore:
    """Reads several stores as one: a layer in the image, a mirror, then the store that is written, `writing`, if any.

    A layer that fails is left out. `problems` says why layers were left out of the last listing.
    """

    def __init__(self, layers: Sequence[ReadableStore], writing: ObjectStore | None = None) -> None:
        self._layers = layers if writing is None else [*layers, writing]
        self.writing = writing
        self.location = " + ".join(layer.location for layer in self._layers)
        self.problems: Sequence[str] = ()
        self._origins: dict[str, ReadableStore] = {}

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, layer by layer, oldest first in each layer. An object in several
        layers is listed once, with the first layer.

        Raises:
            StoreError: no layer could be listed.
        """
        found: dict[str, StoredObject] = {}
        problems: list[StoreError] = []
        for layer in self._layers:
            try:
                entries = layer.list(prefix)
            except StoreError as error:
                problems.append(error)
                continue
            for entry in entries:
                if entry.name not in found:
                    found[entry.name] = entry
                    self._origins[entry.name] = layer
        if problems and len(problems) == len(self._layers):
            raise problems[0]
        self.problems = tuple(map(str, problems))
        return list(found.values())

    def read(self, name: str, start: int, size_bytes: int) -> bytes:
        """The object's bytes, from the layer that listed it, else from the first layer that has it.

        Raises:
            StoreError: no layer gave it. This is the error of the layer that listed the object, else of the first one.
        """
        origin = self._origins.get(name)
        failures: list[StoreError] = []
        for layer in sorted(self._layers, key=lambda layer: layer is not origin):
            try:
                return layer.read(name, start, size_bytes)
            except StoreError as error:
                failures.append(error)
        raise failures[0] if failures else ObjectNotFound(f"cannot get {name}: there are no layers")


class ReopenedStore:
    """A store that another process has opened. This one opens it when it needs it, because that can take 0.5 s."""

    def __init__(self, url: str, location: str) -> None:
        self.location = location
        self._url = url

    @functools.cached_property
    def _store(self) -> ObjectStore:
        return open_url(self._url)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # as `copy` asks for
            raise AttributeError(name)
        return getattr(self._store, name)


def open_stores(settings: Settings) -> LayeredStore:
    """The layers and the store that `settings` name. Connects to nothing yet.

    Raises:
        StoreError: an endpoint is not a URL, or credentials cannot be read.
        SettingsError: the package of a scheme is not installed.
    """
    writing = None if settings.store == "off" else open_url(settings.store)
    return LayeredStore([open_url(layer) for layer in settings.layers], writing)


def open_url(url: str) -> ObjectStore:
    """The store at a local folder, `file://`, `s3://`, `gs://`, `az://`, `https://` or `http://`. The last two can only
    be read.

    Raises:
        StoreError: the endpoint is not a URL, or credentials cannot be read.
        SettingsError: the package of the scheme is not installed.
    """
    scheme, _ = split_url(url)
    opener, extra = _OPENERS[scheme]
    try:
        return cast(ObjectStore, resolve_name(opener)(url))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise SettingsError(
            f"{scheme}:// needs the package {package}: pip install '.[{extra}]' in a checkout of cog-compile-cache"
        ) from error
