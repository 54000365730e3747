"""Small language models with random weights, of several families, and what `generate` makes of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_models import byte_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 311
_WINDOW = 12
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Gemma scales its embeddings up: with tied weights, a random model says its last token over and over.
_GEMMA = {"head_dim": 16, "sliding_window": _WINDOW, "query_pre_attn_scalar": 16, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA,
    "mistral": {"sliding_window": _WINDOW},
    "phi3": {},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
}


def make(family: str, **changes: Any) -> PreTrainedModel:
    """A model of one of FAMILIES, or of another model type with arguments that suit it; the same every time."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_BASE, **FAMILIES.get(family, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def prompt(tokens: int, seed: int = 1) -> tuple[int, ...]:
    """Random tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCABULARY, (tokens,), generator=generator).tolist())


def greedy(model: PreTrainedModel, tokens: tuple[int, ...], new_tokens: int) -> list[int]:
    """What `generate` finds, eager and with a cache that grows."""
    arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 1.0}
    found = model.generate(torch.tensor([tokens]), max_new_tokens=new_tokens, **arguments)
    return found[0, len(tokens) :].tolist()


def write_llama(folder: Path, chat_template: str | None = None) -> Path:
    """Write a Llama whose tokens are bytes into a folder, and return it."""
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    tokenizer = byte_tokenizer(**special)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {f"{name}_id": number for number, name in enumerate(special)}
    changes = {**sizes, **ids, "vocab_size": len(tokenizer), "max_position_embeddings": 512, "initializer_range": 0.02}
    make("llama", **changes).save_pretrained(folder)
    return folder
