"""The settings of torch that this library needs.

torch 2.13 keeps a setting in a context variable: it holds in the thread that made it. Setup and predictions run on
different threads, so each calls `configure_torch` before it compiles or loads something.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import copyreg
import logging
import os
import pkgutil
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from compile_cache.calls.spec import RECOMPILE_LIMIT
from compile_cache.inductor.tuning import configure_autotuner

log = logging.getLogger("compile_cache")

# A context variable, as torch's own settings are.
_IS_CONFIGURED: ContextVar[bool] = ContextVar("compile_cache_is_configured", default=False)


def configure_torch() -> None:
    """Make torch's settings in the calling thread and, once, in the process. Without them a warm boot would repeat work
    of the cold one."""
    if _IS_CONFIGURED.get():
        return
    _IS_CONFIGURED.set(True)
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
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
    return pkgutil.resolve_name, (str(value).replace(".", ":", 1),)


def is_switched_off() -> bool:
    """Whether `torch.compile` does nothing in this process (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)."""
    # The same test as in torch/_dynamo/eval_frame.py, _optimize. Every other way to ask imports the compiler.
    return bool(getattr(torch._dynamo.config, "disable", False)) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except AttributeError:
        log.warning("torch %s has no setting %s.%s: continuing without it", torch.__version__, config.__name__, name)
