"""Which key a boot has, from its settings, the model's files and the machine: for the boot, and to explain it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment, detect_environment
from compile_cache.key.model_version import model_name, model_version
from compile_cache.settings import Settings


def environment_for(settings: Settings, cache_directory: Path, environ: Mapping[str, str]) -> Environment:
    """This machine's environment, without torch, with all in `settings` that decides which graphs are compiled, and
    how."""
    options = f"{settings.scope} {settings.mode} dynamic={settings.dynamic}"
    return detect_environment(str(cache_directory), options, environ)


def version_for(settings: Settings, model: str, sources: Sequence[str | Path], environ: Mapping[str, str]) -> str:
    """The model's version: as it is set, else the digest of what its graphs are made from.

    Raises:
        SettingsError: one of `sources` is not there.
    """
    return settings.model_version or model_version(model, sources, environ)


def key_for(settings: Settings, environment: Environment, model: str, version: str) -> CacheKey:
    """The key under which a boot looks and publishes."""
    return CacheKey.of(environment, settings.model_name or model_name(model), version)
