"""The types of a call; torch's own call of a module, and the hook that answers its calls instead.

This module imports torch, and is itself imported only when a boot has torch. It imports no compiler.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from compile_cache.errors import NoGraph

# The arguments of a call, and the call: module, args and kwargs.
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Call = tuple[nn.Module, Args, Kwargs]
# How many dispatch modes there are in this thread.
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether `torch.jit.trace` records this thread.
is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# torch's own walk over nested containers, which Dynamo uses too.
pytree = _pytree
# Where a module keeps its compiled call.
COMPILED_CALL = "_compiled_call_impl"


class _CompiledCall(functools.partial[Any]):
    """A module's compiled call. It is pickled as None, also where a custom `__getstate__` includes it.

    It does not keep its module, which has it: what is kept of a module's parts shall not keep the module.
    """

    def __reduce__(self) -> Any:
        return type(None), ()


def serve_by(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call(weakref.ref(module), *args, **kwargs)` answer calls of `module`: the hook of `module.compile()`."""
    module._compiled_call_impl = _CompiledCall(call, weakref.ref(module))


def call_region(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """torch's own call of a module that is not compiled, hooks included.

    This is a function of a module, because torch can store neither a method nor a decorated `forward`, and Dynamo skips
    the methods of torch's own classes.
    """
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def call_by_graph(module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """`call_region` for `torch.compile`. Where no graph fits, torch runs this function as it is.

    Raises:
        NoGraph: it does.
    """
    if not torch.compiler.is_dynamo_compiling():  # in a graph this is a constant
        raise NoGraph("torch.compile has no graph of the call. Is TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE set?")
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
