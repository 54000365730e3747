"""The restore: everything from the key to verified packs, on a thread of its own beside the loading of the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from compile_cache.cache import CompileCache, Fetched
from compile_cache.directory import CacheDirectory
from compile_cache.environment import Environment, cpu_threads, detect_environment, observe_environment
from compile_cache.errors import StoreUnavailable
from compile_cache.key import CacheKey
from compile_cache.model_version import model_name, model_version
from compile_cache.pack import Limits
from compile_cache.report import RestoreReport
from compile_cache.settings import Settings
from compile_cache.store import ObjectStore, open_store


class Restore:
    """Fetches on its thread; `join` then installs what was fetched, unless torch contradicts the environment."""

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        model: str,
        sources: Sequence[str | Path],
        environ: MutableMapping[str, str],
    ) -> None:
        self.report = RestoreReport()
        self._settings = settings
        self._directory = directory
        self._model = model
        self._sources = sources
        self._environ = environ
        self._limits = Limits(size_bytes=settings.max_restore_bytes)
        self._abandoned = threading.Event()
        self._thread = self._threaded(self._run)
        self._store: ObjectStore | None = None
        self._detected: Environment | None = None
        self._version = ""
        self._fetched = Fetched()
        self._failure: Exception | None = None
        # Inductor looks CPU code up by torch's thread count: fix what torch would choose, before it is imported.
        environ.setdefault("OMP_NUM_THREADS", str(cpu_threads(environ)))

    @staticmethod
    def _threaded(work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name="compile-cache-restore", daemon=True)

    def start(self) -> None:
        """Begin on a thread of its own."""
        self._thread.start()

    def abandon(self) -> None:
        """Fetch no more."""
        self._abandoned.set()

    @property
    def location(self) -> str:
        """Where the store is, for people."""
        return self._store.location if self._store else self._settings.store

    def _run(self) -> None:
        try:
            self._store = open_store(self._settings)
            self._detected = detect_environment(str(self._directory.path), self._options(), self._environ)
            self._version = self._settings.model_version or model_version(self._model, self._sources, self._environ)
            self._fetched = self._cache(self._store, self._detected).fetch(self._abandoned)
        except Exception as error:  # handed to the thread that joins, which raises it
            self._failure = error

    def _options(self) -> str:
        """What decides which graphs are compiled, and how."""
        return f"{self._settings.scope} {self._settings.mode} dynamic={self._settings.dynamic}"

    def _cache(self, store: ObjectStore, environment: Environment) -> CompileCache:
        name = self._settings.model_name or model_name(self._model)
        key = CacheKey.of(environment, name, self._version)
        return CompileCache(store, key, environment, self._directory, self._limits)

    def join(self, timeout_s: float) -> CompileCache | None:
        """Wait, and install what was fetched. The cache that then publishes; None if the key is not known.

        Sets `report`. Imports torch, to compare it with the environment that the key was made of.

        Raises:
            OSError: the cache directory cannot be written.
        """
        deadline = time.monotonic() + timeout_s
        self._wait_until(deadline)
        if self._store is None or self._detected is None or not self._version:
            self._report("failed", str(self._failure))
            return None
        observed = observe_environment(self._detected)
        cache = self._cache(self._store, observed)
        differences = self._detected.differences(observed)
        if differences:
            self._fetch_again(cache, deadline)
        if self._failure is not None:
            self._report("failed", str(self._failure))
            return cache
        self.report.files = cache.install(self._fetched)
        said = "torch says otherwise: " + "; ".join(differences) if differences else ""
        if self.report.files:
            self._report("hit", said)
        else:
            self._report("discarded" if said else "miss", said or f"nothing in {cache.key.prefix}")
        return cache

    def _wait_until(self, deadline: float) -> None:
        """Wait for the thread; when the time is up, let it end by itself, and count it as failed."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            limit_s = self._settings.restore_timeout_s
            self._failure = StoreUnavailable(f"not fetched within {limit_s:g} s from {self.location}")
            self.abandon()

    def _fetch_again(self, cache: CompileCache, deadline: float) -> None:
        """Drop what was fetched for an environment that is not this one, and fetch what `cache` is for."""
        if self._thread.is_alive():
            return
        self._fetched, self._failure = Fetched(), None

        def fetch() -> None:
            try:
                self._directory.empty_inbox()
                self._fetched = cache.fetch(self._abandoned)
            except Exception as error:  # handed to the thread that joins
                self._failure = error

        self._thread = self._threaded(fetch)
        self._thread.start()
        self._wait_until(deadline)

    def _report(self, outcome: str, reason: str) -> None:
        self.report.outcome, self.report.reason = outcome, reason
        self.report.packs = len(self._fetched.packs)
        self.report.refused = list(self._fetched.refused)
        self.report.stored_bytes = self._fetched.stored_bytes
        self.report.seconds = self._fetched.seconds
