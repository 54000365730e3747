"""The restore: a thread computes the key, and fetches and verifies its packs while the weights load."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compile_cache.errors import RefusedPack, StoreUnavailable
from compile_cache.key.cache_key import CacheKey, environment_for, key_for, version_for
from compile_cache.key.environment import Environment, cpu_threads, observe_environment
from compile_cache.lifecycle.boot_report import RestoreReport
from compile_cache.settings import Settings
from compile_cache.storage.catalog import explain_miss
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.fetch import Fetched, PacksOfKey, candidates, fetch, install
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import Stores, open_stores
from compile_cache.timeline import noted

log = logging.getLogger("compile_cache")


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore. `publication` publishes under the boot's key; None if the key is unknown or the cache
    directory cannot be written."""

    report: RestoreReport
    location: str
    publication: Publication | None = None


@dataclass(frozen=True, slots=True)
class _Known:
    """The parts of the key that are known before torch is imported, and the stores."""

    stores: Stores
    environment: Environment
    version: str


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
        SettingsError: a path in `sources` does not exist.
    """
    stores = open_stores(settings)
    environment = environment_for(settings, Path(settings.dir) / "0", environ)
    key = key_for(settings, environment, model, version_for(settings, model, sources))
    report = RestoreReport("miss")
    own = PacksOfKey(stores.reading, key, Rules.of(settings))
    for packs in candidates(own, stores.writing):
        packs.refresh()
        selection = packs.select()
        report.refused += selection.refused
        if selection.files:
            used = [pack.entry for pack in selection.packs if pack.entry.name in selection.needed]
            report.packs, report.files = len(used), len(selection.files)
            report.stored_bytes = sum(entry.size_bytes for entry in used)
            report.outcome, report.reason = "hit", ""
            if packs is not own:
                report.outcome, report.reason = "seeded", f"nothing in {key.prefix}"
                report.seeded_from = packs.key.model_version
            break
    else:
        report.reason = explain_miss(stores.reading, key, environment)
    report.problems = list(getattr(stores.reading, "problems", ()))
    return Plan(key, environment, stores.reading.location, report)


class Restore:
    """Fetches on a thread. `join` then installs the files, unless torch contradicts the environment.

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
        self._model = model
        self._sources = sources
        self._environ = environ
        self._started = time.monotonic()
        self._abandoned = threading.Event()
        self._known: _Known | None = None
        self._fetching = _Fetching(self._run)
        # Inductor's keys of CPU code have torch's thread count. This fixes the number that torch would choose.
        environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(environ)))

    def start(self) -> None:
        """Start the thread."""
        self._fetching.start()

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

    def join(self) -> Restored:
        """Wait for the thread, and install the fetched files. Imports torch to compare it with the key's environment,
        unless the files are for another process.

        A store that does not answer costs at most `restore_timeout_s`.
        """
        failure = self._wait()
        known = self._known
        if known is None:
            return self._restored("failed", str(failure))
        observed = self._environment or observe_environment(known.environment)
        differences = known.environment.differences(observed)
        if differences and not self._abandoned.is_set():
            failure = self._fetch_again(known.stores, observed)
        packs = self._fetching.packs
        if failure is not None or packs is None:
            if self._fetching.done.is_set():
                self._directory.empty_inbox()  # the disk was too small for the packs, and compiling needs the space
            # New packs, because a thread that has not ended still uses the others.
            packs, reason = self._packs(known.stores, observed), str(failure)
            return self._restored("failed", reason, Publication(known.stores.writing, packs, observed, self._directory))
        publication = Publication(known.stores.writing, packs, observed, self._directory)
        return self._install(publication, "torch says otherwise: " + "; ".join(differences) if differences else "")

    def _install(self, publication: Publication, contradiction: str) -> Restored:
        fetched = self._fetching.fetched
        try:
            files = install(fetched, self._directory)
        except OSError as error:
            return self._restored("failed", str(error))
        reason = contradiction or f"nothing in {publication.packs.key.prefix}"
        if fetched.seeded_from:
            return self._restored("seeded", reason, publication, files)
        if files:
            return self._restored("hit", contradiction, publication, files)
        return self._restored("discarded" if contradiction else "miss", reason, publication)

    def _restored(self, outcome: str, reason: str, publication: Publication | None = None, files: int = 0) -> Restored:
        fetched, stores = self._fetching.fetched, self._known.stores if self._known else None
        report = RestoreReport(
            outcome,
            reason,
            seeded_from=fetched.seeded_from,
            problems=list(getattr(stores.reading, "problems", ())) if stores else [],
            packs=len(fetched.packs),
            files=files,
            stored_bytes=fetched.stored_bytes,
            seconds=fetched.seconds,
            refused=list(fetched.refused),
        )
        return Restored(report, self._location, publication)

    @property
    def _location(self) -> str:
        return self._known.stores.reading.location if self._known else self._settings.store

    def _wait(self) -> Exception | None:
        """Wait for the thread as long as the store may take, then abandon it. Returns the failure, if any."""
        left_s = self._settings.restore_timeout_s - (time.monotonic() - self._started)
        if self._fetching.done.wait(max(0.0, left_s)):
            return self._fetching.failure
        self.abandon()
        return StoreUnavailable(
            f"{self._location} did not deliver the packs within {self._settings.restore_timeout_s:g} s"
        )

    def _run(self, fetching: _Fetching) -> None:
        with noted("restore", "key"):
            stores = open_stores(self._settings)
            environment = self._environment or environment_for(self._settings, self._directory.path, self._environ)
            version = version_for(self._settings, self._model, self._sources)
            self._known = _Known(stores, environment, version)
        self._fetch(self._packs(stores, environment), stores, environment, fetching)

    def _fetch_again(self, stores: Stores, observed: Environment) -> Exception | None:
        """Drop the files of the wrong environment, and fetch those of the observed one."""

        def run(fetching: _Fetching) -> None:
            self._directory.empty_inbox()
            self._fetch(self._packs(stores, observed), stores, observed, fetching)

        self._fetching = _Fetching(run)
        self._fetching.start()
        return self._wait()

    def _packs(self, stores: Stores, environment: Environment) -> PacksOfKey:
        version = self._known.version if self._known else ""
        key = key_for(self._settings, environment, self._model, version)
        return PacksOfKey(stores.reading, key, Rules.of(self._settings))

    def _fetch(self, own: PacksOfKey, stores: Stores, environment: Environment, fetching: _Fetching) -> None:
        """Fetch what a boot takes. If there is nothing, find out why."""
        fetching.packs = own
        refused: tuple[RefusedPack, ...] = ()
        seconds = 0.0
        for packs in candidates(own, stores.writing):
            with noted("restore", "fetch" if packs is own else "other versions"):
                fetched = fetch(packs, self._directory, self._abandoned)
            refused, seconds = refused + fetched.refused, seconds + fetched.seconds
            if fetched.files:
                break
        seeded_from = packs.key.model_version if fetched.files and packs is not own else ""
        fetching.fetched = replace(fetched, refused=refused, seconds=seconds, seeded_from=seeded_from)
        if not (own.known or fetched.files or self._abandoned.is_set()):
            fetching.done.set()  # nobody has to wait for the explanation
            fetching.explanation = explain_miss(stores.reading, own.key, environment)
            log.info("restore.miss reason=%s", fetching.explanation)


class _Fetching:
    """A fetch on its own thread, and its result. `done` is set when `fetched` and `failure` are final."""

    def __init__(self, work: Callable[[_Fetching], None]) -> None:
        self.packs: PacksOfKey | None = None
        self.fetched = Fetched()
        self.failure: Exception | None = None
        self.explanation = ""
        self.done = threading.Event()
        self._work = work

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="compile-cache-restore", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work(self)
        except Exception as error:
            if self.done.is_set():  # only the explanation failed
                log.info("restore.not_explained error=%s", error)
            else:
                self.failure = error  # the joining thread gets it
        finally:
            self.done.set()
