"""Decoder layers that share their code: each sees its own part of the cache as a cache of one layer."""

import copy

from torch import nn
from transformers import EncoderDecoderCache


class OneLayer(nn.Module):
    """A layer with `self_attn` and `encoder_attn`, as of Whisper or Moonshine. Layers find their keys and values by a
    number, so the code of one would fit no other. Here all have the number 0."""

    def __init__(self, layer: nn.Module, number: int) -> None:
        super().__init__()
        self.layer, self.number = layer, number
        layer.self_attn.layer_idx = layer.encoder_attn.layer_idx = 0

    def forward(self, *args, **kwargs):
        for name, cache in kwargs.items():
            if isinstance(cache, EncoderDecoderCache):
                part = kwargs[name] = copy.copy(cache)
                part.self_attention_cache = self.part(cache.self_attention_cache)
                part.cross_attention_cache = self.part(cache.cross_attention_cache)
                part.is_updated = {0: cache.is_updated[self.number]}
                # A prompt of one token has a token's sizes, and needs code of its own.
                states = self.layer(*args, **kwargs, is_prompt=not part.is_updated[0])
                cache.is_updated[self.number] = part.is_updated[0]
                return states
        return self.layer(*args, **kwargs)

    def part(self, cache):
        """A cache of this layer alone, with the same tensors."""
        part = copy.copy(cache)
        part.layers = [cache.layers[self.number]]
        return part


def share_code(model: nn.Module) -> nn.Module:
    """Make the code of one decoder layer serve all of them."""
    decoder = model.get_decoder()
    decoder.layers = nn.ModuleList(OneLayer(layer, number) for number, layer in enumerate(decoder.layers))
    return model
