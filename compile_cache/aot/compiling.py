"""Compiling a call of a module ahead of time."""

from __future__ import annotations

from typing import Any

from torch import nn

from compile_cache.aot.adapter import compile_function
from compile_cache.aot.guards import Recorder
from compile_cache.aot.record import Record
from compile_cache.aot.switches import on_gpu
from compile_cache.aot.traced import call_region
from compile_cache.errors import NotPrecompilable


def compile_ahead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, dynamic: bool | None
) -> tuple[Record, bytes]:
    """Compile a call of `module` with these inputs. Traces them and runs nothing. Takes as long as compiling does.

    Raises:
        NotPrecompilable: torch refuses, or what it made cannot be used elsewhere so that it is surely right.
    """
    recorder = Recorder(on_gpu(module, args, kwargs))
    try:
        compilation = compile_function(call_region, (module, args, kwargs), mode, dynamic, recorder)
    except NotPrecompilable:
        raise
    except Exception as error:  # whatever torch cannot do ahead of time
        raise NotPrecompilable(f"torch: {type(error).__name__}: {first_line(error)}") from error
    if compilation.reads_globals:
        raise NotPrecompilable("it reads tensors from global variables or a closure")
    return Record.of(compilation, recorder.guards()), compilation.payload


def first_line(error: BaseException) -> str:
    """An error's message, as far as it fits into a reason."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
