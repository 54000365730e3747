"""The restore: everything from the key to verified packs, on a thread of its own beside the loading of the weights."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from compile_cache.errors import StoreError, StoreUnavailable
from compile_cache.key.environment import Environment, cpu_threads, observe_environment
from compile_cache.key.identity import environment_for, key_for, version_for
from compile_cache.lifecycle.report import RestoreReport
from compile_cache.pack.manifest import Limits
from compile_cache.pack.signing import Signer, TrustedKeys
from compile_cache.settings import Settings
from compile_cache.store.base import Stores
from compile_cache.store.opening import open_stores
from compile_cache.versions.cache import CompileCache, Fetched
from compile_cache.versions.catalog import MOST_PREDECESSORS, explain_miss, predecessors
from compile_cache.versions.directory import CacheDirectory
from compile_cache.versions.lease import Lease

log = logging.getLogger("compile_cache")

# A compiling process may hold up its own threads for seconds: it is given more time than a publishing one.
_COMPILE_EXPIRY_S = 20.0
_PEER_POLL_S = 1.0


class Restore:
    """Fetches on its thread; `join` then installs what was fetched, unless torch contradicts the environment.

    `lease` is held from then on where other boots wait for what this one compiles.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        model: str,
        sources: Sequence[str | Path],
        environ: MutableMapping[str, str],
    ) -> None:
        self.report = RestoreReport()
        self.lease: Lease | None = None
        self._settings = settings
        self._directory = directory
        self._model = model
        self._sources = sources
        self._environ = environ
        self._abandoned = threading.Event()
        self._fetching = _Fetching(self._run)
        self._stores: Stores | None = None
        self._detected: Environment | None = None
        self._version = ""
        # Inductor looks CPU code up by torch's thread count: fix what torch would choose, before it is imported.
        environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(environ)))

    def start(self) -> None:
        """Begin on a thread of its own."""
        self._fetching.start()

    def abandon(self) -> None:
        """Fetch no more, and let nobody wait for this boot."""
        self._abandoned.set()
        if self.lease is not None:
            self.lease.give_up()

    @property
    def location(self) -> str:
        """Where the stores are, for people."""
        return self._stores.reading.location if self._stores else self._settings.store

    @property
    def wait_s(self) -> float:
        """The longest that a boot waits for its restore, from its start."""
        return self._settings.restore_timeout_s + self._settings.peer_wait_s

    def _run(self, fetching: _Fetching) -> None:
        self._stores = open_stores(self._settings)
        self._detected = environment_for(self._settings, self._directory.path, self._environ)
        self._version = version_for(self._settings, self._model, self._sources, self._environ)
        self._fetch(self._cache(self._stores, self._detected), fetching)

    def _cache(self, stores: Stores, environment: Environment) -> CompileCache:
        key = key_for(self._settings, environment, self._model, self._version)
        limits = Limits(size_bytes=self._settings.max_restore_bytes)
        signer = Signer(self._settings.signing_key) if self._settings.signing_key else None
        trusted = TrustedKeys(self._settings.trusted_keys)
        return CompileCache(stores, key, environment, self._directory, limits, trusted, signer)

    def _fetch(self, cache: CompileCache, fetching: _Fetching) -> None:
        """What this key has; else what another boot is compiling for it; else another version's; else say why not."""
        fetching.cache = cache
        fetching.fetched = cache.fetch(self._abandoned)
        if cache.is_empty and self._settings.peer_wait_s and self._settings.may_publish:
            fetching.fetched = self._wait_for_peer(cache)
        if not cache.is_empty:
            return
        fetching.fetched = self._seed(cache, fetching.fetched)
        if not fetching.fetched.files:
            fetching.done.set()  # nobody needs to wait for the explanation
            fetching.explanation = explain_miss(cache.stores.reading, cache.key, cache.environment)

    def _wait_for_peer(self, cache: CompileCache) -> Fetched:
        """Wait, up to the time allowed, while another boot holds the lease to compile for this key; else take it."""
        lease = Lease(cache.writing, cache.key.prefix + "compile.lease", _COMPILE_EXPIRY_S)
        started = time.monotonic()
        deadline = started + self._settings.peer_wait_s
        try:
            while not (is_ours := lease.acquire()) and time.monotonic() < deadline:
                if self._abandoned.wait(_PEER_POLL_S * random.uniform(0.5, 1.5)):
                    break
        except StoreError as error:  # advisory: without it, two boots compile the same
            log.info("restore.no_lease error=%s", error)
            is_ours = False
        self.report.waited_for_peer_s = time.monotonic() - started
        self.lease = lease if is_ours else None
        try:
            fetched = cache.fetch(self._abandoned)
        except Exception:
            lease.give_up()
            raise
        if not cache.is_empty or self._abandoned.is_set():
            self.lease = None
            lease.give_up()
        return fetched

    def _seed(self, cache: CompileCache, own: Fetched) -> Fetched:
        """What the newest other version of the model has for this environment."""
        refused, seconds = own.refused, own.seconds
        for key in predecessors(cache.stores.reading, cache.key)[:MOST_PREDECESSORS]:
            fetched = cache.for_version(key).fetch(self._abandoned)
            refused, seconds = refused + fetched.refused, seconds + fetched.seconds
            if fetched.files:
                return replace(fetched, refused=refused, seconds=seconds, seeded_from=key.model_version)
        return replace(own, refused=refused, seconds=seconds)

    def join(self, timeout_s: float) -> CompileCache | None:
        """Wait, and install what was fetched. The cache that then publishes; None if the key is not known.

        Sets `report`. Imports torch, to compare it with the environment that the key was made of.

        Raises:
            OSError: the cache directory cannot be written.
        """
        deadline = time.monotonic() + timeout_s
        self._wait_until(deadline)
        if self._stores is None or self._detected is None or not self._version:
            self._report("failed", str(self._fetching.failure))
            return None
        observed = observe_environment(self._detected)
        differences = self._detected.differences(observed)
        if differences:
            self._fetch_again(observed, deadline)
        failed = self._fetching.failure is not None or self._fetching.cache is None
        # A thread that has not ended still uses its own.
        cache = self._fetching.cache if not failed else None
        if cache is None:
            self._report("failed", str(self._fetching.failure))
            if self._fetching.done.is_set():
                self._directory.empty_inbox()  # a disk that was too small for it is needed to compile
            return self._cache(self._stores, observed)
        try:
            self.report.files = cache.install(self._fetching.fetched)
        except OSError as error:
            self._report("failed", str(error))
            raise
        said = "torch says otherwise: " + "; ".join(differences) if differences else ""
        if self._fetching.fetched.seeded_from:
            self._report("seeded", said or f"nothing in {cache.key.prefix}")
        elif self.report.files:
            self._report("hit", said)
        else:
            self._report("discarded" if said else "miss", said or f"nothing in {cache.key.prefix}")
        return cache

    def explain(self) -> None:
        """Add to the report why nothing was found, if that is known by now."""
        if self.report.outcome == "miss" and self._fetching.explanation:
            self.report.reason = self._fetching.explanation

    def _wait_until(self, deadline: float) -> None:
        """Wait for the thread; when the time is up, let it end by itself, and count it as failed."""
        self._fetching.done.wait(max(0.0, deadline - time.monotonic()))
        if not self._fetching.done.is_set():
            self._fetching.failure = StoreUnavailable(f"not fetched within {self.wait_s:g} s from {self.location}")
            self.abandon()

    def _fetch_again(self, observed: Environment, deadline: float) -> None:
        """Drop what was fetched for an environment that is not this one, and fetch what this one has."""
        if not self._fetching.done.is_set() or self._stores is None:
            return
        if self.lease is not None:
            self.lease.give_up()
            self.lease = None
        stores = self._stores

        def run(fetching: _Fetching) -> None:
            self._directory.empty_inbox()
            self._fetch(self._cache(stores, observed), fetching)

        self._fetching = _Fetching(run)
        self._fetching.start()
        self._wait_until(deadline)

    def _report(self, outcome: str, reason: str) -> None:
        fetched = self._fetching.fetched
        self.report.outcome, self.report.reason = outcome, reason
        self.report.packs = len(fetched.packs)
        self.report.refused = list(fetched.refused)
        self.report.stored_bytes = fetched.stored_bytes
        self.report.seconds = fetched.seconds
        self.report.seeded_from = fetched.seeded_from
        self.report.problems = list(getattr(self._stores.reading, "problems", ())) if self._stores else []


class _Fetching:
    """One fetch on a thread of its own, and what came of it. `done` is set when `fetched` and `failure` are final."""

    def __init__(self, work: Callable[[_Fetching], None]) -> None:
        self.cache: CompileCache | None = None
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
                self.failure = error  # handed to the thread that joins
        finally:
            self.done.set()
