"""The common options of commands, and the stores and versions that they select."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from compile_cache.cli.terminal import print_note
from compile_cache.errors import CompileCacheError, SettingsError, StoreError
from compile_cache.key.cache_key import CacheKey, object_name
from compile_cache.settings import STORE_SCHEMES, Settings, split_url
from compile_cache.storage.catalog import Version as StoredVersion
from compile_cache.storage.stores.base import ObjectStore, open_stores

Store = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Use this store alone, and no layers."),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Only this model: org/name, or a folder's name.")]
Version = Annotated[str | None, typer.Option("--version", metavar="VERSION", help="Only this version.")]
Environment = Annotated[str | None, typer.Option(metavar="DIGEST", help="Only environments that begin with it.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
From = Annotated[str | None, typer.Option("--from", metavar="URL", help="Copy only from this store.")]
FromFolder = Annotated[
    Path, typer.Option("--from", metavar="FOLDER", exists=True, file_okay=False, help="Copy from this local store.")
]
To = Annotated[str | None, typer.Option(metavar="URL", help="Copy into this store instead of COMPILE_CACHE_STORE.")]
ToFolder = Annotated[Path, typer.Option(metavar="FOLDER", file_okay=False, help="Copy into this folder.")]


def read_settings(store: str | None) -> Settings:
    """The settings of a boot. If `store` is given, it replaces the boot's store and layers.

    Raises:
        SettingsError: a setting is wrong, or no store is set.
    """
    settings = Settings.from_env(os.environ)
    if store is not None and split_url(store)[0] in STORE_SCHEMES:
        settings = replace(settings, store=store, layers=())
    elif store is not None:
        settings = replace(settings, store="off", layers=(store,))
    if settings.store == "off" and not settings.layers:
        raise SettingsError("there is no store: set COMPILE_CACHE_STORE, or give one on the command line")
    return settings


def open_reading(settings: Settings) -> ObjectStore:
    """The stores that a boot reads: all layers."""
    return open_stores(settings).reading


def open_writing(settings: Settings) -> ObjectStore:
    """The store that a boot writes.

    Raises:
        StoreError: no store is written.
    """
    writing = open_stores(settings).writing
    if writing is None:
        raise StoreError("this store is read-only: set COMPILE_CACHE_STORE, or give a store that can be written")
    return writing


def warn_of_problems(store: ObjectStore) -> None:
    """Name the layers that could not be listed."""
    for problem in getattr(store, "problems", ()):
        print_note(f"warning: left out: {problem}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The versions that the options select: by default, all."""

    model: str | None = None
    version: str | None = None
    environment: str | None = None

    def takes(self, key: CacheKey) -> bool:
        """Whether the options select this version."""
        return (
            (self.model is None or key.model_name == object_name(self.model))
            and (self.version is None or key.model_version == object_name(self.version))
            and key.environment.startswith(self.environment or "")
        )

    @property
    def text(self) -> str:
        """The selection in words; empty if it has all versions."""
        asked = {"model": self.model, "version": self.version, "environment": self.environment}
        named = [f"{name} {value}" for name, value in asked.items() if value]
        return f" of {', '.join(named)}" if named else ""


def find_version(versions: Sequence[StoredVersion], text: str) -> StoredVersion:
    """The only version that `text` names (`find_versions`).

    Raises:
        CompileCacheError: `text` names no version.
        Exit: `text` names several versions. They are listed on stderr.
    """
    found = find_versions(versions, text)
    if not found:
        raise CompileCacheError(f"nothing stored begins with {text or 'no name'}: `compile-cache ls` lists all")
    if len(found) > 1:
        print_note(f"error: {text} is ambiguous; use more characters:")
        for version in found:
            print_note(f"  {version.key.environment}/{version.key.model_name}/{version.key.model_version}")
        raise typer.Exit(2)
    return found[0]


def find_versions(versions: Sequence[StoredVersion], text: str) -> list[StoredVersion]:
    """The versions that `text` may name.

    `text` is the beginning of `[environment/]model/version` (the environment's digest may be cut too), or of a pack's
    name. A full name finds only that version, even if other names begin with it. A slash ends a model's name.
    An empty `text` names none.
    """
    parts = text.removeprefix("v2/").rstrip("/").split("/")
    stored = [version for version in versions if version.packs]
    if len(parts) == 1:
        whole = [v for v in stored if v.key.model_name == parts[0]]
        return whole or [v for v in stored if text and (v.key.model_name.startswith(text) or _packs(v, text))]
    environment, model, version = ["", *parts] if len(parts) == 2 else parts[:3]
    of_model = [v for v in stored if v.key.model_name == model and v.key.environment.startswith(environment)]
    begins = [v for v in of_model if v.key.model_version.startswith(version)] if len(parts) <= 3 else []
    return [v for v in begins if v.key.model_version == version] or begins


def find_pack(version: StoredVersion, text: str) -> str:
    """The name of the only pack of `version` that begins with `text`.

    Raises:
        CompileCacheError: no pack, or several packs, begin so.
    """
    names = _packs(version, text)
    if len(names) != 1:
        found = "no pack begins" if not names else f"{len(names)} packs begin"
        raise CompileCacheError(f"{found} with {text or 'no name'}: see `compile-cache show {version.key.model_name}`")
    return names[0]


def _packs(version: StoredVersion, text: str) -> list[str]:
    """The names of the version's packs that begin with `text`; none if that is empty."""
    return [entry.name for entry in version.packs if text and entry.name.rpartition("/")[2].startswith(text)]
