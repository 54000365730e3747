"""A call of a module as it is compiled: the function that is traced, and the strides that its inputs are given.

This module uses none of the compiler's private names, so every step of the ladder can use it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def call_region(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `module` as torch does. This function is what is compiled, because torch can store neither a method nor a
    decorated `forward`."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def with_plain_strides(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same tensors, those of the arguments themselves, with the strides that a contiguous tensor has in dimensions
    of size 1: no address depends on them, and torch would compile, and guard, each variant by itself.

    A slice of a batch of one is such a tensor. Where gradients are recorded nothing is changed, because a view would
    be recorded.
    """
    if torch.is_grad_enabled():
        return args, kwargs
    return tuple(map(_plain, args)), {name: _plain(value) for name, value in kwargs.items()}


def _plain(value: Any) -> Any:
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_nested or 1 not in value.shape:
        return value
    if value.dim() > 3:  # these strides say whether a picture is stored channels first or last
        return value
    strides, plain = value.stride(), []
    step = 1
    for size, stride in zip(reversed(value.shape), reversed(strides), strict=True):
        plain.append(step if size == 1 else stride)
        step = size * plain[-1]
    plain.reverse()
    return value if tuple(plain) == strides else value.as_strided(value.shape, plain)
