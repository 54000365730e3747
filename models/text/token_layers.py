"""Replacements for a model's layers: same weights, same results, with our own operators for a single token.

A class of transformers is recognised by the source of its `forward`, because models have copies of the same code.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import nn
from transformers.activations import SiLUActivation

from models.kernels.matrix_vector import gated_matrix_vector, matrix_vector
from models.kernels.rms_norm import normalize, rms_norm

_GATED_MLP = """
down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
return down_proj
"""
_NORM = """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)
"""


def use_token_layers(model: nn.Module) -> None:
    """Replace the plain linear layers of `model`, the feed-forward parts with such layers, and the norms."""
    _replace(model, _is_plain, TokenLinear)
    _replace(model, _is_gated, GatedMLP)
    _replace(model, _is_norm, TokenNorm)


class TokenLinear(nn.Linear):
    """A linear layer that uses `matrix_vector` for a single token."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs and result: [..., size]."""
        if _is_one_token(inputs, self.in_features):
            return matrix_vector(inputs, self.weight, None, self.bias)
        return F.linear(inputs, self.weight, self.bias)


class GatedMLP(nn.Module):
    """The feed-forward part of Llama and of more than a hundred other models: two kernels for a single token."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and result: [1, tokens, size]."""
        if _is_one_token(x, self.gate_proj.in_features):
            gated = gated_matrix_vector(x, self.gate_proj.weight, self.up_proj.weight)
        else:
            gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        result: torch.Tensor = self.down_proj(gated)
        return result


class TokenNorm(nn.Module):
    """The norm of Llama and of most later models. It uses `rms_norm` for a single token."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """inputs and result: [..., size]."""
        if _is_one_token(hidden_states, len(self.weight)) and hidden_states.dtype == self.weight.dtype:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return normalize(hidden_states, self.weight, self.variance_epsilon)


def _is_one_token(inputs: torch.Tensor, size: int) -> bool:
    return inputs.numel() == size and inputs.dim() == 3


def is_as_its_class(module: nn.Module) -> bool:
    """Whether a call of a module runs only its class's code: the instance has no hooks and no own `forward`.

    torch keeps the hooks of a call in private attributes such as `_forward_pre_hooks`.
    """
    own = vars(module)
    hooks = [name for name in own if name.endswith("_hooks") and ("forward" in name or "backward" in name)]
    return "forward" not in own and not any(own[name] for name in hooks)


@cache
def _computes(kind: type[nn.Module], argument: str, source: str) -> bool:
    """Whether the `forward` of a class has this source and this single argument."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list or hasattr(kind.forward, "__wrapped__"):
        return False
    names = [one.arg for one in function.args.args]
    return names == ["self", argument] and ast.dump(ast.Module(function.body, [])) == ast.dump(ast.parse(source))


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.is_contiguous() and is_as_its_class(module)


def _is_gated(module: Any) -> bool:
    if (
        not is_as_its_class(module)
        or not _computes(type(module), "x", _GATED_MLP)
        or type(module.act_fn) not in (nn.SiLU, SiLUActivation)
    ):
        return False
    layers = (module.gate_proj, module.up_proj)
    return is_as_its_class(module.act_fn) and all(type(layer) is TokenLinear and layer.bias is None for layer in layers)


def _is_norm(module: Any) -> bool:
    return is_as_its_class(module) and _computes(type(module), "hidden_states", _NORM)


def _replace(model: nn.Module, is_meant: Callable[[Any], bool], make: Callable[[Any], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_meant(child):
                setattr(parent, name, make(child))
