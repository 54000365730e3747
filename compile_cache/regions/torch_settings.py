"""torch's own settings, as compile_cache needs them.

On torch 2.13 a setting that a program has made holds in its own thread (a context variable), and a prediction runs on
another thread than the setup: each asks for them where it compiles or loads something.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

import torch
import torch._dynamo
import torch._inductor.config

from compile_cache.regions.autotuner import configure_autotuner

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
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    # Precompiled headers lie outside the cache directory, and every boot would run g++ to see whether they are current.
    torch._inductor.config.cpp_cache_precompile_headers = False
    # torch 2.11 tries a smaller block at run time and, if it is the best, does not know it again on the next boot: it
    # benchmarks anew, and may choose otherwise. 2.13 finds it (CachingAutotuner.recheck_autotune_cache).
    if torch.__version__ < "2.13":
        torch._inductor.config.dynamic_scale_rblock = False
    configure_autotuner()
    _name_no_functions()


def _name_no_functions() -> None:
    with contextlib.suppress(ImportError):
        from torch._dynamo import funcname_cache

        funcname_cache.cache = _NoFunctionNames()


class _NoFunctionNames(dict[str, dict[int, str]]):
    """Stands for Dynamo's names of traced functions by file and line, which go into debug logs alone.

    Dynamo finds them by tokenizing each traced file whole, whether it logs or not: a tenth of a warm boot's
    compiling (benchmarks/README.md).
    """

    def __contains__(self, filename: object) -> bool:
        return True

    def __getitem__(self, filename: str) -> dict[int, str]:
        return {}
