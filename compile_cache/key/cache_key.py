"""The cache key: environment + model name + model version, known before torch is imported.

A boot makes it from its settings, the model's files and the machine, and `compile-cache explain` does the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compile_cache.key.environment import FORMAT_VERSION, Environment, detect_environment
from compile_cache.key.model_version import model_name, model_version

if TYPE_CHECKING:
    from compile_cache.settings import Settings

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key that a pack belongs to. Packs of one key add up; packs of different keys never mix.

    `environment` is the digest of the machine and software that code was compiled for, `model_name` groups the versions
    of one model in a shared bucket, `model_version` names the model's code and weights.
    """

    environment: str
    model_name: str
    model_version: str

    @classmethod
    def of(cls, environment: Environment, model_name: str, model_version: str) -> CacheKey:
        """The key with each part fit for an object's name: `org/FLUX.1` → `org--FLUX.1`."""
        return cls(environment.digest, object_name(model_name), object_name(model_version))

    @property
    def environment_prefix(self) -> str:
        """Where the objects of this environment are: `v1/<environment>/`."""
        return f"v{FORMAT_VERSION}/{self.environment}/"

    @property
    def prefix(self) -> str:
        """Where the packs of this key are: `v1/<environment>/<model name>/<model version>/`."""
        return f"{self.environment_prefix}{self.model_name}/{self.model_version}/"


def environment_for(settings: Settings, cache_directory: Path, environ: Mapping[str, str]) -> Environment:
    """This machine's environment, without torch. Its options are the settings that decide which graphs are compiled,
    and how."""
    options = f"{settings.scope} {settings.mode} dynamic={settings.dynamic}"
    return detect_environment(str(cache_directory), options, environ)


def version_for(settings: Settings, model: str, sources: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """The model's version: the one that is set, else the digest of everything that its graphs are made from.

    Raises:
        SettingsError: one of `sources` is not there.
    """
    return settings.model_version or model_version(model, sources, environ)


def key_for(settings: Settings, environment: Environment, model: str, version: str) -> CacheKey:
    """The key under which a boot looks and publishes."""
    return CacheKey.of(environment, settings.model_name or model_name(model), version)


def object_name(text: str) -> str:
    """`text` as one path segment of an object's name, never empty, never `.` or `..`."""
    return _NOT_A_NAME.sub("--", text).strip(".-")[:128] or "unnamed"
