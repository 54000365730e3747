"""Sets torch's compiler up, so that a warm boot repeats no work of the cold one. Three parts:

**Options** that this library needs.

**Which vector instructions code may use.** Before torch loads C++ code, it compiles a test for each set of them, and
loads it in a Python of its own: two seconds each. The answers are files of the cache directory like all others:
`toolchain/<question>.json`. torch's function is wrapped, because its option `cpp.vec_isa_ok` answers for some of the
sets only. torch 2.15 keeps a mark of its own, but only looks whether it exists, and a seeded version publishes the
files that it has read. torch also asks the compiler its version, which takes milliseconds.

**Autotuning.** It compiles every candidate and uses one. Each candidate is stored twice, with all its intermediate
code: as files of Triton's cache, and inside the FX-graph entries (Inductor's bundle). A warm boot needs only a part:

- the binary of each candidate that existed from the start: Inductor asks for all of them before it looks up the winner
- every file of a winner that coordinate descent found later
- nothing of the others

This needs private names of torch, but none that functions compiled ahead of time need. If one is gone, torch asks,
tunes and keeps files as usual.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from compile_cache.calls.spec import RECOMPILE_LIMIT
from compile_cache.errors import Failure, attempt, log
from compile_cache.files import replacing
from compile_cache.key.environment import digest, instruction_flags

# On torch 2.13 an option is a context variable too: it holds in the thread that set it. Setup and predictions run on
# different threads, so each calls `configure_torch` before it compiles or loads something.
_IS_CONFIGURED: ContextVar[bool] = ContextVar("compile_cache_is_configured", default=False)

_BINARIES = (".cubin", ".hsaco")
# Folders of Triton's cache whose binaries this process put into FX-graph entries. A lookup asks for all of them.
_bundled: set[str] = set()
# Inductor's name for a kernel while it benchmarks a fusion. The kernel that it uses gets another name.
_UNNAMED = "triton_"


def configure_torch() -> None:
    """Set this library's options in the calling thread and, once, in the process. Without them a warm boot would repeat
    work of the cold one. Imports torch's compiler."""
    if _IS_CONFIGURED.get():
        return
    _IS_CONFIGURED.set(True)
    dynamo: Any = importlib.import_module("torch._dynamo").config
    inductor: Any = importlib.import_module("torch._inductor.config")
    _set(dynamo, "recompile_limit", max(getattr(dynamo, "recompile_limit", 0), RECOMPILE_LIMIT))
    # torch skips these guards by default; then a hook that is added after a compile is never called.
    _set(dynamo, "skip_nnmodule_hook_guards", False)
    # torch's flag of FX traces is one for all threads. While one thread compiles, graphs that another thread calls run
    # eager; by default they fail.
    _set(dynamo, "error_on_nested_fx_trace", False)
    # Precompiled headers lie outside the cache directory. Every boot would run g++ to check that they are current.
    _set(inductor, "cpp_cache_precompile_headers", False)
    # torch 2.11 tries a smaller block at run time. If that is best, the next boot does not find it, benchmarks again,
    # and may choose another. 2.13 finds it (CachingAutotuner.recheck_autotune_cache).
    if torch.__version__ < "2.13":
        _set(inductor, "dynamic_scale_rblock", False)
    copyreg.pickle(torch.memory_format, _memory_format_by_name)
    _patch_compiler()


@functools.cache
def _patch_compiler() -> None:
    """Patch torch's compiler, once: let it remember which vector instructions code may use, store no losers in FX-graph
    entries, and on torch 2.11 find earlier results of coordinate descent. A patch is left out if torch lacks its
    names."""
    for patch in (_remember_instructions, _trim_bundles, _recheck_tuned):
        try:
            patch()
        except (ImportError, AttributeError) as error:  # no Triton, or another torch
            log.info("toolchain.not_configured what=%s error=%s", patch.__name__, error)


def _memory_format_by_name(value: torch.memory_format) -> tuple[Any, ...]:
    """How pickle writes a memory format, which is a part of a graph's key.

    By default it writes the first of all modules that has the name `torch`. In Cog's server that can be the predictor,
    and another process never found the graph.
    """
    return resolve_name, (str(value).replace(".", ":", 1),)


def is_switched_off() -> bool:
    """Whether `torch.compile` does nothing in this process (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)."""
    # The same test as in torch/_dynamo/eval_frame.py, _optimize. Every other way to ask imports the compiler.
    config = importlib.import_module("torch._dynamo").config
    return bool(getattr(config, "disable", False)) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except AttributeError:
        log.warning("torch %s has no setting %s.%s: continuing without it", torch.__version__, config.__name__, name)


def _remember_instructions() -> None:
    """Wrap torch's test of a set of instructions. A stored answer says that code loads: a failure may have a passing
    cause."""
    kind: Any = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
    original = kind.check_build

    @functools.wraps(original)
    def check_build(isa: Any, code: str) -> bool:
        question = [str(isa), isa.build_arch_flags(), code, instruction_flags()]
        answer = json.dumps({"question": question, "answer": True}).encode()
        codecache: Any = importlib.import_module("torch._inductor.codecache")
        path = Path(codecache.cache_dir(), "toolchain", f"{digest(question)}.json")
        with contextlib.suppress(OSError):  # it is not known
            if path.read_bytes() == answer:
                return True
        loads = bool(original(isa, code))
        if loads:
            try:
                with replacing(path) as file:
                    file.write(answer)
            except OSError as error:  # the next boot asks again
                log.info("toolchain.not_remembered error=%r", error)
        return loads

    kind.check_build = check_build


