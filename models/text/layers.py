"""Other classes for a model's layers: same weights, same results, fewer kernels for a single token.

A class of transformers is recognised by the code of its `forward`, because models have copies of the same code.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import SiLUActivation

from compile_cache.calls.module_state import HOOKS
from models.kernels.operators import gated_matrix_vector, matrix_vector, normalize, rms_norm

# Types of rotary embeddings that change with the largest position of a call, which padding would raise.
_CHANGING_ROPE = ("dynamic", "longrope")


def use_token_layers(model: nn.Module) -> None:
    """Change the class of the plain linear layers of `model`, of the feed-forward parts with such layers, and of the
    norms. Their weights and settings stay."""
    for is_meant, kind in ((_is_plain, TokenLinear), (_is_gated, GatedMLP), (_is_norm, TokenNorm)):
        for module in filter(is_meant, model.modules()):
            module.__class__ = kind


class TokenLinear(nn.Linear):
    """A linear layer that uses `matrix_vector` for a single token."""

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs and result: [..., size]."""
        if _is_one_token(inputs, self.in_features):
            return matrix_vector(inputs, self.weight, None, self.bias)
        return F.linear(inputs, self.weight, self.bias)


class GatedMLP(nn.Module):
    """The feed-forward part of Llama and of more than a hundred other models: two kernels for a single token."""

    def forward(self: Any, x: Tensor) -> Tensor:
        """x and result: [1, tokens, size]."""
        if _is_one_token(x, self.gate_proj.in_features):
            gated = gated_matrix_vector(x, self.gate_proj.weight, self.up_proj.weight)
        else:
            gated = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        result: Tensor = self.down_proj(gated)
        return result


class TokenNorm(nn.Module):
    """The norm of Llama and of most later models. It uses `rms_norm` for a single token."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """inputs and result: [..., size]."""
        if _is_one_token(hidden_states, len(self.weight)) and hidden_states.dtype == self.weight.dtype:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return normalize(hidden_states, self.weight, self.variance_epsilon)


def _is_one_token(inputs: Tensor, size: int) -> bool:
    return inputs.numel() == size and inputs.dim() == 3


def is_as_its_class(module: nn.Module) -> bool:
    """Whether a call of a module runs only its class's code: the instance has no hooks and no own `forward`."""
    return not any(vars(module).get(name) for name in ("forward", *HOOKS))


def _gated_mlp(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _norm(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _computes(kind: type[nn.Module], forward: Any) -> bool:
    """Whether the `forward` of a class does what this one does: it was compiled to the same instructions. Models have
    copies of the same code, and no common class."""
    own = kind.forward
    if not isinstance(own, types.FunctionType) or own.__closure__:
        return False
    codes = own.__code__, forward.__code__
    one, other = ((c.co_code, c.co_names, c.co_consts, c.co_varnames, c.co_argcount) for c in codes)
    return one == other and not hasattr(own, "__wrapped__")


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and module.weight.is_contiguous() and is_as_its_class(module)


def _is_gated(module: Any) -> bool:
    if not is_as_its_class(module) or not _computes(type(module), _gated_mlp):
        return False
    is_silu = type(module.act_fn) in (nn.SiLU, SiLUActivation) and is_as_its_class(module.act_fn)
    layers = (module.gate_proj, module.up_proj)
    return is_silu and all(type(layer) is TokenLinear and layer.bias is None for layer in layers)


def _is_norm(module: Any) -> bool:
    return is_as_its_class(module) and _computes(type(module), _norm)


def most_positions(config: PreTrainedConfig) -> int | None:
    """The number of tokens up to which a model's rotary embeddings stay the same; None if its configuration has
    none."""
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, "max_position_embeddings", None)]
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):  # of all layers, or of each type of layer
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            limits.append(parameters.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)


def settle_rope(model: PreTrainedModel) -> None:
    """Fix rotary embeddings to their values for up to `most_positions` tokens.

    Otherwise every call would choose them by its largest position, and could not be compiled in one piece.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {name: _settled(value) for name, value in kind.items()}
        elif isinstance(kind, str):
            module.rope_type = _settled(kind)


def _settled(kind: str) -> str:
    return "default" if any(changing in kind for changing in _CHANGING_ROPE) else kind
