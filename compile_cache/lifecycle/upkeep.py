"""Upkeep of a key in the store after publishing: marks its last use, and merges its packs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from compile_cache.lifecycle.report import PublishReport
from compile_cache.lifecycle.turns import PublishTurn
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.compaction import compact

log = logging.getLogger("compile_cache")

# Until then, the first predictions have the CPU to themselves.
_COMPACT_AFTER_S = 20.0


class Upkeep:
    """Marks the key as used, once a day and after each publish, and merges its packs if there are more than
    `most_packs`.

    With `most_packs` 0, packs are never merged. Set `closing` to stop a merge.
    """

    def __init__(
        self,
        cache: CompileCache,
        turn: PublishTurn,
        report: PublishReport,
        most_packs: int,
        creator: str,
        closing: threading.Event,
    ) -> None:
        self._cache = cache
        self._turn = turn
        self._report = report
        self._most_packs = most_packs
        self._creator = creator
        self._closing = closing
        self._marked_on = ""
        self._compact_at: float | None = None

    def forget(self) -> None:
        """Mark the key again, because a pack was published."""
        self._marked_on = ""

    def due(self) -> Iterator[Callable[[], None]]:
        """The steps that are due."""
        if self._marked_on != _today():
            self._marked_on = _today()
            yield lambda: self._cache.mark_used(self._marked_on)
            if 0 < self._most_packs < len(self._cache.pack_names):
                self._compact_at = time.monotonic() + _COMPACT_AFTER_S
        if self._compact_at is not None and time.monotonic() >= self._compact_at and not self._closing.is_set():
            self._compact_at = None
            yield self._compact

    def _compact(self) -> None:
        if not self._turn.take():
            return  # the container that has the turn will compact, or the next boot
        try:
            written = self._cache.of_written_store()
            if len(written.list()) > self._most_packs:
                done = compact(written, written.staging, self._creator, self._may_compact, self._closing)
                self._report.compacted_packs += done.packs
                log.info("compact.done packs=%d bytes=%d", done.packs, done.stored_bytes)
        finally:
            self._turn.release()
            self._cache.forget_annex()

    def _may_compact(self) -> bool:
        return self._turn.is_held and not self._closing.is_set()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