def _trim_bundles() -> None:
    from torch._inductor.triton_bundler import TritonBundler

    bundler: Any = TritonBundler
    original = bundler.collect.__func__

    @functools.wraps(original)
    def collect(cls: Any) -> Any:
        bundle, metadata = original(cls)
        trimmed = attempt(_trimmed, bundle)  # a failure must not fail a compile that succeeded
        return bundle if isinstance(trimmed, Failure) else trimmed, metadata

    bundler.collect = classmethod(collect)


def _trimmed(bundle: Any) -> Any:
    """The bundle without kernels that were only benchmarked. Candidates from the start keep only their binaries."""
    launched = {folder for entry in bundle.static_autotuners for folder in _result_folders(entry.kernel)}
    _bundled.update(launched)
    benchmarked = _benchmarked_names()
    kept = []
    for kernel in bundle.kernel_artifacts:
        binaries = [artifact for artifact in kernel.artifacts if artifact.filename.endswith(_BINARIES)]
        if kernel.kernel_hash in launched:
            kept.append(replace(kernel, artifacts=binaries))
        elif not any(Path(artifact.filename).stem in benchmarked for artifact in binaries):
            kept.append(kernel)
    return replace(bundle, kernel_artifacts=kept)


def _recheck_tuned() -> None:
    """Make lookups find tuning's record. On 2.11 they miss it in three cases, and a warm boot tunes again:

    - The kernel began with one configuration.
    - The best configuration is one of those that it began with.
    - Some of these did not compile, or changed after their digest was taken.

    2.13's `recheck_autotune_cache` mends the first two. The digest of the kernel's source finds the record. A wrong
    record cannot change a result: a configuration decides how fast a kernel is, not what it computes.
    """
    if torch.__version__ >= "2.13":
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    autotuner: Any = CachingAutotuner
    original = autotuner.recheck_autotune_cache

    @functools.wraps(original)
    def recheck(self: Any, reload_kernel_from_src: Any) -> None:
        before = list(self.compile_results)
        original(self, reload_kernel_from_src)
        if len(self.compile_results) == 1 and getattr(self.compile_results[0].config, "found_by_coordesc", False):
            return
        attempt(_reuse_recorded, self, before, reload_kernel_from_src)  # else torch tunes again, as without this patch

    autotuner.recheck_autotune_cache = recheck


def _reuse_recorded(autotuner: Any, before: list[Any], reload_kernel_from_src: Any) -> None:
    """Give the autotuner its recorded configuration, if there is one."""
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
    """The recorded choice of tuning for this kernel, if there is one."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache, _load_cached_autotuning

    if autotuner.filename is None:  # a matrix template, chosen at compile time
        return None
    cache = AutotuneCache.create(autotuner.inductor_meta, autotuner.filename, "")
    record = cache._read() if cache else None
    if not record:
        return None
    return _load_cached_autotuning(dict(record), str(record.get("configs_hash")), configs, autotuner.inductor_meta)


def unread_files(paths: Iterable[str]) -> set[str]:
    """The `paths` in the cache directory that no warm boot will read: losers, and intermediate files of winners.

    Call it after the kernels have run: only then are the winners known.
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
    except Exception as error:  # torch has changed: keep all files
        log.info("autotuner.not_known error=%r", error)
        return set()
    unread: set[str] = set()
    for folder, files in folders.items():
        kernel = next((Path(path).stem for path in files if path.endswith(_BINARIES)), None)
        if kernel is None or folder in whole:
            continue  # a launcher, or a folder of which everything is needed
        if folder in binary:
            unread.update(path for path in files if not path.endswith(_BINARIES))
        elif kernel in names:
            unread.update(files)
    return unread


def _live_kernels() -> tuple[set[str], set[str], set[str]]:
    """Folders of Triton's cache that are needed whole, folders whose binary is needed, and the names of all kernels."""
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
        if not autotuner.launchers:  # compiled but never run: the winner is unknown
            whole |= results
    return whole, binary - whole, names


def _autotuners() -> Iterator[Any]:
    """The autotuners of all loaded generated code."""
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
    """The names that Inductor uses only to benchmark matrix templates and fusions."""
    if "torch._inductor.select_algorithm" not in sys.modules:  # nothing was compiled; the import takes half a second
        return {_UNNAMED}
    from torch._inductor.select_algorithm import TritonTemplate

    return {_UNNAMED} | {f"triton_{name}" for name in TritonTemplate.all_templates}


def surround_measurements(context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """From now on, let each of Inductor's measurements on the GPU in this process run in such a context."""
    benchmarking: Any = importlib.import_module("torch._inductor.runtime.benchmarking")
    if hasattr(benchmarking, "set_gpu_benchmark_lock_context"):  # since torch 2.13
        benchmarking.set_gpu_benchmark_lock_context(context)
    else:  # torch 2.11 has no hook
        decorate: Any = context()
        benchmarking.benchmarker.benchmark_gpu = decorate(benchmarking.benchmarker.benchmark_gpu)
