"""A static key-value cache: allocated once for one sequence, written in place, reused by every request.

Its attention is registered with transformers as `ATTENTION`. It builds no mask, and reads only the filled part.

The checks refuse models that would silently give wrong tokens with it. Tests compare whole families of models with
`generate`; the checks refuse the families that differed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer

from models.kernels.operators import decode_attention

ATTENTION = "static_cache"
# Layers of other types do not keep the keys and values of all tokens.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LARGEST_FLASH_SIZE = 256


class StaticCache(Cache):  # type: ignore[misc]
    """Keys and values of one sequence of up to `tokens` tokens, for every layer of a model.

    Layers with a sliding window also have room for all tokens, and attend to the tokens in the window.
    """

    def __init__(self, config: PreTrainedConfig, tokens: int, device: torch.device) -> None:
        # The position of the next token to decode. All layers share this tensor.
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        super().__init__(layers=[_Layer(tokens, self.position) for _ in layer_types(config)])


class _Layer(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values: [1, key-value heads, tokens, head size]."""

    def __init__(self, tokens: int, position: Tensor) -> None:
        super().__init__(tokens)
        self._position = position

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a prompt from the beginning, or one token at the position; return the keys and values to attend to.

        A prompt attends only to itself.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        tokens = key_states.shape[2]
        if tokens == 1:
            self.keys.index_copy_(2, self._position, key_states)
            self.values.index_copy_(2, self._position, value_states)
            return self.keys, self.values
        self.keys[:, :, :tokens] = key_states
        self.values[:, :, :tokens] = value_states
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Refuse, because models get the positions as inputs."""
        raise NotImplementedError("it asks the cache for its length, although it gets the positions")


def use_static_cache(model: PreTrainedModel) -> None:
    """Let `model` attend over a StaticCache. Each call of the model then needs `position=`, the cache's tensor.

    Raises:
        ValueError: the model would give other results than without the cache.
    """
    check_model(model)
    AttentionInterface.register(ATTENTION, attend)
    model.set_attn_implementation(ATTENTION)


@contextlib.contextmanager
def watch_windows() -> Iterator[list[int | None]]:
    """Collect the sliding window that each layer passes to its attention, in order, in one call in the context."""
    windows: list[int | None] = []

    def watch(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        windows.append(sliding_window)
        return attend(*args, sliding_window=sliding_window, **kwargs)

    AttentionInterface.register(ATTENTION, watch)
    try:
        yield windows
    finally:
        AttentionInterface.register(ATTENTION, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a whole prompt, or of the token at `position`, for transformers' AttentionInterface.

    query: [1, heads, queries, size], key and value: [1, key-value heads, tokens, size]; result: [1, queries, heads,
    size]. A prompt may be padded on its right, because no token attends to later ones.

    Raises:
        ValueError: the model needs an option that is not supported here, or does not pass `position` on.
    """
    if position is None:
        raise ValueError(f"{type(module).__name__} does not pass its arguments on to the attention function")
    if unknown := sorted(name for name in ("s_aux", "position_bias") if kwargs.get(name) is not None):
        raise ValueError(f"{type(module).__name__} uses {', '.join(unknown)}, which is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.shape[2] == 1:
        attended = decode_attention(query, key, value, position, scale, sliding_window or 0, softcap or 0.0)
    else:
        attended = _attend_prompt(query, key, value, scale, sliding_window, softcap)
    return attended.transpose(1, 2).contiguous(), None


def _attend_prompt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    tokens = query.shape[2]
    is_windowed = window is not None and window < tokens
    is_plain = not softcap and not is_windowed
    # CUDA's fast kernels accept groups of heads only without a mask, and only for these sizes.
    takes_groups = is_plain and key.shape[3] == value.shape[3] <= _LARGEST_FLASH_SIZE
    if not takes_groups:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if is_plain:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=takes_groups)
    place = torch.arange(tokens, device=query.device)
    mask = place[:, None] >= place
    if window is not None and is_windowed:
        mask &= place[:, None] < place + window
    if not softcap:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.tanh(query @ key.transpose(2, 3) * (scale / softcap)) * softcap
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1, dtype=torch.float32)
    return weights.to(value.dtype) @ value


def layer_types(config: PreTrainedConfig) -> list[str]:
    """The type of each layer of the text part of a model."""
    text = config.get_text_config(decoder=True)
    return list(getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers)


def check_model(model: PreTrainedModel) -> None:
    """Check that a model keeps only keys and values, and does not attend to later tokens.

    Raises:
        ValueError: it does. The message names the model and the reason.
    """
    text = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    kinds = set(layer_types(model.config))
    for setting in ("block_types", "layers_block_type"):
        kinds |= set(getattr(text, setting, None) or ()) - {"attention"}
    if unknown := sorted(map(str, kinds - _LAYER_TYPES)):
        raise ValueError(f"{name} has layers of type {', '.join(unknown)}, which have no static cache")
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{name} keeps its own state between tokens")
    if getattr(text, "is_causal", True) is False or getattr(text, "use_bidirectional_attention", None):
        raise ValueError(f"{name} attends to later tokens too")
    if not model._can_set_attn_implementation():
        raise ValueError(f"{name} has its own attention, which cannot use a static cache")


def check_windows(model: PreTrainedModel, cache_tokens: int, passed: Sequence[int | None]) -> None:
    """Check that a model's sliding window is not only in its mask. `passed` has the window that each layer passes to
    its attention.

    Raises:
        ValueError: it is. The message names the model.
    """
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False or not window or window >= cache_tokens:
        return
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * len(passed)
    if any(kind == "sliding_attention" and not given for kind, given in zip(kinds, passed, strict=False)):
        raise ValueError(
            f"{type(model).__name__} has a sliding window of {window} tokens, but does not pass it to its attention. "
            f"Set CACHE_TOKENS to at most {window}."
        )
