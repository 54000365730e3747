"""The restore: computes the key, and fetches and verifies its packs while the weights load."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from compile_cache.child_process import Child
from compile_cache.errors import CompileCacheError, log
from compile_cache.key.cache_key import CacheKey, environment_for, key_for
from compile_cache.key.environment import Environment, cpu_threads, cuda_device, observe_environment
from compile_cache.lifecycle.boot_report import RestoreReport
from compile_cache.lifecycle.host import show_log
from compile_cache.settings import Settings
from compile_cache.storage.catalog import explain_miss
from compile_cache.storage.directory import CacheDirectory, empty_folder
from compile_cache.storage.fetch import Fetched, PacksOfKey, candidates, fetch, install
from compile_cache.storage.publish import Publication
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import LayeredStore, open_stores
from compile_cache.timeline import note


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
    found = _Found()
    found.search(known)
    if found.report.outcome == "miss":
        found.report.reason = explain_miss(known.store, known.key, environment)
    found.report.seconds = 0.0
    return Plan(known.key, environment, known.store.location, found.report)


class Restore:
    """Fetches from the start. `join` then installs the files, unless torch contradicts the environment.

    Until torch is imported, another process fetches: beside imports, a thread takes 1 s for what takes 0.2 s alone, and
    makes them 0.3 s longer. With `environment`, the files are for another process of this environment, and torch is
    neither imported nor asked. If nothing was fetched, another thread calls `at_miss`.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        model: str,
        sources: Sequence[str | Path],
        environ: MutableMapping[str, str],
        environment: Environment | None = None,
        at_miss: Callable[[], None] = lambda: None,
    ) -> None:
        self._environment = environment
        self._settings = settings
        self._directory = directory
        self._started = time.monotonic()
        self._child: Child | None = None
        # Inductor's keys of CPU code have torch's thread count. This fixes the number that torch would choose.
        environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(environ)))
        # Plain values, which another process can read.
        plain = str(model), [os.fspath(source) for source in sources], dict(environ)
        wanted = _Wanted(settings, directory.path, directory.inbox, *plain, environment)
        steps = _steps(wanted)
        if environment is None and "torch" not in sys.modules:
            try:
                # The cache directory is claimed as long as it lives.
                self._child = Child("compile_cache.lifecycle.restore:serve", 2, passed=[directory.lock_fd])
                steps = _steps_elsewhere(wanted, self._child)
            except OSError as error:  # then this process fetches
                log.info("restore.no_process error=%s", error)
        self._fetching = _Fetching(steps, at_miss)
        self._fetching.start()

    def abandon(self) -> None:
        """End the process that fetches. A thread ends by itself."""
        if self._child is not None:
            self._child.end()

    @property
    def has_ended(self) -> bool:
        """Whether `join` need not wait."""
        return self._fetching.done.is_set()

    @property
    def explanation(self) -> str:
        """Why nothing was found; empty if that is not known yet."""
        return self._fetching.explanation

    def join(self) -> tuple[RestoreReport, Publication | None]:
        """Wait for what is fetched, and install it. Imports torch to compare it with the key's environment, unless the
        files are for another process.

        The publication publishes under the boot's key. It is None if the key is unknown or the cache directory cannot
        be written.

        A store that does not answer costs at most `restore_timeout_s`.
        """
        found, known = self._wait(), self._fetching.known
        if known is None:
            return found.report, None
        observed = known.beside(self._environment or observe_environment(known.environment))
        differences = known.environment.differences(observed.environment)
        if differences and not found.has_failed:
            self._fetching = _Fetching(_fetched(observed, self._directory.inbox), known=observed)
            self._fetching.start()
            found = self._wait()
        if found.has_failed and self._fetching.done.is_set():
            empty_folder(self._directory.inbox)  # the disk was too small for the packs, and compiling needs the space
        packs = found.packs or observed.packs()
        publication = Publication(known.store.writing, packs, observed.environment, self._directory)
        if found.has_failed:
            return found.report, publication
        try:
            install(found.fetched, self._directory)
        except OSError as error:
            found.fail(str(error))
            return found.report, None
        if differences:
            found.report.reason = "torch says otherwise: " + "; ".join(differences)
            found.report.outcome = found.report.outcome if found.report.files else "discarded"
        return found.report, publication

    @property
    def location(self) -> str:
        """The store with its layers, as soon as they are known."""
        return self._fetching.known.store.location if self._fetching.known else self._settings.store

    def _wait(self) -> _Found:
        """What was found. Waits as long as the store may take, then abandons it."""
        left_s = self._settings.restore_timeout_s - (time.monotonic() - self._started)
        if self._fetching.done.wait(max(0.0, left_s)):
            return self._fetching.found
        self.abandon()
        found = _Found()  # a thread that has not ended still uses the other one
        found.fail(f"{self.location} did not deliver the packs within {self._settings.restore_timeout_s:g} s")
        return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a restore begins with. Without an `environment`, it is this machine's."""

    settings: Settings
    directory: Path
    inbox: Path
    model: str
    sources: Sequence[str | Path]
    environ: Mapping[str, str]
    environment: Environment | None


