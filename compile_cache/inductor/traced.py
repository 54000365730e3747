"""The function that torch traces, in `torch.compile` and ahead of time.

This module imports torch, and is itself imported only when a boot has torch.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def call_region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's own call of a module that is not compiled, hooks included.

    This is a function of a module, because torch can store neither a method nor a decorated `forward`, and Dynamo skips
    the methods of torch's own classes.
    """
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
