"""Write an SDXL pipeline of any size with random weights: what a boot and a step cost depends on shapes alone.

`--shape sdxl` has the shapes of SDXL-base 1.0: 2.57 B UNet parameters, 0.82 B of two CLIPs, about 6.9 GB of bf16.
Weights are made on the GPU where there is one, in bf16 from the start, so no fp32 copy of them exists anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import random_pipeline
import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer


@dataclass(frozen=True)
class Shape(random_pipeline.Shape):
    """The configuration of each part, where it differs from its class's defaults."""

    unet: dict[str, Any]
    clip: dict[str, Any]
    clip_2: dict[str, Any]
    vae: dict[str, Any]


# As published in huggingface.co/stabilityai/stable-diffusion-xl-base-1.0, file by file.
SDXL = Shape(
    unet={
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
    clip={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "projection_dim": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    clip_2={
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "projection_dim": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
    },
    vae={"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "sample_size": 1024},
    max_shard_size="10GB",
    checked_size=256,
)
_TINY_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "projection_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
TINY = Shape(
    unet={
        "sample_size": 8,
        "block_out_channels": (32, 64, 128),
        "transformer_layers_per_block": (1, 2, 3),
        "attention_head_dim": (1, 2, 4),
        "cross_attention_dim": 64,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 80,
    },
    clip=_TINY_CLIP,
    clip_2=_TINY_CLIP,
    vae={"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1, "sample_size": 64},
    max_shard_size="2MB",
    checked_size=64,
)
SHAPES = {"sdxl": SDXL, "tiny": TINY}


def build_unet(shape: Shape) -> UNet2DConditionModel:
    """No transformer blocks at the first width. `attention_head_dim` is, in spite of its name, the number of heads; the
    added input is the pooled vector and six numbers of `addition_time_embed_dim` each (size, crop, target size)."""
    return UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        use_linear_projection=True,
        addition_embed_type="text_time",
        **shape.unet,
    )


def clip_config(sizes: dict[str, Any], activation: str) -> CLIPTextConfig:
    """With this `eos_token_id` CLIP pools at the largest token id, which is the end of the text in SDXL's vocabulary
    and in the demo model's."""
    return CLIPTextConfig(
        vocab_size=49408, bos_token_id=0, eos_token_id=2, pad_token_id=1, hidden_act=activation, **sizes
    )


def build_vae(shape: Shape) -> AutoencoderKL:
    """4 latent channels, an eighth of the picture's width and height. In fp16 the pipeline would upcast it."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        scaling_factor=0.13025,
        force_upcast=True,
        **shape.vae,
    )


def build_scheduler() -> EulerDiscreteScheduler:
    """SDXL-base's."""
    return EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )


def build_pipeline(shape: Shape, tokenizers: Path, device: torch.device) -> StableDiffusionXLPipeline:
    """All parts with the random weights that their classes begin with, made on `device` in bf16."""
    with random_pipeline.random_weights(device):
        parts = {
            "unet": build_unet(shape),
            "text_encoder": CLIPTextModel(clip_config(shape.clip, "quick_gelu")),
            "text_encoder_2": CLIPTextModelWithProjection(clip_config(shape.clip_2, "gelu")),
            "vae": build_vae(shape),
        }
    return StableDiffusionXLPipeline(
        scheduler=build_scheduler(),
        # Both encoders read the same vocabulary; SDXL's two tokenizers differ in the padding alone.
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        tokenizer_2=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        add_watermarker=False,
        **{name: part.eval() for name, part in parts.items()},
    )


if __name__ == "__main__":
    random_pipeline.main(__doc__, SHAPES, build_pipeline)
