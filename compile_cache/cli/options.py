"""Options that several commands have, and what they select: stores, rules, versions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from compile_cache.cli.printing import print_note
from compile_cache.errors import SettingsError, StoreError
from compile_cache.key.cache_key import CacheKey, object_name
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import TrustedKeys
from compile_cache.settings import STORE_SCHEMES, Settings, split_url
from compile_cache.store.base import ObjectStore
from compile_cache.store.opening import open_stores
from compile_cache.versions.catalog import Version as StoredVersion

Store = Annotated[
    str | None,
    typer.Option(metavar="URL", help="This store alone, instead of COMPILE_CACHE_STORE and COMPILE_CACHE_LAYERS."),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Only this model: org/name, or a folder's name.")]
Version = Annotated[str | None, typer.Option("--version", metavar="VERSION", help="Only this version.")]
Environment = Annotated[
    str | None, typer.Option(metavar="DIGEST", help="Only environments whose digest begins like this.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
From = Annotated[str | None, typer.Option("--from", metavar="URL", help="Out of this store alone.")]
FromFolder = Annotated[
    Path, typer.Option("--from", metavar="FOLDER", exists=True, file_okay=False, help="Out of this local store.")
]
To = Annotated[str | None, typer.Option(metavar="URL", help="Into this store, not COMPILE_CACHE_STORE.")]
ToFolder = Annotated[Path, typer.Option(metavar="FOLDER", file_okay=False, help="Made if it is not there.")]


def read_settings(store: str | None) -> Settings:
    """The settings that a boot would have, with `store` instead of its stores if it is given.

    Raises:
        SettingsError: one is wrong, or there is no store.
    """
    settings = Settings.from_env(os.environ)
    if store is not None and split_url(store)[0] in STORE_SCHEMES:
        settings = replace(settings, store=store, layers=())
    elif store is not None:
        settings = replace(settings, store="off", layers=(store,))
    if settings.store == "off" and not settings.layers:
        raise SettingsError("there is no store: set COMPILE_CACHE_STORE, or name one here")
    return settings


def open_reading(settings: Settings) -> ObjectStore:
    """What a boot reads: all layers."""
    return open_stores(settings).reading


def open_writing(settings: Settings) -> ObjectStore:
    """What a boot writes.

    Raises:
        StoreError: it writes nowhere.
    """
    writing = open_stores(settings).writing
    if writing is None:
        raise StoreError("this store is only read: set COMPILE_CACHE_STORE, or name one here that can be written")
    return writing


def rules(settings: Settings) -> tuple[Limits, TrustedKeys]:
    """What packs are judged by, as a boot would."""
    return Limits(size_bytes=settings.max_restore_bytes), TrustedKeys(settings.trusted_keys)


def warn_of_problems(store: ObjectStore) -> None:
    """Name the layers that could not be listed."""
    for problem in getattr(store, "problems", ()):
        print_note(f"warning: left out: {problem}")


@dataclass(frozen=True, slots=True)
class Selection:
    """The versions that the options select: all, unless they say more."""

    model: str | None = None
    version: str | None = None
    environment: str | None = None

    def takes(self, key: CacheKey) -> bool:
        """Whether a version is one of them."""
        return (
            (self.model is None or key.model_name == object_name(self.model))
            and (self.version is None or key.model_version == object_name(self.version))
            and key.environment.startswith(self.environment or "")
        )

    @property
    def text(self) -> str:
        """For people: what was asked for, if not all."""
        asked = {"model": self.model, "version": self.version, "environment": self.environment}
        named = [f"{name} {value}" for name, value in asked.items() if value]
        return f" of {', '.join(named)}" if named else ""


def find_versions(versions: Sequence[StoredVersion], text: str) -> list[StoredVersion]:
    """Those that `text` may mean: the beginning of `[environment/]model/version`, with an environment's digest cut
    anywhere, or of a pack's name. A version named in full is meant, though the names of others begin with its."""
    parts = text.removeprefix("v1/").rstrip("/").split("/")
    stored = [version for version in versions if version.packs]
    if len(parts) == 1:
        begins = [v for v in stored if v.key.model_name.startswith(text) or _has_pack(v, text)]
        return [v for v in begins if v.key.model_name == text] or begins
    environment, model, version = ["", *parts] if len(parts) == 2 else parts[:3]
    of_model = [v for v in stored if v.key.model_name == model and v.key.environment.startswith(environment)]
    begins = [v for v in of_model if v.key.model_version.startswith(version)] if len(parts) <= 3 else []
    return [v for v in begins if v.key.model_version == version] or begins


def _has_pack(version: StoredVersion, text: str) -> bool:
    return any(pack.name.rpartition("/")[2].startswith(text) for pack in version.packs)
