"""The restore: a thread computes the key, and fetches and verifies its packs while the weights load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile_cache.errors import StoreUnavailable
from compile_cache.key.cache_key import CacheKey, environment_for, key_for
from compile_cache.key.environment import Environment, cpu_threads, observe_environment
from compile_cache.lifecycle.boot_report import RestoreReport
from compile_cache.settings import Settings
from compile_cache.storage.catalog import explain_miss
from compile_cache.storage.directory import CacheDirectory, make_empty
from compile_cache.storage.fetch import Fetched, PacksOfKey, candidates, fetch, install
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import LayeredStore, open_stores
from compile_cache.timeline import noted

log = logging.getLogger("compile_cache")

# Alone, a restore from a folder takes 0.1 to 0.2 s. Beside imports it takes 1 s, and makes them 0.3 s longer.
_HEAD_START_S = 0.3


@dataclass(frozen=True, slots=True)
class _Known:
    """The store, the environment and the key of a boot: all that is known before torch is imported."""

    store: LayeredStore
    environment: Environment
    key: CacheKey
    rules: Rules

    def beside(self, environment: Environment) -> _Known:
        """The same in another environment."""
        return replace(self, environment=environment, key=replace(self.key, environment=environment.digest))

    def packs(self) -> PacksOfKey:
        """The packs of the key, none of which is known yet."""
        return PacksOfKey(self.store, self.key, self.rules)


def _know(settings: Settings, environment: Environment, model: str, sources: Sequence[str | Path]) -> _Known:
    key = key_for(settings, environment, model, sources)
    return _Known(open_stores(settings), environment, key, Rules.of(settings))


@dataclass(frozen=True, slots=True)
class Plan:
    """What a boot would restore: its key and environment, and its report, as far as the heads of packs tell."""

    key: CacheKey
    environment: Environment
    store: str
    restore: RestoreReport


def plan_restore(settings: Settings, model: str, sources: Sequence[str | Path], environ: Mapping[str, str]) -> Plan:
    """Find what a boot on this machine would restore, without torch and without a cache directory.

    The directory's number is assumed to be 0, as in a container. This reads only the packs' heads.

    Raises:
        StoreError: a store cannot be listed.
    """
    environment = environment_for(settings, Path(settings.dir) / "0", environ)
    known = _know(settings, environment, model, sources)
    own, report = known.packs(), RestoreReport("miss")
    for packs in candidates(own, known.store.writing):
        packs.refresh()
        selection = packs.select()
        report.refused += selection.refused
        if selection.files:
            used = [pack.entry for pack, _ in selection.needed]
            report.packs, report.files = len(used), len(selection.files)
            report.stored_bytes = sum(entry.size_bytes for entry in used)
            report.outcome, report.reason = "hit", ""
            if packs is not own:
                report.outcome, report.reason = "seeded", f"nothing in {known.key.prefix}"
                report.seeded_from = packs.key.model_version
            break
    else:
        report.reason = explain_miss(known.store, known.key, environment)
    report.problems = list(known.store.problems)
    return Plan(known.key, environment, known.store.location, report)


class Restore:
    """Fetches on a thread from the start. `join` then installs the files, unless torch contradicts the environment.

    With `environment`, the files are for another process of this environment, and torch is neither imported nor asked.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        model: str,
        sources: Sequence[str | Path],
        environ: MutableMapping[str, str],
        environment: Environment | None = None,
    ) -> None:
        self._environment = environment
        self._settings = settings
        self._directory = directory
        self._started = time.monotonic()
        self._abandoned = threading.Event()
        self._known: _Known | None = None

        def begin(fetching: _Fetching) -> None:
            with noted("restore", "key"):
                found = environment or environment_for(settings, directory.path, environ)
                self._known = _know(settings, found, model, sources)
            self._fetch(self._known, fetching)

        self._fetching = _Fetching(begin)
        # Inductor's keys of CPU code have torch's thread count. This fixes the number that torch would choose.
        environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(environ)))
        self._fetching.start()

    def give_start(self) -> None:
        """Wait until it has ended, or had its start."""
        self._fetching.done.wait(max(0.0, self._started + _HEAD_START_S - time.monotonic()))

    def abandon(self) -> None:
        """Stop fetching."""
        self._abandoned.set()

    @property
    def has_ended(self) -> bool:
        """Whether `join` need not wait."""
        return self._fetching.done.is_set()

    @property
    def explanation(self) -> str:
        """Why nothing was found; empty if that is not known yet."""
        return self._fetching.explanation

    def join(self) -> tuple[RestoreReport, Publication | None]:
        """Wait for the thread, and install the fetched files. Imports torch to compare it with the key's environment,
        unless the files are for another process.

        The publication publishes under the boot's key. It is None if the key is unknown or the cache directory cannot
        be written.

        A store that does not answer costs at most `restore_timeout_s`.
        """
        failure = self._wait()
        known = self._known
        if known is None:
            return self._report("failed", str(failure)), None
        observed = known.beside(self._environment or observe_environment(known.environment))
        differences = known.environment.differences(observed.environment)
        if differences and not self._abandoned.is_set():
            self._fetching = _Fetching(lambda fetching: self._fetch(observed, fetching))
            self._fetching.start()
            failure = self._wait()
        if failure is not None and self._fetching.done.is_set():
            make_empty(self._directory.inbox)  # the disk was too small for the packs, and compiling needs the space
        packs = self._fetching.packs if failure is None else None
        # After a failure new ones, because a thread that has not ended still uses the others.
        packs = packs or observed.packs()
        publication = Publication(known.store.writing, packs, observed.environment, self._directory)
        if failure is not None:
            return self._report("failed", str(failure)), publication
        try:
            files = install(self._fetching.fetched, self._directory)
        except OSError as error:
            return self._report("failed", str(error)), None
        contradiction = "torch says otherwise: " + "; ".join(differences) if differences else ""
        outcome = "discarded" if contradiction else "miss"
        if files:
            outcome = "seeded" if self._fetching.fetched.seeded_from else "hit"
        nothing = "" if outcome == "hit" else f"nothing in {publication.packs.key.prefix}"
        return self._report(outcome, contradiction or nothing, files), publication

    def _report(self, outcome: str, reason: str, files: int = 0) -> RestoreReport:
        fetched = self._fetching.fetched
        return RestoreReport(
            outcome,
            reason,
            seeded_from=fetched.seeded_from,
            problems=list(self._known.store.problems) if self._known else [],
            packs=len(fetched.packs),
            files=files,
            stored_bytes=fetched.stored_bytes,
            seconds=fetched.seconds,
            refused=list(fetched.refused),
        )

    @property
    def location(self) -> str:
        """The store with its layers, as soon as they are known."""
        return self._known.store.location if self._known else self._settings.store

    def _wait(self) -> Exception | None:
        """Wait for the thread as long as the store may take, then abandon it. Returns the failure, if any."""
        left_s = self._settings.restore_timeout_s - (time.monotonic() - self._started)
        if self._fetching.done.wait(max(0.0, left_s)):
            return self._fetching.failure
        self.abandon()
        return StoreUnavailable(
            f"{self.location} did not deliver the packs within {self._settings.restore_timeout_s:g} s"
        )

    def _fetch(self, known: _Known, fetching: _Fetching) -> None:
        """Fetch what a boot takes, in the place of files of a wrong environment. If there is nothing, find out why."""
        own = fetching.packs = known.packs()
        for packs in candidates(own, known.store.writing):
            before = fetching.fetched
            with noted("restore", "fetch" if packs is own else "other versions"):
                fetched = fetch(packs, self._directory, self._abandoned)
            fetching.fetched = replace(
                fetched,
                refused=before.refused + fetched.refused,
                seconds=before.seconds + fetched.seconds,
                seeded_from=packs.key.model_version if fetched.files and packs is not own else "",
            )
            if fetched.files:
                break
        if not (own.known or fetched.files or self._abandoned.is_set()):
            fetching.done.set()  # nobody has to wait for the explanation
            fetching.explanation = explain_miss(known.store, known.key, known.environment)
            log.info("restore.miss reason=%s", fetching.explanation)


class _Fetching(threading.Thread):
    """A fetch on its own thread, and its result. `done` is set when `fetched` and `failure` are final."""

    def __init__(self, work: Callable[[_Fetching], None]) -> None:
        super().__init__(name="compile-cache-restore", daemon=True)
        self.packs: PacksOfKey | None = None
        self.fetched = Fetched()
        self.failure: Exception | None = None
        self.explanation = ""
        self.done = threading.Event()
        self._work = work

    def run(self) -> None:
        """Do the work. The joining thread gets its failure."""
        try:
            self._work(self)
        except Exception as error:
            if self.done.is_set():  # only the explanation failed
                log.info("restore.not_explained error=%s", error)
            else:
                self.failure = error
        finally:
            self.done.set()
