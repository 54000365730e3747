"""What code that is called on another thread takes along of its caller: context variables, and torch's modes.

torch copies a thread's whole state for its own threads, but has no name in Python for that. Here are the modes that
programs set around a call. Not here are dispatch modes, such as a counter of operations, hooks of saved tensors,
`torch.func` and profilers. The default dtype and the switches of backends belong to all threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

T = TypeVar("T")


def _read() -> list[Any]:
    """torch's modes of this thread, in 3 µs; none before torch is imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return []
    return [
        torch.is_inference_mode_enabled(),
        torch.cuda.current_stream() if torch.cuda.is_initialized() else None,  # with its device
        torch.is_grad_enabled(),
        torch.is_autocast_cache_enabled(),
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        torch.overrides._get_current_function_mode_stack(),  # `with torch.device(…)` is one
    ]


def _set(modes: list[Any]) -> None:
    """Give this thread the modes, without the first two: only contexts set these."""
    torch: Any = sys.modules["torch"]
    has_gradients, keeps_casts, autocasts, function_modes = modes[2:]
    while torch._C._len_torch_function_stack():  # first, because function modes see that gradients are set
        torch.overrides._pop_mode()
    torch.set_grad_enabled(has_gradients)
    torch.set_autocast_cache_enabled(keeps_casts)
    for kind, is_enabled, dtype in autocasts:
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    for mode in function_modes:
        torch.overrides._push_mode(mode)


class Caller:
    """The state of the thread that makes this object, for code on another one. The code may change it."""

    def __init__(self) -> None:
        self._context, self._modes = copy_context(), _read()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns in this state. The calling thread has its own one afterwards.

        Raises:
            BaseException: any of `work`.
        """
        if not self._modes:
            result = self._context.run(work)
            self._modes = _read()  # it may have imported torch
            return result
        torch: Any = sys.modules["torch"]
        is_inference, stream, own = *self._modes[:2], _read()
        with torch.inference_mode(is_inference), torch.cuda.stream(stream) if stream else nullcontext():
            _set(self._modes)
            try:
                return self._context.run(work)
            finally:
                self._modes = _read()
                _set(own)
