"""The publisher: a background thread that puts new artifacts into the store, from READY until the process ends.

Cog has no teardown hook, so everything is published as soon as the warm-up has succeeded. Files that are handed over
later are staged at once as finished packs, and published once no others follow. The exit hook only waits until this
thread has uploaded the staged packs: Python 3.12 starts no threads at exit.

Containers that start together compile the same. So each waits a random time and lists the store again before it
uploads: most find the artifacts there, and upload only what is missing. A file that two upload is merged later.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from compile_cache.errors import CompileCacheError, PackForbidden, StoreUnavailable, log
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.host import container_log
from compile_cache.settings import VERSION, Settings
from compile_cache.storage.pack.format import Pack
from compile_cache.storage.publish import MOST_PACKS, Publication
from compile_cache.storage.rules import too_many
from compile_cache.timeline import note, noted

if TYPE_CHECKING:
    from compile_cache.serving.regions import Regions


_POLL_S = 0.5
# Files that follow within this time go into the same packs.
_QUIET_S = 3.0
# Its own, because the program may have set the seed of Python's.
_random = random.SystemRandom()
_RETRY_S = 30.0
# Containers that start together wait up to so long before they upload.
_SPREAD_S = 3.0
# Until then, the first predictions have the CPU to themselves.
_MERGE_AFTER_S = 20.0
_CREATOR = f"compile_cache {VERSION}"


class Publisher:
    """Publishes what `directory.ledger` has ready, for one boot or one program, from `start` on.

    Each attempt updates and saves `report`.
    """

    def __init__(self, publication: Publication, report: BootReport, settings: Settings) -> None:
        self._publication = publication
        self._ledger = publication.directory.ledger
        self._boot_report = report
        self._report = report.publish
        self._settings = settings
        self._regions: Regions | None = None
        self._closing = threading.Event()
        self._marked_on = ""
        self._merge_at: float | None = None
        self._staged: list[Pack] = []
        self._staged_files: Mapping[str, str] | None = None
        self._idle = threading.Event()
        self._container_log = container_log()  # while the server lives
        self._thread = threading.Thread(target=self._run, name="compile-cache-publish", daemon=True)

    def start(self, regions: Regions | None = None) -> None:
        """At READY, begin with the artifacts of the warm-up, and register the exit hook, if anything may be published.
        `regions` hands over the files that no case made."""
        if not self._settings.may_publish:
            return
        self._regions = regions
        self._thread.start()
        atexit.register(self.flush)

    def wait(self, timeout_s: float) -> bool:
        """Wait until nothing is left to publish, or the last attempt failed. True only if all is stored then."""
        until_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            has_failed = self._staged or self._staged_files is None  # unless it is at work
            if self._idle.is_set() and (has_failed or not self._waiting()):
                break
            time.sleep(_POLL_S / 10)
        return not self._waiting()

    def _waiting(self) -> str:
        """What is to be stored, and is not stored yet, in words; empty if there is nothing."""
        if (self._regions is not None and self._regions.has_others) or self._is_to_stage():  # in this order
            return "all files since the last publish, which are not packed yet"
        return " and ".join(f"a pack of {len(pack.manifest.files)} files" for pack in list(self._staged))

    def flush(self) -> None:
        """The exit hook: publish the rest within the exit budget, and say what is lost. A second call does not wait
        again."""
        if self._thread.is_alive() and not self._closing.is_set():
            log.addHandler(self._container_log)
            self._closing.set()
            self._thread.join(self._settings.exit_budget_s)
            if self._thread.is_alive():
                self._attempt(self._give_up)

    def _give_up(self) -> None:
        if lost := self._waiting():
            raise StoreUnavailable(f"COMPILE_CACHE_EXIT_BUDGET_S={self._settings.exit_budget_s:g} is over; lost {lost}")

    def _run(self) -> None:
        """Until the exit, stage files soon after they are handed over, and publish them when no others follow."""
        due_s = stage_due_s = 0.0
        while True:
            closing = self._closing.is_set()
            if self._regions is not None and self._regions.has_others:
                self._attempt(self._regions.hand_over_others, is_upkeep=True)
            if (closing or time.monotonic() >= stage_due_s) and self._is_to_stage():
                self._idle.clear()
                quiet_s = 0.0 if self._staged_files is None else _QUIET_S
                stage_due_s = time.monotonic() + (quiet_s if self._attempt(self._stage) else _retry_s())
                due_s = time.monotonic() + quiet_s + _random.uniform(0.0, _SPREAD_S)
            if self._staged and (closing or time.monotonic() >= due_s):
                self._attempt(self._put_staged)
                due_s = time.monotonic() + _retry_s()
                self._idle.set()
            if not self._staged:
                self._idle.set()
            if closing:
                self._boot_report.save()  # what served since the last attempt
                return
            self._tend()
            self._closing.wait(_POLL_S)

    def _is_to_stage(self) -> bool:
        return self._staged_files != self._ledger.ready(self._closing.is_set())

    def _tend(self) -> None:
        """Mark the key as used, once a day and after each publish. If it has too many packs, merge them a while
        later."""
        today = datetime.now(UTC).date().isoformat()
        if self._marked_on != today:
            self._marked_on = today
            self._attempt(lambda: self._publication.mark_used(today), is_upkeep=True)
            if self._merge_at is None and len(self._publication.packs.known) > MOST_PACKS:
                self._merge_at = time.monotonic() + _MERGE_AFTER_S * _random.uniform(1.0, 2.0)
        if self._merge_at is not None and time.monotonic() >= self._merge_at and not self._closing.is_set():
            self._merge_at = None
            self._attempt(self._merge, is_upkeep=True)

    def _merge(self) -> None:
        merged = self._publication.merge(_CREATOR)
        self._report.merged_packs += merged
        log.info("publish.merged packs=%d", merged)

    def _attempt(self, step: Callable[[], None], is_upkeep: bool = False) -> bool:
        """Do `step`, and save the report. A failure costs only the step, and is reported once, unless the step is
        upkeep. This is the border of the thread, which must outlive every failure."""
        try:
            step()
        except Exception as error:
            unknown = None if isinstance(error, CompileCacheError | OSError) else error
            is_expected = is_upkeep and unknown is None
            if is_upkeep or self._report.failures[-1:] != [str(error)]:
                log.log(
                    logging.INFO if is_expected else logging.WARNING, "publish.failed error=%s", error, exc_info=unknown
                )
                if not is_upkeep:
                    self._report.failures.append(str(error))
            return False
        finally:
            self._boot_report.save()
        return True

    def _stage(self) -> None:
        self._staged, self._staged_files = [], None  # staging empties the outbox first; after a failure it is due again
        ready = self._ledger.ready(self._closing.is_set())
        unread = self._regions.unread_files(ready) if self._regions is not None else set()
        with noted("publish", "pack"):
            files = {path: record for path, record in ready.items() if path not in unread}
            staged = self._publication.stage(files, _CREATOR)
        self._staged, self._staged_files = list(staged), ready

    def _put_staged(self) -> None:
        """Upload the packs that are still missing in the store, most valuable first. Before each, list the store again.

        Raises:
            StoreUnavailable: a listed pack cannot be read now, and may have the same files.
            PackForbidden: the key has too many packs. A merge may make room.
        """
        packs = self._publication.packs
        while True:
            packs.refresh()
            if self._is_to_stage() or any(map(self._publication.is_superseded, self._staged)):
                self._stage()
            if not self._staged:
                return
            if not (packs.is_fully_known or self._closing.is_set()):
                raise StoreUnavailable("a pack of this key cannot be read now, so nothing is published beside it")
            if packs.is_full:
                self._marked_on = ""
                raise PackForbidden(f"nothing is published: {too_many(packs.rules.limits)}")
            self._put(self._staged[0])
            self._staged.pop(0).local.unlink(missing_ok=True)

    def _put(self, pack: Pack) -> None:
        started = time.perf_counter()
        self._publication.publish(pack)
        self._marked_on = ""
        self._report.packs += 1
        self._report.files += len(pack.manifest.files)
        self._report.stored_bytes += pack.stored_bytes
        note("publish", "put", started)
        log.info("publish.put pack=%s files=%d bytes=%d", pack.name, len(pack.manifest.files), pack.stored_bytes)


def _retry_s() -> float:
    """The seconds until the next attempt. They are random, so that containers that failed together spread out."""
    return _RETRY_S * _random.uniform(0.5, 1.5)
