"""A Llama of any size with random weights, and greedy decoding with a static cache, one token a step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

MAX_CACHE_LEN = 1024
_SEED = 0
# As published in huggingface.co/meta-llama/Llama-3.1-8B: 8.03 B parameters, 16.1 GB of bf16.
LLAMA_3_1_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY: dict[str, Any] = {
    **LLAMA_3_1_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.16,  # 0.02 · √(4096 / 64): each layer does as much to its input as in the large one
}
SHAPES = {"llama-3.1-8b": LLAMA_3_1_8B, "tiny": TINY}


def device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def build(shape: dict[str, Any]) -> LlamaForCausalLM:
    """Random weights in bf16. What a layer adds to the residual stream is scaled by the model's depth, as in GPT-2
    (Radford et al. 2019, 2.3), and small against the embeddings: with what the class begins with, rounding grows from
    layer to layer, and 32 of them in bf16 are 6 % off fp32; so they are 1.5 %."""
    torch.manual_seed(_SEED)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device()):
            model = LlamaForCausalLM(LlamaConfig(bos_token_id=0, eos_token_id=1, **shape))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=4.0)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.div_(math.sqrt(2 * len(model.model.layers)))
    return model.eval()


def write(shape: dict[str, Any], folder: Path) -> int:
    """Write the folder that `load` reads; the number of its parameters."""
    model = build(shape)
    model.save_pretrained(folder, max_shard_size="5GB")
    return sum(parameter.numel() for parameter in model.parameters())


def load(folder: str) -> LlamaForCausalLM:
    """bf16 straight to the GPU where there is one, else fp32 on the CPU."""
    on_gpu = torch.cuda.is_available()
    return LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if on_gpu else torch.float32, device_map="cuda" if on_gpu else None
    ).eval()


class DecodeStep(nn.Module):
    """One token through the model: what to compile. Only calls of this module are, and the prefill is not one."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=MAX_CACHE_LEN)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits after `token` at `position`. The same call twice gives the same: the cache's own count of tokens,
        which each call moves on, is set first."""
        # token: [1, 1], position: [1], logits: [1, 1, vocabulary]
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position[0])
        return self.model(token, position_ids=position[None], past_key_values=self.cache, use_cache=True).logits

    @torch.inference_mode()
    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """The token after a prompt, eager; fills the cache anew."""
        # prompt: [1, tokens], result: [1, 1]
        self.cache.reset()
        output = self.model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return _likeliest(output.logits)

    @torch.inference_mode()
    def decode(self, token: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
        """The `tokens` after `token`, which is at the position `start`, one step each."""
        # token: [1, 1], result: [1, tokens]
        found = [token]
        for position in torch.arange(start, start + tokens, device=token.device).split(1):
            found.append(_likeliest(self(found[-1], position)))
        return torch.cat(found[1:], dim=1)


def make_prompt(vocabulary: int, tokens: int) -> torch.Tensor:
    """Random token ids, the same on every machine."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    return torch.randint(vocabulary, (1, tokens), generator=generator).to(device())


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits[:, -1].argmax(dim=-1, keepdim=True)
