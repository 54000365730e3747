"""Compiling a call of a module ahead of time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from compile_cache.errors import NotPrecompilable, first_line
from compile_cache.inductor.adapter import compile_function
from compile_cache.inductor.guards import Recorder
from compile_cache.inductor.record import Record
from compile_cache.inductor.spec import on_gpu
from compile_cache.inductor.traced import call_region


def compile_ahead(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: str, dynamic: bool | None
) -> tuple[Record, bytes]:
    """Compile a call of `module` with these inputs. This traces the call, and runs nothing.

    Raises:
        NotPrecompilable: torch refuses, or the compiled code might be wrong in another process.
        MemoryError, torch.OutOfMemoryError: memory ran out; the call is not to blame.
    """
    recorder = Recorder(on_gpu(module, args, kwargs))
    try:
        compilation = compile_function(call_region, (module, args, kwargs), mode, dynamic, recorder)
    except NotPrecompilable:
        raise
    except Exception as error:  # torch cannot compile this ahead of time
        if shortage := _shortage(error):
            raise shortage from error
        raise NotPrecompilable(f"torch: {type(error).__name__}: {first_line(error)}") from error
    if compilation.reads_globals:
        raise NotPrecompilable("it reads tensors from global variables or a closure")
    return Record.of(compilation, recorder.guards()), compilation.payload


def _shortage(error: BaseException | None) -> Exception | None:
    """The memory error that caused an error, which torch has wrapped into others; None if there is none."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return type(error)(str(error))
        seen.append(error)
        error = error.__cause__ or error.__context__
    return None
