"""One boot: restore while torch and the weights load, compile, warm up, report, publish.

Failures of the parts below are caught here, logged, and turned into a slower boot; the background threads hand theirs
over, and a region that cannot be compiled falls back by itself (compiler.py). What the caller's own code raises passes
through.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from compile_cache.errors import CacheDirectoryError, CompileCacheError, SettingsError
from compile_cache.lifecycle.preload import Preloading
from compile_cache.lifecycle.report import BootReport
from compile_cache.regions.counters import CompileCounts, read_counts
from compile_cache.settings import Settings
from compile_cache.versions.directory import CacheDirectory

if TYPE_CHECKING:
    from torch import nn

    from compile_cache.lifecycle.publish import Publisher
    from compile_cache.lifecycle.restore import Restore
    from compile_cache.regions.compiler import Compiler
    from compile_cache.versions.cache import CompileCache
    from compile_cache.versions.lease import Lease

log = logging.getLogger("compile_cache")

_KERNEL_SUFFIXES = (".so", ".cubin", ".hsaco")
_MOST_ROUNDS = 3


def boot(model: str, *, sources: Sequence[str | Path] = (), environ: MutableMapping[str, str] = os.environ) -> Boot:
    """Begin a boot: claim the cache directory, point torch at it, and start the restore.

    Call it before torch is imported, or at least before anything is compiled, and use it as a context manager: its end
    is READY.

    Args:
        model: a hub id, with `@revision` if it is not the default one, or a model's folder.
        sources: files and folders of the caller's own Python code that the model runs.
        environ: where settings are read, and where torch's cache paths are set.

    Raises:
        SettingsError: a `COMPILE_CACHE_*` variable is wrong, or one of `sources` is not there.
    """
    settings = Settings.from_env(environ)
    if missing := [str(source) for source in sources if not Path(source).exists()]:
        raise SettingsError(f"sources of the model are not there: {', '.join(missing)}. Give paths from {Path.cwd()}.")
    return Boot(settings, model, sources, environ)


class Boot:
    """A boot in progress, and its report. `boot` makes one."""

    def __init__(
        self, settings: Settings, model: str, sources: Sequence[str | Path], environ: MutableMapping[str, str]
    ) -> None:
        self._started = time.perf_counter()
        self.report = BootReport(store=settings.store, scope=settings.scope, mode=settings.mode)
        self._settings = settings
        self._environ = environ
        self._directory: CacheDirectory | None = None
        self._restore: Restore | None = None
        self._compiler: Compiler | None = None
        self._cache: CompileCache | None = None
        self._publisher: Publisher | None = None
        self._preloading: Preloading | None = None
        self._preparing = threading.RLock()
        self._lease: Lease | None = None
        self._joined = False
        self._failed = False
        self._explain: Callable[[], None] | None = None
        self._restored: frozenset[str] = frozenset()
        self._counted_before = read_counts()
        _keep_worker_alive_on_interrupt()
        if settings.enabled:
            self._claim_directory()
            self._start_restore(model, sources)

    def _claim_directory(self) -> None:
        """Own a cache directory at the fixed path; else one that only this boot has; else serve eager."""
        try:
            self._directory = CacheDirectory.claim(Path(self._settings.dir))
        except CacheDirectoryError as error:
            self._warn(f"{error} This boot compiles into a temporary folder, and restores and publishes nothing.")
            with self._degrading("make a temporary cache directory; serving eager"):
                self._directory = CacheDirectory.temporary()
            self._settings = replace(self._settings, store="off", layers=(), publish=False)
        if self._directory is None:
            self._settings = replace(self._settings, scope="off")
            return
        self.report.cache_dir = str(self._directory.path)
        self._directory.activate(self._environ)

    def _start_restore(self, model: str, sources: Sequence[str | Path]) -> None:
        if self._directory is None or (self._settings.store == "off" and not self._settings.layers):
            return
        from compile_cache.lifecycle.restore import Restore

        with self._degrading("start the restore; compiling anew"):
            self._restore = Restore(self._settings, self._directory, model, sources, self._environ)
            self._restore.start()

    def __enter__(self) -> Boot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """READY: write the report and start publishing. After an error of the caller's nothing is published."""
        if kind is not None:
            self._failed = True
            if self._restore is not None:
                self._restore.abandon()
            if self._lease is not None:
                self._lease.give_up()
            return
        if self._compiler is None:
            self._join()
        if self._explain is not None:
            self._explain()
        self.report.ready_s = time.perf_counter() - self._started
        with self._degrading("count what was compiled"):
            self._count()
            self.report.process_s = _process_age_s()
        for line in self.report.lines():
            log.info(line)
        self._write_report()
        with self._degrading("start publishing"):
            self._start_publishing()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the context's seconds to the report under `phase`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.report.phases[phase] = self.report.phases.get(phase, 0.0) + time.perf_counter() - started

    def preload(self) -> None:
        """Import what precompiled regions need, and load them, on a thread of its own, beside the loading of the
        weights; if none were restored, import torch's compiler.

        Call it when the caller's own imports are done: modules that import one another, begun from two threads in
        different order, can find each other half-made.
        """
        if self._settings.enabled and self._preloading is None:
            self._preloading = Preloading(self._load_precompiled)
            self._preloading.start()

    def compile(self, module: nn.Module, *, whole: bool = False) -> None:
        """Compile `module`'s repeated blocks, or `module` itself if it has none, or with `whole`, or if the scope is
        `whole`. Waits for the restore first. With the scope `off`, or if compiling cannot be set up, `module` stays
        eager."""
        if not self._settings.enabled:
            return
        with self.timed("join"):
            waiting = time.perf_counter()
            self._join()
            self.report.restore.waited_s += time.perf_counter() - waiting
        with self.timed("compile_setup"), self._degrading("set up compilation; serving eager"):
            if self._preloading is not None:
                self._preloading.wait()
            self._prepare_compiler().compile(module, whole)
            self.report.regions = [region.report for region in self._prepare_compiler().regions.values()]

    def _prepare_compiler(self) -> Compiler:
        """The compiler over the restored directory. Imports what it needs."""
        with self._preparing:
            if self._compiler is None:
                from compile_cache.regions.compiler import Compiler

                assert self._directory is not None
                self._compiler = Compiler(self._settings, self._directory)
            return self._compiler

    def _load_precompiled(self) -> bool:
        """Wait for the restore, and load the precompiled regions that it brought; whether there are any."""
        self._join()
        with self._degrading("load precompiled regions"):
            return self._prepare_compiler().prefetch() > 0
        return False

    def warm_up(self, call: Callable[[], Any]) -> None:
        """Call the model as predictions will, under the same thread-local state, so that all they need gets compiled.

        Where something was compiled for the first time, `call` is repeated until it compiles nothing more.

        Raises:
            Exception: whatever `call` raises.
        """
        with self.timed("warm_up"):
            for _ in range(_MOST_ROUNDS):
                before = read_counts()
                with self._compiler.watching() if self._compiler else contextlib.nullcontext():
                    call()
                after = read_counts()
                if after.misses == before.misses:
                    return
            self._warn(f"after {_MOST_ROUNDS} rounds of the same input the warm-up still compiles: predictions may too")

    def counts(self) -> CompileCounts:
        """What torch has looked up and compiled since this boot began, `kernels_compiled` left out."""
        return read_counts().since(self._counted_before)

    def wait_published(self, timeout_s: float) -> bool:
        """Block until what the warm-up compiled is in the store, or the attempt failed; False after `timeout_s`."""
        return self._publisher is None or self._publisher.wait(timeout_s)

    def _join(self) -> None:
        """Wait for the restore, compare its environment with torch, and take what it verified. Once."""
        with self._preparing:
            if self._restore is None or self._joined:
                return
            self._joined = True
            self._take_restored(self._restore)

    def _take_restored(self, restore: Restore) -> None:
        with self._degrading("restore compiled artifacts; compiling anew"):
            self._cache = restore.join(max(0.0, restore.wait_s - (time.perf_counter() - self._started)))
        self._lease, self._explain = restore.lease, restore.explain
        if self._failed and self._lease is not None:  # the caller's own error came while this thread waited
            self._lease.give_up()
        self.report.restore = restore.report
        self.report.store = restore.location
        if self._cache is not None:
            self.report.model_name = self._cache.key.model_name
            self.report.model_version = self._cache.key.model_version
            self.report.environment = self._cache.key.environment
        with self._degrading("list what was restored"):
            self._restored = frozenset(self._directory.scan() if self._directory else ())

    def _count(self) -> None:
        counts = self.counts()
        if self._directory is not None:
            new = self._directory.scan().keys() - self._restored
            counts.kernels_compiled = sum(path.endswith(_KERNEL_SUFFIXES) for path in new)
        self.report.counts = counts
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            before_checks = self._compiler.device_peak_bytes if self._compiler else 0
            self.report.device_peak_bytes = max(before_checks, torch.cuda.max_memory_allocated())

    def _start_publishing(self) -> None:
        if self._cache is None or not self._settings.may_publish:
            if self._lease is not None:
                self._lease.give_up()
            return
        from compile_cache.lifecycle.publish import Publisher

        compiler = self._compiler
        self._publisher = Publisher(
            self._cache,
            self.report.publish,
            _creator(),
            self._settings.exit_budget_s,
            changed=self._write_report,
            withheld=lambda: compiler.withheld if compiler else (),
            unread=lambda: compiler.unread_files() if compiler else (),
            is_compiling=lambda: compiler is not None and compiler.is_compiling,
            most_packs=self._settings.most_packs,
            lease=self._lease,
        )
        self._publisher.start()

    def _write_report(self) -> None:
        if self._settings.report is not None:
            with self._degrading(f"write the boot report to {self._settings.report}"):
                self.report.write(Path(self._settings.report))

    @contextlib.contextmanager
    def _degrading(self, what: str) -> Iterator[None]:
        """The one place where a failure becomes a slower boot: a clear line in the report, the traceback in the log."""
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, CompileCacheError | OSError)
            log.warning("boot.degraded", exc_info=None if is_known else error)
            self._warn(f"could not {what}: {error if is_known else repr(error)}")

    def _warn(self, line: str) -> None:
        log.warning(line)
        self.report.warnings.append(line)


def _keep_worker_alive_on_interrupt() -> None:
    """Under Cog, leave Ctrl-C to the server, which then stops this worker in order.

    A terminal sends SIGINT to both; a worker that takes it hangs in its teardown until it is killed, and never runs the
    exit hook. Only the main thread may set a handler, and only there does setup() run.
    """
    under_cog = "coglet" in sys.modules and threading.current_thread() is threading.main_thread()
    if under_cog and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _process_age_s() -> float:
    """Seconds since this process was started (proc(5): field 22 of stat, in clock ticks since the machine's start)."""
    with open("/proc/self/stat") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def _creator() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"compile_cache {version('cog-compile-cache')}"
    except PackageNotFoundError:
        return "compile_cache"
