"""The publisher: one background thread that puts what is new into the store, from READY until the process ends.

Cog has no teardown hook. So everything is published as soon as the warm-up has succeeded; what is compiled later is
staged at once as finished packs and published when compiling has been quiet for a while; and the exit hook only lets
this thread, started long before, put what is still staged. Threads cannot be started at exit on Python 3.12.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Collection

from compile_cache.cache import CompileCache
from compile_cache.counters import read_counts
from compile_cache.errors import CompileCacheError
from compile_cache.pack import Pack
from compile_cache.report import CompileCounts, PublishReport

log = logging.getLogger("compile_cache")

_POLL_S = 1.0
_QUIET_S = 10.0
_RETRY_S = 30.0


class Publisher:
    """Publishes for one boot. `start` begins at READY; the exit hook is registered then.

    `withheld` are artifacts never to be published; `changed` is called after each attempt, with the report up to date;
    while `is_compiling`, nothing new is staged, because a compiler may be writing it.
    """

    def __init__(
        self,
        cache: CompileCache,
        report: PublishReport,
        withheld: Collection[str],
        creator: str,
        exit_budget_s: float,
        changed: Callable[[], None],
        is_compiling: Callable[[], bool] = lambda: False,
    ) -> None:
        self._cache = cache
        self._report = report
        self._withheld = withheld
        self._creator = creator
        self._exit_budget_s = exit_budget_s
        self._changed = changed
        self._is_compiling = is_compiling
        self._staged: list[Pack] = []
        self._staged_at: CompileCounts | None = None
        self._closing = threading.Event()
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name="compile-cache-publish", daemon=True)

    def start(self) -> None:
        """Begin with what the warm-up has compiled."""
        self._thread.start()
        atexit.register(self.flush)

    def wait(self, timeout_s: float) -> bool:
        """Block until nothing is left to publish, or the last attempt failed; False if that took longer."""
        return self._idle.wait(timeout_s)

    def flush(self) -> None:
        """Publish what is left, within the exit budget. The exit hook."""
        self._closing.set()
        self._thread.join(self._exit_budget_s)

    def _run(self) -> None:
        """Until the exit: stage what is new when the counters move, publish it when they have been still."""
        due_s = stage_due_s = 0.0
        while True:
            closing = self._closing.is_set()
            is_due = closing or time.monotonic() >= stage_due_s
            if is_due and self._staged_at != read_counts() and not self._is_compiling():
                self._idle.clear()
                is_first = self._staged_at is None
                stage_due_s = 0.0 if self._attempt(self._stage) else time.monotonic() + _RETRY_S
                due_s = 0.0 if is_first else time.monotonic() + _QUIET_S
            if self._staged and (closing or time.monotonic() >= due_s):
                due_s = 0.0 if self._attempt(self._put_staged) else time.monotonic() + _RETRY_S
                self._idle.set()
            elif not self._staged:
                self._idle.set()
            if closing:
                return
            self._closing.wait(_POLL_S)

    def _attempt(self, step: Callable[[], None]) -> bool:
        """Do `step`; a failure is logged and reported, and costs only what was not published."""
        try:
            step()
        except Exception as error:  # this thread must outlive whatever happens: nobody would start another
            is_known = isinstance(error, CompileCacheError | OSError)
            log.warning("publish.failed error=%s", error, exc_info=None if is_known else error)
            if self._report.failures[-1:] != [str(error)]:
                self._report.failures.append(str(error))
            return False
        finally:
            self._changed()
        return True

    def _stage(self) -> None:
        counts = read_counts()
        self._staged = []  # staging empties the outbox first
        self._staged = list(self._cache.stage(self._withheld, self._creator))
        self._staged_at = counts
        self._report.withheld_files = len(self._withheld)

    def _put_staged(self) -> None:
        """Most valuable first, as they were staged; what has been put is forgotten at once."""
        while self._staged:
            pack, started = self._staged[0], time.perf_counter()
            self._cache.publish(pack)
            self._staged.pop(0)
            pack.local.unlink(missing_ok=True)
            self._report.packs += 1
            self._report.files += len(pack.manifest.files)
            self._report.stored_bytes += pack.stored_bytes
            self._report.seconds += time.perf_counter() - started
            log.info("publish.put pack=%s files=%d bytes=%d", pack.name, len(pack.manifest.files), pack.stored_bytes)