@dataclass(slots=True)
class _Found:
    """What was fetched, and the report of it. After a failure, it has no `packs` of the boot's key."""

    report: RestoreReport = field(default_factory=RestoreReport)
    packs: PacksOfKey | None = None
    fetched: Fetched = field(default_factory=Fetched)

    @property
    def has_failed(self) -> bool:
        """Whether nothing of this may be used."""
        return self.report.outcome == "failed"

    def fail(self, reason: str) -> None:
        """Let nothing of this be used."""
        self.packs = None
        self.report.outcome, self.report.reason, self.report.files = "failed", reason, 0

    def search(self, known: _Known, inbox: Path | None = None) -> None:
        """Fetch what a boot takes; without an inbox, only look."""
        began = time.perf_counter()
        self.packs = own = known.packs()
        self.report = report = RestoreReport("miss", f"nothing in {known.key.prefix}")
        try:
            for packs in candidates(own, known.store.writing):
                self.fetched = fetched = fetch(packs, inbox)
                report.refused += fetched.refused
                if not fetched.files:
                    continue
                report.packs, report.files = len(fetched.packs), len(fetched.files)
                report.stored_bytes = fetched.stored_bytes
                if packs is own:
                    report.outcome, report.reason = "hit", ""
                else:
                    report.outcome, report.seeded_from = "seeded", packs.key.model_version
                    self.fetched = replace(fetched, seeded_from=report.seeded_from)
                break
        finally:
            report.problems = list(known.store.problems)
            report.seconds = time.perf_counter() - began


# All that is known of a restore so far, what was fetched, and why nothing was found.
_Step: TypeAlias = _Known | _Found | str


def _steps(wanted: _Wanted) -> Iterator[_Step]:
    """The steps of a restore, in this order."""
    environment = wanted.environment or environment_for(wanted.settings, wanted.directory, wanted.environ)
    known = _know(wanted.settings, environment, wanted.model, wanted.sources)
    yield known
    yield from _fetched(known, wanted.inbox)


def _fetched(known: _Known, inbox: Path) -> Iterator[_Step]:
    """Fetch what a boot takes. If there is nothing, find out why."""
    found = _Found()
    try:
        found.search(known, inbox)
    except Exception as error:
        found.fail(_text(error))
    yield found
    if found.report.outcome == "miss":
        yield explain_miss(known.store, known.key, known.environment)


def _steps_elsewhere(wanted: _Wanted, child: Child) -> Iterator[_Step]:
    """The same steps, in another process: `serve`."""
    try:
        child.channel.send(wanted)
        cuda_device()  # initialises the driver in this process too, before torch does so
        while True:
            step = child.channel.recv()
            if isinstance(step, Exception):
                raise step
            if isinstance(step, _Known):
                store = step.store
            elif isinstance(step, _Found) and step.packs is not None:
                step.packs.store = store  # one client for all
            yield step
    except (EOFError, OSError):
        return  # it has ended
    finally:
        child.end()
        child.close()


def serve(channel: Connection) -> None:
    """Take the steps for the process that started this one."""
    show_log()
    try:
        for step in _steps(channel.recv()):
            channel.send(step)
    except Exception as error:
        channel.send(CompileCacheError(_text(error)))


def _text(error: Exception) -> str:
    return str(error) or repr(error)


class _Fetching(threading.Thread):
    """A fetch on its own thread, and its result. `done` is set when `found` is final."""

    def __init__(
        self, steps: Iterator[_Step], at_miss: Callable[[], None] = lambda: None, known: _Known | None = None
    ) -> None:
        super().__init__(name="compile-cache-restore", daemon=True)
        self.known = known
        self.found = _Found()
        self.found.fail("the process that restores has ended")
        self.explanation = ""
        self.done = threading.Event()
        self._steps = steps
        self._at_miss = at_miss

    def run(self) -> None:
        """Take the steps. The joining thread gets a failure."""
        began = time.perf_counter()
        try:
            for step in self._steps:
                if isinstance(step, _Known):
                    self.known = step
                    note("restore", "key", began)
                elif isinstance(step, _Found):
                    self.found = step
                    note("restore", "fetch", began)
                    self._end()
                else:
                    self.explanation = step
                    log.info("restore.miss reason=%s", step)
                began = time.perf_counter()
        except Exception as error:
            if self.done.is_set():  # only the explanation failed
                log.info("restore.not_explained error=%s", error)
            else:
                self.found.fail(_text(error))
        finally:
            self._end()

    def _end(self) -> None:
        if not self.done.is_set():
            if not self.found.fetched.files:
                self._at_miss()
            self.done.set()
