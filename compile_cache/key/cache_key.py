"""The cache key: environment + model name + model version, known before torch is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compile_cache.key.environment import FORMAT_VERSION, Environment

_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a pack belongs to. Packs of one key add up; packs of different keys never mix.

    `environment` names what the code was compiled for, `model_name` groups the versions of one model in a shared
    bucket, `model_version` names its code and weights.
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


def object_name(text: str) -> str:
    """`text` as one path segment of an object's name, never empty, never `.` or `..`."""
    return _NOT_A_NAME.sub("--", text).strip(".-")[:128] or "unnamed"
