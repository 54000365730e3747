"""Write a FLUX pipeline of any size with random weights: what a boot and a step cost depends on shapes alone.

`--shape flux1` has the shapes of FLUX.1-dev: 11.9 B transformer parameters, 4.8 B of T5-XXL, about 33.7 GB of bf16.
Weights are made on the GPU where there is one, in bf16 from the start, so no fp32 copy of them exists anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_pipeline
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer


@dataclass(frozen=True)
class Shape(random_pipeline.Shape):
    """The configuration of each part, where it differs from its class's defaults."""

    transformer: dict[str, Any]
    clip: dict[str, Any]
    t5: dict[str, Any]
    vae: dict[str, Any]


# As published in huggingface.co/black-forest-labs/FLUX.1-dev, file by file.
FLUX1 = Shape(
    transformer={"guidance_embeds": True, "axes_dims_rope": (16, 56, 56)},
    clip={
        "vocab_size": 49408,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    t5={"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
    vae={"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024},
    max_shard_size="5GB",
    checked_size=256,
)
TINY = Shape(
    transformer={
        "guidance_embeds": True,
        "num_layers": 2,
        "num_single_layers": 3,
        "num_attention_heads": 2,
        "attention_head_dim": 32,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (8, 12, 12),
    },
    clip={
        "vocab_size": 49408,
        "hidden_size": 32,
        "intermediate_size": 64,
        "projection_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    },
    t5={"vocab_size": 32128, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2},
    vae={"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1, "sample_size": 64},
    max_shard_size="2MB",
    checked_size=64,
)
SHAPES = {"flux1": FLUX1, "tiny": TINY}


def build_transformer(shape: Shape) -> FluxTransformer2DModel:
    """64 input channels: 16 latent ones of 2 x 2 pixels. The class's defaults are FLUX.1's own sizes."""
    return FluxTransformer2DModel(in_channels=64, **shape.transformer)


def build_clip(shape: Shape) -> CLIPTextModel:
    """The text encoder that gives the pooled vector. It pools at the largest token id, whichever tokenizer is used."""
    return CLIPTextModel(CLIPTextConfig(bos_token_id=0, eos_token_id=2, pad_token_id=1, **shape.clip))


def build_t5(shape: Shape) -> T5EncoderModel:
    """The text encoder that gives the 512 tokens."""
    return T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", is_encoder_decoder=False, **shape.t5))


def build_vae(shape: Shape) -> AutoencoderKL:
    """16 latent channels, an eighth of the picture's width and height."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=16,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **shape.vae,
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """FLUX.1-dev's: the noise shifts with the picture's size."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)


def build_pipeline(shape: Shape, tokenizers: Path, device: torch.device) -> FluxPipeline:
    """All parts with the random weights that their classes begin with, made on `device` in bf16."""
    with random_pipeline.random_weights(device):
        parts = {
            "transformer": build_transformer(shape),
            "text_encoder": build_clip(shape),
            "text_encoder_2": build_t5(shape),
            "vae": build_vae(shape),
        }
    return FluxPipeline(
        scheduler=build_scheduler(),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        tokenizer_2=T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2"),
        **{name: part.eval() for name, part in parts.items()},
    )


if __name__ == "__main__":
    random_pipeline.main(__doc__, SHAPES, build_pipeline)
