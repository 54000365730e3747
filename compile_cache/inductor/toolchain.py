"""Sets torch's compiler up: the options that this library needs, and which vector instructions code may use, so that a
warm boot on a CPU compiles and starts no test of them.

Before torch loads C++ code, it compiles a test for each set of vector instructions, and loads it in a Python of its
own: two seconds each. The answers are files of the cache directory like all others: `toolchain/<question>.json`.

torch's function is wrapped, because its option `cpp.vec_isa_ok` answers for some of the sets only. torch 2.15 keeps a
mark of its own, but only looks whether it exists, and a seeded version publishes the files that it has read.

torch also asks the compiler its version, which takes milliseconds.

This needs private names of torch, but none that functions compiled ahead of time need. If one is gone, torch asks as
usual.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import json
import logging
import os
from contextvars import ContextVar
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from compile_cache.calls.spec import RECOMPILE_LIMIT
from compile_cache.files import replacing
from compile_cache.inductor.tuning import configure_autotuner
from compile_cache.key import environment
from compile_cache.key.environment import digest

log = logging.getLogger("compile_cache")

# On torch 2.13 an option is a context variable too: it holds in the thread that set it. Setup and predictions run on
# different threads, so each calls `configure_torch` before it compiles or loads something.
_IS_CONFIGURED: ContextVar[bool] = ContextVar("compile_cache_is_configured", default=False)

TOOLCHAIN = "toolchain"
# The folder of the answers: the cache directory's that was opened last.
_folder: Path | None = None


def remember_toolchain(directory: Path) -> None:
    """Store the answers in this cache directory from now on, and use the stored answers."""
    global _folder
    _folder = directory / TOOLCHAIN
    try:
        isa: Any = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
        if getattr(isa.check_build, "__wrapped__", None) is None:
            isa.check_build = _remembering(isa.check_build)
    except (ImportError, AttributeError) as error:
        log.info("toolchain.not_configured error=%s", error)


def _remembering(check_build: Any) -> Any:
    """Wrap torch's test of a set of instructions. A stored answer is `true`: a failure may have a passing cause."""

    @functools.wraps(check_build)
    def remembering(isa: Any, code: str) -> bool:
        question = [str(isa), isa.build_arch_flags(), isa._arch_flags, code, environment.instruction_flags()]
        path = _folder / f"{digest(question)}.json" if _folder else None
        if path is not None and _is_known(path):
            return True
        loads = bool(check_build(isa, code))
        if loads and path is not None:
            try:
                with replacing(path) as file:
                    file.write(json.dumps({"question": question, "answer": True}).encode())
            except OSError as error:  # the next boot asks again
                log.info("toolchain.not_remembered error=%r", error)
        return loads

    return remembering


def _is_known(path: Path) -> bool:
    try:
        return json.loads(path.read_bytes())["answer"] is True
    except (OSError, ValueError, KeyError, TypeError):  # there is no readable answer
        return False


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
    configure_autotuner()


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
