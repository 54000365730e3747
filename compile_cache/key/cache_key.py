"""The cache key: environment, model name and model version, known before torch is imported.

Boots and `compile-cache explain` make it from the settings, the model's files and the machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from compile_cache.key.environment import FORMAT_VERSION, Environment, detect_environment
from compile_cache.key.model_version import model_name, model_version
from compile_cache.settings import Settings

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """The key of a pack. Packs of one key add up. Packs of different keys never mix.

    `environment` is the digest of the machine and the software for which code was compiled. `model_name` groups the
    versions of a model in a shared bucket. `model_version` names the model's code and weights.
    """

    environment: str
    model_name: str
    model_version: str

    @property
    def environment_prefix(self) -> str:
        """The prefix of this environment's objects: `v3/<environment>/`."""
        return f"v{FORMAT_VERSION}/{self.environment}/"

    @property
    def prefix(self) -> str:
        """The prefix of this key's packs: `v3/<environment>/<model name>/<model version>/`."""
        return f"{self.environment_prefix}{self.model_name}/{self.model_version}/"


def environment_for(settings: Settings, cache_directory: Path, environ: Mapping[str, str]) -> Environment:
    """This machine's environment, without torch. Its options are the settings that decide which graphs are compiled,
    and how."""
    options = f"{settings.scope} {settings.mode} dynamic={settings.dynamic}"
    return detect_environment(str(cache_directory), options, environ)


def key_for(settings: Settings, environment: Environment, model: str, sources: Sequence[str | Path]) -> CacheKey:
    """The key under which a boot restores and publishes. The version is the configured one, else the digest of
    everything from which the model's graphs are made. The names are made valid in an object's name: `org/FLUX.1` →
    `org--FLUX.1`.
    """
    name, version = settings.model_name or model_name(model), settings.model_version or model_version(model, sources)
    return CacheKey(environment.digest, object_name(name), object_name(version))


def object_name(text: str) -> str:
    """`text` as one path segment of an object's name: never empty, `.` or `..`. If that changes more than slashes, a
    digest keeps texts apart. A segment is its own name."""
    name = _NOT_A_NAME.sub("--", text).strip(".-")
    is_whole = 0 < len(name) <= 128 and text in (name, name.replace("--", "/"))
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]
    return name if is_whole else f"{name[:115] or 'unnamed'}-{digest}"
