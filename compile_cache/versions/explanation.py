"""Explaining boots: the one that this machine would have now, and one that wrote a report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from compile_cache.errors import CompileCacheError
from compile_cache.key.cache_key import CacheKey
from compile_cache.key.environment import Environment
from compile_cache.key.identity import environment_for, key_for, version_for
from compile_cache.lifecycle.report import BootReport, PublishReport, RefusedPack, RestoreReport
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import TrustedKeys
from compile_cache.regions.counters import CompileCounts
from compile_cache.regions.ladder import RegionReport
from compile_cache.settings import Settings
from compile_cache.store.base import ObjectStore
from compile_cache.versions.catalog import MOST_PREDECESSORS, explain_miss, predecessors, read_catalog
from compile_cache.versions.inspection import Inspected, Verdict, inspect_heads

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a boot on this machine would find: `outcome` is `hit`, `seeded` (from the version `seeded_from`) or `miss`,
    for the `reason`; `packs` are those that could be used, as far as their heads tell."""

    key: CacheKey
    environment: Environment
    outcome: str
    reason: str = ""
    packs: int = 0
    stored_bytes: int = 0
    seeded_from: str = ""
    refused: tuple[RefusedPack, ...] = ()


def explain_boot(
    settings: Settings, store: ObjectStore, model: str, sources: Sequence[str | Path], environ: Mapping[str, str]
) -> Explanation:
    """Look for what a boot would look for, without torch, and without claiming the cache directory: its number is 0,
    as in a container. Reads the packs' heads alone.

    Raises:
        StoreError: the store cannot be listed.
        SettingsError: one of `sources` is not there.
    """
    environment = environment_for(settings, Path(settings.dir) / "0", environ)
    key = key_for(settings, environment, model, version_for(settings, model, sources, environ))
    own = _inspect_version(settings, store, key)
    refused = [pack.refusal for pack in own if pack.verdict is not Verdict.SOUND]
    if sound := _sound(own):
        return Explanation(key, environment, "hit", "", len(sound), _stored_bytes(sound), "", tuple(refused))
    for other in predecessors(store, key)[:MOST_PREDECESSORS]:
        found = _inspect_version(settings, store, other)
        refused += [pack.refusal for pack in found if pack.verdict is not Verdict.SOUND]
        if sound := _sound(found):
            reason, size_bytes = f"nothing in {key.prefix}", _stored_bytes(sound)
            seed = other.model_version
            return Explanation(key, environment, "seeded", reason, len(sound), size_bytes, seed, tuple(refused))
    return Explanation(key, environment, "miss", explain_miss(store, key, environment), refused=tuple(refused))


def _inspect_version(settings: Settings, store: ObjectStore, key: CacheKey) -> list[Inspected]:
    limits, trusted = Limits(size_bytes=settings.max_restore_bytes), TrustedKeys(settings.trusted_keys)
    versions = [version for version in read_catalog(store, key.prefix).versions if version.key == key]
    return inspect_heads(store, [pack for version in versions for pack in version.packs], limits, trusted)


def _sound(packs: Sequence[Inspected]) -> list[Inspected]:
    return [pack for pack in packs if pack.verdict is Verdict.SOUND]


def _stored_bytes(packs: Sequence[Inspected]) -> int:
    return sum(pack.entry.size_bytes for pack in packs)


def read_report(path: Path) -> BootReport:
    """The report that a boot wrote to COMPILE_CACHE_REPORT. What another version says in it, and this one does not
    know, is left out.

    Raises:
        CompileCacheError: it cannot be read, or is no report.
    """
    try:
        record = json.loads(path.read_bytes())
        restore = {**record["restore"], "refused": [_build(RefusedPack, r) for r in record["restore"]["refused"]]}
        parts = {
            "restore": _build(RestoreReport, restore),
            "publish": _build(PublishReport, record["publish"]),
            "counts": _build(CompileCounts, record["counts"]),
            "regions": [_build(RegionReport, region) for region in record["regions"]],
        }
        return _build(BootReport, {**record, **parts})
    except OSError as error:
        raise CompileCacheError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CompileCacheError(f"{path} is no boot report, as COMPILE_CACHE_REPORT names one: {error!r}") from error


def _build(kind: type[_T], record: Mapping[str, Any]) -> _T:
    """A dataclass from its JSON form; a value of another type than the field's own is a TypeError."""
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in record:
            value = math.inf if record[field.name] == "Infinity" else record[field.name]
            _check_type(field, value)
            values[field.name] = value
    return kind(**values)


def _check_type(field: Field[Any], value: Any) -> None:
    """By the field's default: numbers are numbers, as are a mapping's values, and None is one that was not measured."""
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if default is None or isinstance(default, int | float):
        fits = isinstance(value, int | float) or value is default
    elif isinstance(default, dict):
        fits = isinstance(value, dict) and all(isinstance(seconds, int | float) for seconds in value.values())
    else:
        fits = default is MISSING or isinstance(value, type(default))
    if not fits:
        raise TypeError(f"{field.name} is {value!r:.100}")
