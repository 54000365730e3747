"""Compiling a call of a module ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compile_cache.aot.adapter import compile_function
from compile_cache.aot.guards import Recorder
from compile_cache.aot.record import Record
from compile_cache.aot.switches import on_gpu
from compile_cache.aot.traced import call_region
from compile_cache.errors import NotPrecompilable, first_line


def compile_ahead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, dynamic: bool | None
) -> tuple[Record, bytes]:
    """Compile a call of `module` with these inputs. Traces them and runs nothing. Takes as long as compiling does.

    Raises:
        NotPrecompilable: torch refuses, or what it made cannot be used elsewhere so that it is surely right.
        MemoryError, torch.OutOfMemoryError: memory ran out, which says nothing about the call.
    """
    recorder = Recorder(on_gpu(module, args, kwargs))
    try:
        compilation = compile_function(call_region, (module, args, kwargs), mode, dynamic, recorder)
    except NotPrecompilable:
        raise
    except Exception as error:  # whatever torch cannot do ahead of time
        if shortage := _shortage(error):
            raise shortage from error
        raise NotPrecompilable(f"torch: {type(error).__name__}: {first_line(error)}") from error
    if compilation.reads_globals:
        raise NotPrecompilable("it reads tensors from global variables or a closure")
    return Record.of(compilation, recorder.guards()), compilation.payload


def _shortage(error: BaseException | None) -> Exception | None:
    """The want of memory that led to an error, which torch has wrapped into others."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return type(error)(str(error))
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
