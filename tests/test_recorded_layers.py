"""The decoder layers of the speech example: on a GPU, a step of one token is a replayed CUDA graph."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

SPEECH = Path(__file__).parents[1] / "examples" / "speech"


def whisper(device: str) -> WhisperForConditionalGeneration:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "max_source_positions": 50}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(WhisperConfig(**sizes, **tokens, init_std=0.4)).to(device).eval()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("beams", [1, 2])
def test_the_tokens_are_those_of_transformers(device, beams, monkeypatch):
    monkeypatch.syspath_prepend(SPEECH)
    share_code = importlib.import_module("shared_layers").share_code
    record_steps = importlib.import_module("recorded_layers").record_steps
    plain = whisper(device)
    model = record_steps(share_code(copy.deepcopy(plain)))
    options: dict[str, Any] = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "num_beams": beams}
    static = {"cache_implementation": "static", "disable_compile": True}
    heard = []
    for _ in range(3):  # each has a cache of its own, and a recording
        features = torch.randn(1, plain.config.num_mel_bins, 100, device=device)
        heard.append(model.generate(input_features=features, **options, **static).tolist())
        assert heard[-1] == plain.generate(input_features=features, **options).tolist()
    assert heard[0] != heard[1]
    (layers,) = model.get_decoder().layers
    assert (layers.graph is not None) == (device == "cuda" and beams == 1)
