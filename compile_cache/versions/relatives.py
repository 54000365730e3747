"""The relatives of a key: other versions of its model, and its model in other environments.

The headers of their artifacts name the calls that a boot without its own artifacts will meet. The artifacts do not fit
this boot, so only the headers are used.
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compile_cache.aot.files import SUFFIX
from compile_cache.aot.known_calls import KnownCall, read_calls
from compile_cache.errors import StoreError
from compile_cache.key.cache_key import CacheKey
from compile_cache.pack.reading import Abandoned
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.catalog import Catalog, Version, read_catalog
from compile_cache.versions.fetch import fetch
from compile_cache.versions.portion import Portion

log = logging.getLogger("compile_cache")

MOST_ARTIFACTS = 256
MOST_BYTES = 64 << 20
_MOST_VERSIONS = 3
_MOST_ENVIRONMENTS = 3
_FOLDER = "relatives"


def relatives(catalog: Catalog, key: CacheKey) -> Sequence[Version]:
    """The last used other versions of the key's model, the latest first: three in the key's environment, and one in
    each of three other environments."""
    found = [v for v in catalog.versions if v.packs and v.key.model_name == key.model_name and v.key != key]
    found.sort(key=lambda version: (-version.used_s, version.key.prefix))
    own = [version for version in found if version.key.environment == key.environment]
    elsewhere = {version.key.environment: version for version in reversed(found) if version not in own}
    foreign = [version for version in found if elsewhere.get(version.key.environment) is version]
    chosen = [*own[:_MOST_VERSIONS], *foreign[:_MOST_ENVIRONMENTS]]
    return sorted(chosen, key=lambda version: (-version.used_s, version.key.prefix))


def calls_of_relatives(cache: CompileCache, abandoned: threading.Event | None = None) -> list[KnownCall]:
    """The calls from which the relatives' artifacts were made, each once. The calls of the last used relative, and of
    its newest artifacts, come first.

    This lists the whole store, because environments come first in the names: one request per 1,000 objects. Then it
    reads at most 64 MiB and 256 artifacts, verified like a restore's, into a temporary folder beside the cache
    directory. It is meant for a thread beside the predictions. A relative that cannot be read is skipped and logged.

    Raises:
        StoreError: the store cannot be listed, or `abandoned` was set.
    """
    calls: dict[str, KnownCall] = {}
    left = Portion(SUFFIX, MOST_ARTIFACTS, MOST_BYTES)
    folder = cache.staging / _FOLDER
    for version in relatives(read_catalog(cache.stores.reading), cache.key):
        try:
            fetched = fetch(cache.for_version(version.key).packs, folder, abandoned, portion=left)
            # The folder may have more files, which were not verified.
            for call in read_calls(Path(staged.local) for staged in fetched.files.values()):
                calls.setdefault(call.name, call)
            left = replace(
                left, files=left.files - len(fetched.files), size_bytes=left.size_bytes - _size_bytes(folder)
            )
        except Abandoned:
            raise
        except (StoreError, OSError) as error:
            log.info("plan.relative_not_read version=%s error=%r", version.key.prefix, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return list(calls.values())


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
