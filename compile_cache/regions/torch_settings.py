"""torch's own settings, as compile_cache needs them.

On torch 2.13 a setting that a program has made holds in its own thread (a context variable), and a prediction runs on
another thread than the setup: each asks for them where it compiles or loads something.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config

from compile_cache.regions.autotuner import configure_autotuner

log = logging.getLogger("compile_cache")

# A class that is compiled for several image sizes and input strides passes Dynamo's own limit of 8 graphs a function.
RECOMPILE_LIMIT = 64
# Set where torch's own context variables are set.
_IS_CONFIGURED: ContextVar[bool] = ContextVar("compile_cache_is_configured", default=False)


def configure_torch() -> None:
    """Settings without which a warm boot would do again what a cold one has done, in the calling thread and, once, in
    the process."""
    if _IS_CONFIGURED.get():
        return
    _IS_CONFIGURED.set(True)
    dynamo, inductor = torch._dynamo.config, torch._inductor.config
    _set(dynamo, "recompile_limit", max(getattr(dynamo, "recompile_limit", 0), RECOMPILE_LIMIT))
    # A hook that is added after a call was compiled would be left out of it.
    _set(dynamo, "skip_nnmodule_hook_guards", False)
    # Precompiled headers lie outside the cache directory, and every boot would run g++ to see whether they are current.
    _set(inductor, "cpp_cache_precompile_headers", False)
    # torch 2.11 tries a smaller block at run time and, if it is the best, does not know it again on the next boot: it
    # benchmarks anew, and may choose otherwise. 2.13 finds it (CachingAutotuner.recheck_autotune_cache).
    if torch.__version__ < "2.13":
        _set(inductor, "dynamic_scale_rblock", False)
    configure_autotuner()


def is_switched_off() -> bool:
    """Whether `torch.compile` does nothing in this process (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)."""
    # As torch asks it (torch/_dynamo/eval_frame.py, _optimize): nothing else says so without importing the compiler.
    return bool(getattr(torch._dynamo.config, "disable", False)) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except AttributeError:
        log.warning("torch %s has no setting %s.%s: it is left out", torch.__version__, config.__name__, name)
