"""The two steps of generation, which torch.compile compiles: a whole prompt, and one token."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from models.text.sampling import Sampler
from models.text.static_cache import StaticCache


class Prefill(nn.Module):
    """Runs a whole prompt, padded to a bucket, through the model. It is compiled once for each bucket."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, sampler: Sampler) -> None:
        super().__init__()
        self.model, self.sampler = model, sampler
        self._cache = cache

    def forward(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Fill the cache and choose the next token; return the logits of the choice.

        tokens: [1, bucket], last: [1], the index of the last token before the padding; logits: [1, vocabulary].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits = call_model(self.model, tokens, places, self._cache, last)
        self.sampler(logits)
        return logits


class DecodeStep(nn.Module):
    """Runs one token through the model. It leaves the position as it is: the same call twice does the same."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, sampler: Sampler) -> None:
        super().__init__()
        self.model, self.sampler = model, sampler
        self._cache = cache

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Write `token` at the cache's position and choose the next token; return the logits of the choice.

        token: [1, 1], logits: [1, vocabulary].
        """
        logits = call_model(self.model, token, self._cache.position[None], self._cache, 1)
        self.sampler.see(token[0])
        self.sampler(logits)
        return logits


def call_model(
    model: PreTrainedModel, tokens: torch.Tensor, places: torch.Tensor, cache: StaticCache, keep: int | torch.Tensor
) -> torch.Tensor:
    """The logits of the tokens in `keep`: [1, vocabulary]."""
    output = model(
        tokens,
        position_ids=places,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
        position=cache.position,
    )
    logits: torch.Tensor = output.logits
    return logits[:, 0]
