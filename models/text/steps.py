"""The two steps of generation that torch.compile compiles: a whole prompt, and one token.

`prepare_process` prepares a process to compile them: the server, and the compiling process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from models.text.sampling import Sampler
from models.text.static_cache import ATTENTION, StaticCache, attend

# The classes that are registered in this process.
_REGISTERED: set[type[PreTrainedModel]] = set()
# The argument's name. transformers 5.24 warns of the older one.
_CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"


def prepare_process() -> None:
    """Register the attention of the static cache and, for a model on a GPU, join operators.

    The compiling process calls this first. The server finds its artifacts only with the same passes set.
    """
    AttentionInterface.register(ATTENTION, attend)
    if torch.cuda.is_available():
        join_operators()


def register(config: PreTrainedConfig, make: Callable[[PreTrainedConfig], PreTrainedModel]) -> None:
    """Register a model's class with transformers by making one. Compiled code depends on these registries."""
    plain = type(config).from_dict(config.to_dict())  # drops the attention, which may not be registered yet
    with torch.device("meta"):  # this model takes no memory and is dropped
        _REGISTERED.add(type(make(plain)))


class Step(nn.Module):
    """The common part of both steps. Unpickled in another process, it registers the model's class."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, sampler: Sampler) -> None:
        super().__init__()
        self.model, self.sampler = model, sampler
        self._cache = cache
        _REGISTERED.add(type(model))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled step."""
        super().__setstate__(state)
        if type(self.model) not in _REGISTERED:
            register(self.model.config, type(self.model))


class Prefill(Step):
    """Runs a whole prompt, padded to a bucket, through the model. It is compiled once for each bucket."""

    def forward(self, tokens: Tensor, last: Tensor) -> Tensor:
        """Fill the cache and choose the next token; return the logits of the choice.

        tokens: [1, bucket], last: [1], the index of the last token before the padding; logits: [1, vocabulary].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits = call_model(self.model, tokens, places, self._cache, last)
        self.sampler(logits)
        return logits


class DecodeStep(Step):
    """Runs one token through the model. It does not change the position, so a repeated call has the same result."""

    def forward(self, token: Tensor) -> Tensor:
        """Write `token` at the cache's position and choose the next token; return the logits of the choice.

        token: [1, 1], logits: [1, vocabulary].
        """
        logits = call_model(self.model, token, self._cache.position[None], self._cache, 1)
        self.sampler.see(token[0])
        self.sampler(logits)
        return logits


def call_model(
    model: PreTrainedModel, tokens: Tensor, places: Tensor, cache: StaticCache, keep: int | Tensor
) -> Tensor:
    """The logits of the tokens in `keep`: [1, vocabulary]."""
    output = model(
        tokens,
        position_ids=places,
        **{_CACHE: cache},
        use_cache=True,
        logits_to_keep=keep,
        position=cache.position,
    )
    logits: Tensor = output.logits
    return logits[:, 0]


def join_operators() -> None:
    """Join these operators in the graphs that this thread compiles. Imports torch's compiler."""
    from models.kernels import graph_pass

    graph_pass.join_operators()
