"""The refusals in a key's packs, for the command line."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from compile_cache.aot.refusals import SUFFIX, Refusal, read_refusal
from compile_cache.errors import ArtifactError
from compile_cache.versions.fetch import fetch
from compile_cache.versions.packs import PacksOfKey
from compile_cache.versions.portion import Portion

log = logging.getLogger("compile_cache")

_MOST_REFUSALS = 1024
_MOST_BYTES = 64 << 20


def stored_refusals(packs: PacksOfKey) -> tuple[Refusal, ...]:
    """The kinds of calls that `packs` say to serve eager, by class. Reads heads, and the frames with refusals, which
    are verified like a restore's. Damaged refusals are skipped and logged.

    Raises:
        StoreError: the store cannot be listed.
        OSError: the temporary folder cannot be written.
    """
    refusals = []
    with tempfile.TemporaryDirectory(prefix="compile-cache-") as folder:
        fetched = fetch(packs, Path(folder), portion=Portion(SUFFIX, _MOST_REFUSALS, _MOST_BYTES))
        for path, staged in fetched.files.items():
            try:
                refusals.append(read_refusal(Path(staged.local), path))
            except ArtifactError as error:
                log.info("refusal.not_read file=%s error=%r", path, error)
    return tuple(sorted(refusals, key=lambda refusal: (refusal.class_name, refusal.path)))
