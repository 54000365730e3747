"""The publisher: one background thread that puts what is new into the store, from READY until the process ends.

Cog has no teardown hook. So everything is published as soon as the warm-up has succeeded; what is compiled later is
staged at once as finished packs and published when compiling has been quiet for a while; and the exit hook only lets
this thread, started long before, put what is still staged. Threads cannot be started at exit on Python 3.12.

A thousand containers that start together have all compiled the same. Before each upload the store is listed again, and
one of them at a time uploads: the others find it done, and send what is still missing, if anything is.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
from collections.abc import Callable, Collection
from datetime import UTC, datetime

from compile_cache.errors import CompileCacheError, StoreError, StoreUnavailable
from compile_cache.lifecycle.report import CompileCounts, PublishReport
from compile_cache.pack.format import Pack
from compile_cache.regions.counters import read_counts
from compile_cache.versions.cache import CompileCache
from compile_cache.versions.compaction import compact
from compile_cache.versions.lease import Lease

log = logging.getLogger("compile_cache")

_POLL_S = 0.5
_QUIET_S = 10.0
_RETRY_S = 30.0
# Between two looks while another container publishes: a thousand that wait must not keep the one from it. What they
# have is not lost meanwhile, because at its exit each publishes without waiting.
_LONGEST_LOOK_S = 15.0
# Not before does one publish beside another that is still at it: all that wait would do so.
_LONGEST_WAIT_S = 600.0
_COMPACT_AFTER_S = 20.0
# A renewal may take several seconds where the store is overloaded, and nobody is in a hurry.
_LEASE_EXPIRY_S = 30.0


class Publisher:
    """Publishes for one boot. `start` begins at READY; the exit hook is registered then.

    `withheld` are artifacts never to be published, `unread` those that no warm boot would read; both are asked at each
    staging. `changed` is called after each attempt, with the report up to date. While `is_compiling`, nothing new is
    staged, because a compiler may be writing it. A key with more than `most_packs` packs is compacted, unless that is
    0, `compact_after_s` later: the first predictions have the CPU to themselves. `lease` is what other boots wait for
    while they do not compile the same; it is released when all is published.
    """

    def __init__(
        self,
        cache: CompileCache,
        report: PublishReport,
        creator: str,
        exit_budget_s: float,
        changed: Callable[[], None],
        withheld: Callable[[], Collection[str]] = frozenset,
        unread: Callable[[], Collection[str]] = frozenset,
        is_compiling: Callable[[], bool] = lambda: False,
        most_packs: int = 0,
        lease: Lease | None = None,
        compact_after_s: float = _COMPACT_AFTER_S,
    ) -> None:
        self._cache = cache
        self._report = report
        self._creator = creator
        self._exit_budget_s = exit_budget_s
        self._changed = changed
        self._withheld = withheld
        self._unread = unread
        self._is_compiling = is_compiling
        self._most_packs = most_packs
        self._compile_lease = lease
        self._publish_lease: Lease | None = None
        self._waiting_since: float | None = None
        self._looks = 0
        self._kept_on = ""
        self._compact_at: float | None = None
        self._compact_after_s = compact_after_s
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
                stage_due_s = 0.0 if self._attempt(self._stage) else time.monotonic() + _retry_s()
                due_s = 0.0 if is_first else time.monotonic() + _QUIET_S
            if self._staged and (closing or time.monotonic() >= due_s):
                is_done = self._attempt(self._put_staged)
                due_s = time.monotonic() + (self._look_s() if is_done else _retry_s())
                if not self._staged or not is_done:
                    self._finish()
            elif not self._staged:
                self._finish()
            if closing:
                return
            self._closing.wait(_POLL_S)

    def _finish(self) -> None:
        """All is published that can be, for now: others need not wait, and the store can be tidied."""
        if self._compile_lease is not None:
            self._compile_lease.release()
            self._compile_lease = None
        self._idle.set()
        if self._staged:
            return
        self._waiting_since, self._looks = None, 0
        if self._kept_on != _today():
            self._kept_on = _today()
            self._keep()
        if self._compact_at is not None and time.monotonic() >= self._compact_at and not self._closing.is_set():
            self._compact_at = None
            self._maintain(self._compact)

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
        withheld, unread = self._withheld(), self._unread()
        self._staged, self._staged_at = [], None  # staging empties the outbox first; if it fails, it is due again
        self._staged = list(self._cache.stage({*withheld, *unread}, self._creator))
        self._staged_at = counts
        self._report.withheld_files = len(withheld)
        self._report.unread_files = len(unread)

    def _put_staged(self) -> None:
        """Put what nobody has put meanwhile, most valuable first; nothing, while another container is at it, or what is
        there cannot be told."""
        closing = self._closing.is_set()
        self._drop_published()
        if not self._staged or not (closing or self._is_our_turn()):
            return
        try:
            if not closing:
                self._drop_published()  # once more: somebody had the lease until now
            while self._staged:
                self._put(self._staged[0])
                self._staged.pop(0).local.unlink(missing_ok=True)
        finally:
            if self._publish_lease is not None:
                self._publish_lease.release()

    def _drop_published(self) -> None:
        self._cache.refresh()
        if any(self._cache.is_superseded(pack) for pack in self._staged):
            self._stage()

    def _put(self, pack: Pack) -> None:
        started = time.perf_counter()
        self._cache.publish(pack)
        self._kept_on = ""
        self._report.packs += 1
        self._report.files += len(pack.manifest.files)
        self._report.stored_bytes += pack.stored_bytes
        self._report.seconds += time.perf_counter() - started
        log.info("publish.put pack=%s files=%d bytes=%d", pack.name, len(pack.manifest.files), pack.stored_bytes)

    def _is_our_turn(self) -> bool:
        """Whether nothing stands against it, as far as one can know, or this container has waited long enough."""
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        is_free = self._cache.is_fully_known and self._acquire()
        self._looks += 1
        return is_free or now - self._waiting_since > _LONGEST_WAIT_S

    def _acquire(self) -> bool:
        if self._publish_lease is None:
            self._publish_lease = Lease(self._cache.writing, self._cache.key.prefix + "publish.lease", _LEASE_EXPIRY_S)
        try:
            return self._publish_lease.acquire()
        except StoreUnavailable as error:  # as under the load of a thousand containers: not all of them now
            log.info("publish.no_lease error=%s", error)
            return False
        except StoreError as error:  # advisory: where it cannot be had, what follows says why
            log.info("publish.no_lease error=%s", error)
            return True

    def _look_s(self) -> float:
        return min(_LONGEST_LOOK_S, 0.5 * 2.0 ** min(self._looks, 10)) * random.uniform(0.5, 1.0)

    def _keep(self) -> None:
        """Record, once a day, that the key is used, and see whether its packs are to be merged."""
        self._maintain(lambda: self._cache.mark_used(_today()))
        if 0 < self._most_packs < len(self._cache.pack_names):
            self._compact_at = time.monotonic() + self._compact_after_s

    def _maintain(self, step: Callable[[], None]) -> None:
        """Do `step`, of which a failure costs nothing but itself."""
        try:
            step()
        except (CompileCacheError, OSError) as error:
            log.info("maintain.failed error=%s", error)
        except Exception as error:  # this thread must outlive whatever happens
            log.warning("maintain.failed", exc_info=error)
        finally:
            self._changed()

    def _compact(self) -> None:
        if not self._acquire():
            return  # whoever publishes or compacts now will see to it, or the next boot
        try:
            written = self._cache.of_written_store()
            if len(written.list()) > self._most_packs:
                done = compact(written, written.staging, self._creator, self._may_compact, self._closing)
                self._report.compacted_packs += done.packs
                log.info("compact.done packs=%d bytes=%d", done.packs, done.stored_bytes)
        finally:
            if self._publish_lease is not None:
                self._publish_lease.release()
            self._cache.forget_annex()

    def _may_compact(self) -> bool:
        """While the lease is ours and nobody has told the process to end."""
        return self._publish_lease is not None and self._publish_lease.is_held and not self._closing.is_set()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _retry_s() -> float:
    """Not the same in all containers: what failed because all of them came at once would fail again."""
    return _RETRY_S * random.uniform(0.5, 1.5)
