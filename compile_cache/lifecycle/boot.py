"""One boot: restore while torch and the weights load, compile, warm up, report, publish.

This module catches the failures of the other parts, logs them, and goes on with a slower boot. Background threads hand
their failures over. A region falls back by itself. Errors of the caller's own code pass through.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from compile_cache.errors import CompileCacheError, NotRestored, SettingsError, log
from compile_cache.inductor.counters import CompileCounts, read_counts, repeated
from compile_cache.lifecycle.boot_report import BootReport, RestoreReport
from compile_cache.lifecycle.prediction import Prediction
from compile_cache.lifecycle.warm_up_call import call_as_cog
from compile_cache.settings import Settings
from compile_cache.timeline import Timeline

if TYPE_CHECKING:
    from torch import nn

    from compile_cache.background.orders import Orders
    from compile_cache.lifecycle.model_thread import ModelThread
    from compile_cache.lifecycle.publisher import Publisher
    from compile_cache.lifecycle.restore import Restore
    from compile_cache.serving.regions import Regions
    from compile_cache.storage.directory import CacheDirectory
    from compile_cache.weights.weight_files import Weights

T = TypeVar("T")

# In a process of one answer, compiles begin in the first half minute of the warm-up.
_ONE_ANSWER_S = 30.0
_LONGEST_PRELOAD_S = 60.0
# Kept with a version's code: see calls/first_calls.
_FIRST_CALLS = "first_calls.json"
_observed: list[Boot] | None = None


def boot(
    model: str,
    *,
    sources: Sequence[str | Path] = (),
    weights: Weights = False,
    environ: MutableMapping[str, str] = os.environ,
) -> Boot:
    """Begin a boot: claim the cache directory, point torch at it, and start the restore.

    Call it before torch is imported, or at least before anything is compiled. Use it as a context manager, whose end is
    READY. In the library's own processes, which may import the caller's module, it restores and copies nothing.

    Args:
        model: a hub id, with `@revision` if it is not the default one, or a model's folder.
        sources: files and folders with the caller's own Python code that the model runs.
        weights: what `to_gpu` will move. True is `model`; else a folder, a hub id, a safetensors file, or a list of
            these. They are read from now on, and copied to the GPU from `importing` on, or from `to_gpu` on if they are
            downloaded later. CUDA's variables are read now, and no fork of this process may use CUDA.
        environ: the variables with the settings. torch's cache paths are written into it.

    Raises:
        SettingsError: a `COMPILE_CACHE_*` variable is wrong, `sources` is no list, or a path in it does not exist.
        WeightsError: weights that Cog manages did not arrive.
    """
    from compile_cache import child_process
    from compile_cache.lifecycle.host import keep_worker_alive_on_interrupt, name_user, resolve_cold_start, show_log

    show_log()
    settings = resolve_cold_start(Settings.from_env(environ))
    if child_process.is_child:
        settings, weights = replace(settings, scope="off", require="off"), False
    if settings.signing_key or settings.trusted_keys:
        from compile_cache.storage.rules import Rules

        Rules.of(settings)  # an invalid key fails here, and not in the restore
    if isinstance(sources, str | Path):
        raise SettingsError(f"boot() takes a list of sources, not {sources!r}: give [{sources!r}]")
    if missing := [str(source) for source in sources if not Path(source).exists()]:
        raise SettingsError(f"boot() has sources that do not exist: {', '.join(missing)}. They start at {Path.cwd()}.")
    keep_worker_alive_on_interrupt()
    name_user(environ)
    begun = Boot(settings, model, [Path(source).absolute() for source in sources], environ, weights)
    if _observed is not None:
        _observed.append(begun)
    return begun


@contextlib.contextmanager
def observed_boots() -> Iterator[list[Boot]]:
    """A list of all boots that begin in this process while the context lasts."""
    global _observed
    outer, _observed = _observed, []
    try:
        yield _observed
    finally:
        _observed = outer


class Boot:
    """A boot in progress, its report, and the copies of its weights that are made early. `boot` makes one."""

    def __init__(
        self,
        settings: Settings,
        model: str,
        sources: Sequence[str | Path],
        environ: MutableMapping[str, str],
        weights: Weights = False,
    ) -> None:
        self._timeline = timeline = Timeline()
        self.report = BootReport(
            store=settings.store,
            scope=settings.scope,
            mode=settings.mode,
            path=settings.report,
            started_s=timeline.started_s,
            spans=timeline.spans,
        )
        self._settings = settings
        self._directory: CacheDirectory | None = None
        self._restore: Restore | None = None
        self._orders: Orders | None = None
        self._restored_files: frozenset[str] = frozenset()
        self._preloading: threading.Thread | None = None
        self._regions: Regions | None = None
        self._counted_before = read_counts()
        self._preparing = threading.RLock()
        self._has_tried_regions = self._has_entered = False
        self._publisher: Publisher | None = None
        self._thread: ModelThread | None = None
        self._wait_for_weights(model)
        if settings.enabled:
            self._begin(model, sources, environ)
        from compile_cache.weights.early_weights import EarlyWeights

        self.weights = EarlyWeights(model, weights)
        if weights and "torch" in sys.modules:
            self.weights.begin()

    def _wait_for_weights(self, model: str) -> None:
        """Wait until the model's folder is there, if Cog manages its weights.

        Raises:
            WeightsError: it did not arrive.
        """
        from compile_cache.key.managed_weights import ManagedWeights, managed_weights

        managed: ManagedWeights | None = None
        with self._degrading("read which weights Cog manages; the folder counts as any other"):
            managed = managed_weights(model)
        if managed is not None:
            with self.timed("managed_weights"):
                managed.wait(self._settings.weights_timeout_s)

    def _begin(self, model: str, sources: Sequence[str | Path], environ: MutableMapping[str, str]) -> None:
        """Claim the cache directory, and start the restore."""
        from compile_cache.lifecycle.host import claim_workplace

        self._directory, self._settings = claim_workplace(self._settings, model, self._warn)
        if self._directory is None:
            return
        self.report.cache_dir = str(self._directory.path)
        self._directory.activate(environ)
        from compile_cache.background.orders import Orders

        self._orders = Orders(self._settings, self._directory)
        if self._settings.store != "off" or self._settings.layers:
            with self._degrading("start the restore; compiling anew"):
                from compile_cache.lifecycle.restore import Restore

                at_miss = self._begin_to_compile
                self._restore = Restore(self._settings, self._directory, model, sources, environ, at_miss=at_miss)
        if self._restore is None:
            self._begin_to_compile()

    def _begin_to_compile(self) -> None:
        """In `block`, let the second process import torch's compiler beside what this one imports."""
        if self._orders is not None and self._settings.cold_start == "block":
            with self._degrading("start the second process early"):
                self._orders.queue.begin()

    def __enter__(self) -> Boot:
        self._has_entered = True
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """READY, once: write the report and start to publish. An error of the caller's code is logged, unless somebody
        observes the boots; then nothing is published.

        Raises:
            NotRestored: the settings require a restored boot, and this is none. It publishes nothing either.
        """
        from compile_cache.lifecycle.host import log_failed_setup

        if self.report.ready_s:
            return  # a later block adds to what is published
        if error is not None and _observed is None:
            log_failed_setup(error)
        (self.weights.end if error is None else self.weights.drop)()
        if self._orders is not None and (error is not None or self._regions is None):
            self._orders.queue.release()  # else regions do it
        if error is not None:
            if self._restore is not None:
                self._restore.abandon()
            return
        if self._regions is None:
            self._join()
        elif "warm_up" in self.report.phases:
            self._regions.name_unused(self.counts().graphs)
        self._complete_report()
        if self._settings.require == "hit" and (missing := self.report.missing()):
            failure = NotRestored(
                f"COMPILE_CACHE_REQUIRE=hit, but this boot is not restored and precompiled: {'; '.join(missing)}. Fill "
                "the store with `compile-cache fill`, in this image and on this kind of machine, or unset the variable."
            )
            log_failed_setup(failure)
            raise failure
        if self._publisher is not None:
            with self._degrading("start publishing"):
                self._publisher.start(self._regions)
        if self._regions is not None:
            with self._degrading("load the other precompiled regions"):
                self._regions.supply.release()

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the context's seconds to the report under `phase`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.report.phases[phase] = self.report.phases.get(phase, 0.0) + seconds
            self._timeline.add("setup", phase, started, seconds)

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """Import torch and the model's packages in this context, before the weights load. With `weights`, torch is
        imported first, and the weights are copied to the GPU beside the rest.

        Python's collector of cyclic garbage waits meanwhile: it takes a fifth of the time and finds little. Later it
        skips what there is by then, unless torch was imported before: it may be a model, which is to be freed one day.

        At the end, restored functions begin to load on a thread. What that needs is imported first: about 0.1 s where
        diffusers is imported. If the restore has not ended, or has brought no functions, `compile` loads them.
        """
        collects, has_no_model = gc.isenabled(), "torch" not in sys.modules
        gc.disable()
        try:
            with self.timed("import"):
                self.weights.begin()
                yield
        finally:
            if has_no_model:
                gc.freeze()
            if collects:
                gc.enable()
        self._preload()
        self._make_first_calls()

    def _preload(self) -> None:
        """Load restored functions on a thread while the weights load."""
        if self._preloading is not None or self._restore is None or not self._restore.has_ended:
            return
        from compile_cache.inductor.function_file import has_artifacts

        with self.timed("preload"):
            self._join()
            regions = self._prepared_regions() if has_artifacts(self._restored_files) else None
            if regions is not None:
                with self._degrading("load precompiled regions ahead"):
                    self._preloading = regions.supply.preload()

    def to_gpu(self, model: T) -> T:
        """Move a pipeline or module to the GPU, as its `.to("cuda")` does: each weight that is still as it lies in the
        files of `boot(weights=…)` takes its copy, and all others are moved. Without a GPU, it stays where it is. Call
        it for each model, before `warm_up`: that frees the copies that are left.

        Raises:
            Exception: any of `.to("cuda")`.
        """
        from compile_cache.weights.early_weights import has_gpu

        moved: Any = model
        with self.timed("to_gpu"):
            self.weights.begin()
            parts = getattr(moved, "components", None)  # of a pipeline; a module may have any other thing there
            self.weights.give([moved, *(parts.values() if isinstance(parts, Mapping) else ())])
            if has_gpu():
                moved = moved.to("cuda")
        return moved  # type: ignore[no-any-return]

    def model_thread(self) -> ModelThread:
        """The thread that is to make all calls of the model. A version's first boot on a GPU writes down which calls of
        operators were slow in the warm-up; later ones make these here, with zeros, while the weights load."""
        from compile_cache.lifecycle.model_thread import ModelThread

        if self._thread is None:
            self._thread = ModelThread()
            self._make_first_calls()
        return self._thread

    def kept_file(self, name: str) -> Path | None:
        """Where the caller keeps a file of its own with this version's code: it is there if an earlier boot has written
        it. Whatever it has in it from READY on is stored, within seconds, and at the exit. None if it is not there and
        would not be stored, or until `importing` or `compile` has taken what the restore brought. Of two boots at once,
        the file that was written last counts.

        Raises:
            SettingsError: no pack can have a file of this name. The message says why.
        """
        if self._directory is None:
            return None
        path = self._directory.keep(name)
        if self._publisher is None or not (path.exists() or self._settings.may_publish):
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def prepare(self, function: Callable[[], None]) -> None:
        """Have the second process call `function` before it compiles, for example to register an attention. If no other
        process can import `function`, the boot warns."""
        with self._degrading("have the second process prepare itself"):
            from compile_cache.inductor.torch_state import prepare_with

            prepare_with(function)

    def compile(
        self, module: nn.Module, *, whole: bool = False, shares_weights: bool = False, after_ready: bool = False
    ) -> None:
        """Compile the repeated blocks of `module`, or all of it: with `whole`, with the scope `whole`, or if no blocks
        repeat. Waits for the restore first. With the scope `off`, or after a failure, `module` stays eager.

        Code of a second process is compared in the prediction after it arrived, and serves from the next one on. With
        `shares_weights`, that process reads the same parameters, because two copies may not fit on the GPU. Then no
        call may write to them.

        `after_ready` is for a module that a prediction calls once, such as a text encoder: to load its code takes
        longer than the code saves in one prediction. In a Cog server that stays (`COMPILE_CACHE_UNSEEN=background`),
        code that is stored for a call of the warm-up is loaded right after READY, and until then such calls are eager.
        If it does not fit then, the second process makes other code. This holds for a class if it is said of all its
        modules. Code that is not stored is made as always; but a process of one answer that can compile ahead of time
        makes it only once something of this version is stored.
        """
        if not self._settings.enabled:
            return
        with self.timed("join"):
            self._join()
        self.report.restore.waited_s = self.report.phases["join"]
        with self.timed("compile_setup"), self._degrading("set up compilation; serving eager"):
            if self._preloading is not None:
                self._preloading.join(_LONGEST_PRELOAD_S)
            regions = self._prepared_regions()
            if regions is not None:
                regions.compile(module, whole, shares_weights, after_ready and self._has_entered)
                self.report.regions = regions.reports

    def _prepared_regions(self) -> Regions | None:
        """The regions of this boot, with their imports done; None if it cannot be set up.

        One try only: after a failed import of torch's compiler, the next one fails for another reason.
        """
        with self._preparing:
            if not self._has_tried_regions and self._directory is not None:
                self._has_tried_regions = True
                with self._degrading("set up compilation; serving eager"):
                    from compile_cache.serving.regions import Regions

                    is_hit = self.report.restore.outcome == "hit"
                    self._regions = Regions(self._settings, self._directory, is_hit, self._orders)
                    if self.report.ready_s:
                        self._regions.supply.release()
            return self._regions

    @property
    def compiles_in_background(self) -> bool:
        """Whether a call that the warm-up leaves out may get code all the same, stored or of the second process: not in
        `cog run` and `fill`, nor if there are stored graphs, which only a warm-up traces."""
        from compile_cache.inductor.function_file import GRAPHS

        has_graphs = any(path.endswith(GRAPHS) for path in self._restored_files)
        return self._settings.cold_start == self._settings.unseen == "background" and not has_graphs

    def warm_up(self, call: Callable[..., Any], /, **inputs: Any) -> None:
        """Call the model like a prediction, with the same thread-local state, so that its code gets compiled.

        `call` is repeated as long as something new is compiled for it. It may be the predictor's
        own `run` or `predict`: inputs that are not given have the defaults of Cog's `Input()`, and a stream is taken to
        its end.

        Raises:
            Exception: any error of `call`.
        """
        if self._regions is not None and not self._has_entered:
            self._warn("boot() is used without `with`, so nothing is stored, and nothing is compiled later")
        until_s = self._no_compile_begins_from()

        noting = iter([self._noting_first_calls()])  # of the first round, which is eager

        def make_calls() -> None:
            with next(noting, contextlib.nullcontext()):
                call_as_cog(call, inputs)

        def warm_up() -> bool:
            if self._regions is not None:
                return self._regions.warm_up(make_calls, until_s)
            make_calls()
            return False

        self.weights.end()
        with self.timed("warm_up"):
            if not repeated(warm_up):
                self._warn("after several rounds of the same input the warm-up still compiles; so may predictions")

    def _make_first_calls(self) -> None:
        """Make the calls that an earlier boot has written down, on the model's thread, while the weights load."""
        if self._thread is not None and (path := self.kept_file(_FIRST_CALLS)) is not None:
            self._thread.make_first_calls(path, lambda: not self.report.phases.keys().isdisjoint({"to_gpu", "join"}))

    def _noting_first_calls(self) -> contextlib.AbstractContextManager[None]:
        """While the context lasts, write down which calls on the model's thread are slow."""
        if self._thread is None or (path := self.kept_file(_FIRST_CALLS)) is None:
            return contextlib.nullcontext()
        return self._thread.noting(path)

    def _no_compile_begins_from(self) -> float:
        """From when on, on the clock of `time.monotonic`, the warm-up waits for no compile that has not begun."""
        budget_s, now_s = self._settings.setup_budget_s, time.monotonic()
        if budget_s is None:  # whoever waits for one answer shall have it, and each run shall compile something
            return now_s + _ONE_ANSWER_S
        return now_s + budget_s - self._timeline.age_s if budget_s else math.inf

    def prediction(self) -> Prediction:
        """A prediction: use it as a context manager around the work of one. It counts its calls from now on."""
        return Prediction(self.report, self._regions)

    def count_again(self, served: Mapping[str, Mapping[str, int]]) -> None:
        """Add the calls that `Prediction.served` counted once more, after a replay of their recording, such as a CUDA
        graph."""
        for region in self._regions.by_class.values() if self._regions else ():
            region.served.update(served.get(region.report.name, {}))

    @property
    def waiting(self) -> int:
        """How many kinds of calls are served eager until the second process has compiled them, or until their stored
        code is loaded after READY."""
        return self._regions.supply.waiting if self._regions else 0

    def wait_compiled(self, timeout_s: float) -> bool:
        """Wait until none of the calls so far is `waiting`; False after `timeout_s`."""
        return self._regions is None or self._regions.supply.wait(timeout_s)

    def counts(self) -> CompileCounts:
        """torch's lookups and compiles since this boot began, and its regions' functions; no `kernels_compiled`."""
        counts = read_counts().since(self._counted_before)
        counts.precompiled_loaded = sum(region.loaded for region in self.report.regions)
        counts.precompiled_made = sum(region.made for region in self.report.regions)
        return counts

    def wait_published(self, timeout_s: float) -> bool:
        """Wait until all artifacts are in the store, or publishing them failed; True only if all are stored. Code that
        may not be published, or not yet, does not count. With the scope `off`, there is nothing to store."""
        return self._publisher.wait(timeout_s) if self._publisher else not self._settings.enabled

    def end_publishing(self) -> None:
        """Publish the rest within the exit budget. After that, nothing is published or merged."""
        if self._publisher is not None:
            self._publisher.flush()

    def _join(self) -> None:
        """Wait for the restore, compare its environment with torch, and move the verified files in. Once."""
        with self._preparing:
            if self._directory is None or self._restore is None or self.report.restore.outcome != "off":
                return
            self.report.restore = RestoreReport("failed", "see the warnings")
            with self._degrading("restore compiled artifacts; compiling anew"):
                from compile_cache.lifecycle.publisher import Publisher

                self.report.restore, publication = self._restore.join()
                self.report.store = self._restore.location
                if publication is not None:
                    key = publication.packs.key
                    self.report.model_name = key.model_name
                    self.report.model_version = key.model_version
                    self.report.environment = key.environment
                    self._publisher = Publisher(publication, self.report, self._settings)
                self._restored_files = frozenset(self._directory.scan())

    def _complete_report(self) -> None:
        from compile_cache.lifecycle.host import bytecode_warnings, process_age_s

        if self._restore is not None and self.report.restore.outcome == "miss" and self._restore.explanation:
            self.report.restore.reason = self._restore.explanation
        for warning in [*(self._regions.unknown_class_warnings() if self._regions else ()), *bytecode_warnings()]:
            self._warn(warning)
        self.report.ready_s = self._timeline.age_s
        with self._degrading("count what was compiled"):
            self._count()
            self.report.process_s = process_age_s()
        for line in self.report.lines():
            log.info(line)
        self.report.save()
        self._timeline.end_setup()

    def _count(self) -> None:
        counts = self.counts()
        if self._directory is not None:
            new = self._directory.scan().keys() - self._restored_files
            counts.kernels_compiled = sum(path.endswith((".so", ".cubin", ".hsaco")) for path in new)
        self.report.counts = counts
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self.report.device_peak_bytes = torch.cuda.max_memory_allocated()

    @contextlib.contextmanager
    def _degrading(self, what: str) -> Iterator[None]:
        """The border of a boot: a failure costs only speed. The report gets one line, the log gets the traceback."""
        try:
            yield
        except Exception as error:
            is_known = isinstance(error, CompileCacheError | OSError)
            self._warn(f"could not {what}: {error if is_known else repr(error)}", None if is_known else error)

    def _warn(self, line: str, unknown: Exception | None = None) -> None:
        log.warning(line, exc_info=unknown)
        self.report.warnings.append(line)
