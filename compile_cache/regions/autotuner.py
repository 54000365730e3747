"""Triton kernels that a warm boot reads, and those that it never will: the one adapter to Inductor's autotuner.

Autotuning compiles every candidate and uses one. Candidates are stored twice, as files of Triton's cache and inside
the FX-graph entries (Inductor's bundle), each with all its intermediate code. A warm boot needs of a candidate that
was there from the start its binary alone, because Inductor asks for all of those before it looks up the winner; of a
winner that coordinate descent found later, everything; and of the rest nothing.

All of this is private to torch. Where a torch has other names than 2.11 to 2.15, everything is kept, as torch does.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from compile_cache.regions.counters import REPLAYED

log = logging.getLogger("compile_cache")

_BINARIES = (".cubin", ".hsaco")
# Folders of Triton's cache whose binaries this process has put into FX-graph entries: a lookup asks for all of them.
_bundled: set[str] = set()
# What Inductor calls a kernel while it benchmarks a fusion; the kernel that is used has a name of its own.
_UNNAMED = "triton_"


def configure_autotuner() -> None:
    """Store no losers in FX-graph entries, count what lookups replay, and on torch 2.11 find what coordinate descent
    has found before. Each is left out where torch has no such names."""
    patches = [_count_replays, _trim_bundles]
    if torch.__version__ < "2.13":
        patches.append(_recheck_tuned)
    for patch in patches:
        try:
            patch()
        except (ImportError, AttributeError) as error:  # no Triton, or another torch
            log.info("autotuner.not_configured what=%s error=%s", patch.__name__, error)


def unread_files(paths: Iterable[str]) -> set[str]:
    """Those of the cache directory's `paths` that no warm boot will read: losers, and what winners leave behind.

    Call it after the kernels have run, which is when the winners are known.
    """
    if "torch._inductor.runtime.triton_heuristics" not in sys.modules:
        return set()
    folders: dict[str, list[str]] = {}
    for path in paths:
        parts = path.split("/")
        if parts[0] == "triton" and len(parts) == 3:
            folders.setdefault(parts[1], []).append(path)
    try:
        whole, binary, names = _live_kernels()
        names |= _benchmarked_names()
    except Exception as error:  # whatever torch has changed: then everything is kept
        log.info("autotuner.not_known error=%r", error)
        return set()
    unread: set[str] = set()
    for folder, files in folders.items():
        kernel = next((_stem(path) for path in files if path.endswith(_BINARIES)), None)
        if kernel is None or folder in whole:
            continue  # a launcher, or all of it is needed
        if folder in binary:
            unread.update(path for path in files if not path.endswith(_BINARIES))
        elif kernel in names:
            unread.update(files)
    return unread


def _live_kernels() -> tuple[set[str], set[str], set[str]]:
    """Folders of Triton's cache of which all is needed, those of which the binary is, and all kernels' names."""
    whole: set[str] = set()
    binary: set[str] = set(_bundled)
    names: set[str] = set()
    for autotuner in _autotuners():
        results = set(_result_folders(autotuner))
        names.add(autotuner.fn.__name__)
        is_static = bool(results) and bool(autotuner.is_statically_launchable())
        if is_static:
            binary |= results
        for launcher in autotuner.launchers:
            if not is_static or launcher.cache_hash not in results:
                whole.add(launcher.cache_hash)
        if not autotuner.launchers:  # compiled and never run: nobody knows the winner
            whole |= results
    return whole, binary - whole, names


def _autotuners() -> Iterator[Any]:
    """The autotuners of all generated code that is loaded."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for module in list(PyCodeCache.modules):
        for value in list(vars(module).values()):
            if isinstance(value, CachingAutotuner) and (value.launchers or value.compile_results):
                yield value


def _result_folders(autotuner: Any) -> Iterator[str]:
    from torch._inductor.runtime.runtime_utils import triton_hash_to_path_key

    for result in autotuner.compile_results:
        yield triton_hash_to_path_key(result.kernel.hash)


def _benchmarked_names() -> set[str]:
    """The names under which Inductor benchmarks matrix templates and fusions, and never uses them."""
    if "torch._inductor.select_algorithm" not in sys.modules:  # nothing was compiled; the import takes half a second
        return {_UNNAMED}
    from torch._inductor.select_algorithm import TritonTemplate

    return {_UNNAMED} | {f"triton_{name}" for name in TritonTemplate.all_templates}


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _trim_bundles() -> None:
    from torch._inductor.triton_bundler import TritonBundler

    bundler: Any = TritonBundler
    original = bundler.collect.__func__
    if getattr(original, "trims", False):
        return

    @functools.wraps(original)
    def collect(cls: Any) -> Any:
        bundle, metadata = original(cls)
        try:
            return _trimmed(bundle), metadata
        except Exception as error:  # it must not fail a compile that has succeeded
            log.info("autotuner.not_trimmed error=%r", error)
            return bundle, metadata

    collect.trims = True  # type: ignore[attr-defined]
    bundler.collect = classmethod(collect)


