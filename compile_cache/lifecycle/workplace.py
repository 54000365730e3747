"""The workplace of a boot: its cache directory, and the settings that suit it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from compile_cache.errors import CacheDirectoryError
from compile_cache.key.model_version import has_common_name, model_name
from compile_cache.settings import Settings, split_url
from compile_cache.versions.directory import CacheDirectory


@dataclass(frozen=True, slots=True)
class Workplace:
    """A claimed cache directory (None if the boot serves eager), the boot's settings from now on, and warnings."""

    directory: CacheDirectory | None
    settings: Settings
    warnings: tuple[str, ...] = ()


def claim_workplace(settings: Settings, model: str) -> Workplace:
    """Claim the cache directory at the fixed path; else a temporary one; else serve eager."""
    warnings: tuple[str, ...] = ()
    try:
        directory = CacheDirectory.claim(Path(settings.dir))
    except CacheDirectoryError as error:
        settings = replace(settings, store="off", layers=(), publish=False)
        warnings = (f"{error} This boot compiles into a temporary folder, and restores and publishes nothing.",)
        try:
            directory = CacheDirectory.temporary()
        except (CacheDirectoryError, OSError) as temporary_error:
            return _eager(
                settings,
                *warnings,
                f"No temporary folder can be made either, so this boot serves eager: {temporary_error}",
            )
    if os.statvfs(directory.path).f_flag & os.ST_NOEXEC:
        return _eager(
            settings,
            *warnings,
            f"{directory.path} is mounted noexec, so compiled code cannot be loaded from it. This boot serves eager. "
            "Set COMPILE_CACHE_DIR to a folder on another mount, or mount it with exec.",
        )
    return Workplace(directory, settings, (*warnings, *_name_warnings(settings, model)))


def _eager(settings: Settings, *warnings: str) -> Workplace:
    return Workplace(None, replace(settings, scope="off"), warnings)


def _name_warnings(settings: Settings, model: str) -> tuple[str, ...]:
    is_shared = split_url(settings.store)[0] != "file"
    if not is_shared or settings.model_name or not has_common_name(model):
        return ()
    return (
        f"{settings.store} names the model {model_name(model)!r}, after its folder {model}. Other models' folders may "
        "have the same name. Set COMPILE_CACHE_MODEL_NAME.",
    )
