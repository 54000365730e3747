"""Reads several stores as one: a layer in the image, a mirror, then the store that is written."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from compile_cache.errors import ObjectNotFound, StoreError
from compile_cache.storage.stores.base import ObjectStore, ReadOnly, StoredObject

log = logging.getLogger("compile_cache")


class LayeredStore(ReadOnly):
    """Reads from all layers in order. A layer that fails is left out, and `problems` names it."""

    def __init__(self, layers: Sequence[ObjectStore]) -> None:
        self._layers = layers
        self._origins: dict[str, ObjectStore] = {}
        self._problems: dict[str, str] = {}

    @property
    def location(self) -> str:
        """The locations of all layers."""
        return " + ".join(layer.location for layer in self._layers)

    @property
    def problems(self) -> tuple[str, ...]:
        """Why layers were left out of the last listing."""
        return tuple(self._problems.values())

    def list(self, prefix: str) -> Sequence[StoredObject]:
        """All objects whose names begin with `prefix`, layer by layer, oldest first in each layer. An object in several
        layers is listed once, with the first layer.

        Raises:
            StoreError: no layer could be listed.
        """
        found: dict[str, StoredObject] = {}
        failure: StoreError | None = None
        failures = 0
        for layer in self._layers:
            try:
                entries = layer.list(prefix)
            except StoreError as error:
                log.warning("layer.failed layer=%s error=%s", layer.location, error)
                self._problems[layer.location] = str(error)
                failure, failures = failure or error, failures + 1
                continue
            self._problems.pop(layer.location, None)
            for entry in entries:
                if entry.name not in found:
                    found[entry.name] = entry
                    self._origins[entry.name] = layer
        if failure is not None and failures == len(self._layers):
            raise failure
        return list(found.values())

    def read(self, name: str, start: int = 0, size_bytes: int | None = None) -> bytes:
        """The object's bytes, from the layer that listed it, else from the first layer that has it.

        Raises:
            StoreError: the error of the layer that listed the object. If no layer listed it, `ObjectNotFound` means
                that no layer has it.
        """
        origin = self._origins.get(name)
        layers = [origin] if origin is not None else []
        layers += [layer for layer in self._layers if layer is not origin]
        failure: StoreError | None = None
        for layer in layers:
            try:
                return layer.read(name, start, size_bytes)
            except StoreError as error:
                if failure is None or (origin is None and isinstance(failure, ObjectNotFound)):
                    failure = error
        raise failure or ObjectNotFound(f"cannot get {name}: there are no layers")