def _trimmed(bundle: Any) -> Any:
    """The bundle with the binaries alone of what is launched from them, and without what was only benchmarked."""
    launched = {folder for entry in bundle.static_autotuners for folder in _result_folders(entry.kernel)}
    _bundled.update(launched)
    benchmarked = _benchmarked_names()
    kept = []
    for kernel in bundle.kernel_artifacts:
        binaries = [artifact for artifact in kernel.artifacts if artifact.filename.endswith(_BINARIES)]
        if kernel.kernel_hash in launched:
            kept.append(replace(kernel, artifacts=binaries))
        elif not any(_stem(artifact.filename) in benchmarked for artifact in binaries):
            kept.append(kernel)
    return replace(bundle, kernel_artifacts=kept)


def _recheck_tuned() -> None:
    """On 2.11 a lookup overlooks what tuning has found, and a warm boot tunes again: for a kernel that began with one
    configuration, where the best is one of those it began with, and where some of those did not compile or were
    changed after their digest was taken. 2.13's `recheck_autotune_cache` mends the first two.

    The record is found by the digest of the kernel's source; a configuration decides how fast a kernel is, not what it
    computes.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    autotuner: Any = CachingAutotuner
    original = autotuner.recheck_autotune_cache
    if getattr(original, "rechecks", False):
        return

    @functools.wraps(original)
    def recheck(self: Any, reload_kernel_from_src: Any) -> None:
        before = list(self.compile_results)
        original(self, reload_kernel_from_src)
        if len(self.compile_results) == 1 and getattr(self.compile_results[0].config, "found_by_coordesc", False):
            return
        try:
            _take_recorded(self, before, reload_kernel_from_src)
        except Exception as error:  # it is tuned again, as without this
            log.info("autotuner.not_found_again error=%r", error)

    recheck.rechecks = True  # type: ignore[attr-defined]
    autotuner.recheck_autotune_cache = recheck


def _take_recorded(autotuner: Any, before: list[Any], reload_kernel_from_src: Any) -> None:
    """Have the autotuner use the configuration that is on record for it, if one is."""
    from torch._inductor.runtime.runtime_utils import triton_config_to_hashable

    best = _recorded_config(autotuner, [result.config for result in before])
    if best is None:
        return
    for result in before:
        if triton_config_to_hashable(result.config) == triton_config_to_hashable(best):
            result.config.found_by_coordesc = getattr(best, "found_by_coordesc", False)
            autotuner.compile_results = [result]
            return
    if autotuner.fn.fn is None:
        autotuner.fn = reload_kernel_from_src().fn
    autotuner.compile_results = [autotuner._precompile_config(best)]


def _recorded_config(autotuner: Any, configs: list[Any]) -> Any:
    """The configuration that tuning chose for this kernel before, if that is on record."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache, _load_cached_autotuning

    if autotuner.filename is None:  # a matrix template's: chosen at compile time
        return None
    cache = AutotuneCache.create(autotuner.inductor_meta, autotuner.filename, "")
    record = cache._read() if cache else None
    if not record:
        return None
    return _load_cached_autotuning(dict(record), str(record.get("configs_hash")), configs, autotuner.inductor_meta)


def _count_replays() -> None:
    """A lookup that finds a graph adds to torch's counters what its compile had counted, benchmarks included; keep
    count of that, for whoever wants to know what was done now."""
    from torch._dynamo.utils import counters
    from torch._inductor.codecache import FxGraphCache

    graph_cache: Any = FxGraphCache
    original = graph_cache.cache_hit_post_compile
    if getattr(original, "counts_replays", False):
        return

    @functools.wraps(original)
    def cache_hit_post_compile(graph: Any, *arguments: Any, **options: Any) -> Any:
        before = dict(counters["inductor"])
        result = original(graph, *arguments, **options)
        for name, count in graph.counter_deltas.items():
            if counters["inductor"][name] - before.get(name, 0) >= count:
                counters[REPLAYED][name] += count
        return result

    cache_hit_post_compile.counts_replays = True  # type: ignore[attr-defined]
    graph_cache.cache_hit_post_compile = staticmethod(cache_hit_post_compile)
