"""Checks that a model computes the same with a static cache as without. Other models would silently give wrong tokens.

Tests compare whole families of models with `generate`. The checks refuse the families that differed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

# Layers of other types do not keep the keys and values of all tokens.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Types of rotary embeddings that change with the largest position of a call, which padding would raise.
_CHANGING_ROPE = ("dynamic", "longrope")


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


def most_positions(config: PreTrainedConfig) -> int | None:
    """The number of tokens up to which a model's rotary embeddings stay the same; None if its configuration has
    none."""
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, "max_position_embeddings", None)]
    for parameters in _rope_parameters(text):
        if parameters.get("rope_type") == "longrope":
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


def _rope_parameters(text: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The dictionary of all layers, or one for each type of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    else:
        yield from (value for value in parameters.values() if isinstance(value, dict))
