"""Write a text-to-image pipeline with the widths of a published one, random weights, and few blocks: what it costs to
compile a block and to serve a call depends on shapes alone.

Text encoders have two layers: they are not compiled. Lumina 2 and Z-Image read a vocabulary of made-up words, `w0`,
`w1` …, of which each is a token, as is every other word; their networks see prompts of different lengths, while FLUX.1,
SDXL and PixArt-Sigma pad them to one. SDXL has eleven blocks, the fewest with its three widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flux_shape
import random_pipeline
import sdxl_shape
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from llama import build_tokenizer
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model, T5Tokenizer

_VOCABULARY = 1000
_CHAT = "{% for message in messages %}user {{ message['content'] }}{% endfor %} assistant"
_T5 = {"num_layers": 2}


@dataclass(frozen=True)
class Shape(random_pipeline.Shape):
    """`build` makes the pipeline. `width` is the network's number of channels, `caption` that of the text encoder."""

    build: Callable[[Shape, Path, torch.device], DiffusionPipeline]
    heads: int = 0
    head: int = 0
    caption: int = 0
    layers: int = 8
    is_tiny: bool = False


def build_flux(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """FLUX.1-dev's widths: four blocks of each class."""
    full = flux_shape.TINY if shape.is_tiny else flux_shape.FLUX1
    few = {"num_layers": 4, "num_single_layers": 4}
    whole = replace(full, transformer={**full.transformer, **few}, t5={**full.t5, **_T5})
    return flux_shape.build_pipeline(whole, tokenizers, device)


def build_sdxl(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """SDXL's widths: one transformer block wherever it has some."""
    full = sdxl_shape.TINY if shape.is_tiny else sdxl_shape.SDXL
    unet = {**full.unet, "transformer_layers_per_block": (1, 1, 1)}
    clip_2 = {**full.clip_2, "num_hidden_layers": 2}
    return sdxl_shape.build_pipeline(replace(full, unet=unet, clip_2=clip_2), tokenizers, device)


def build_pixart(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """PixArt-Sigma-XL-2-1024-MS."""
    sizes = flux_shape.TINY.t5 if shape.is_tiny else flux_shape.FLUX1.t5
    with random_pipeline.random_weights(device):
        network = PixArtTransformer2DModel(
            num_attention_heads=shape.heads,
            attention_head_dim=shape.head,
            cross_attention_dim=shape.heads * shape.head,
            caption_channels=sizes["d_model"],
            num_layers=shape.layers,
            sample_size=32 if shape.is_tiny else 128,
            attention_bias=True,
            norm_type="ada_norm_single",
            interpolation_scale=2,
            use_additional_conditions=False,
        )
        # The class begins with zeros here, and so with a picture of one colour.
        torch.nn.init.normal_(network.proj_out.weight, std=0.1)
        encoder = flux_shape.build_t5(replace(flux_shape.TINY, t5={**sizes, **_T5}))
        vae = sdxl_shape.build_vae(sdxl_shape.TINY if shape.is_tiny else sdxl_shape.SDXL)
    return PixArtSigmaPipeline(
        tokenizer=T5Tokenizer.from_pretrained(tokenizers / "tokenizer_2"),
        text_encoder=encoder.eval(),
        vae=vae.eval(),
        transformer=network.eval(),
        scheduler=DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02, beta_schedule="linear"),
    )


def build_lumina(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """Lumina-Image-2.0: two blocks that refine the noise, two for the caption, four for both."""
    axis = shape.head // 3
    with random_pipeline.random_weights(device):
        network = Lumina2Transformer2DModel(
            hidden_size=shape.heads * shape.head,
            num_layers=shape.layers - 4,
            num_attention_heads=shape.heads,
            num_kv_heads=max(1, shape.heads // 3),
            axes_dim_rope=(axis, axis, axis),
            cap_feat_dim=shape.caption,
        )
        sizes = _encoder(shape, 256, 4)
        encoder = Gemma2Model(Gemma2Config(sliding_window=4096, query_pre_attn_scalar=sizes["head_dim"], **sizes))
        vae = _flux_vae(shape)
    return Lumina2Pipeline(
        transformer=network.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=vae.eval(),
        text_encoder=encoder.eval(),
        tokenizer=_tokenizer(),
    )


def build_z_image(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """Z-Image-Turbo: as Lumina 2, two, two and four blocks."""
    third = 2 * (shape.head * 3 // 16)
    with random_pipeline.random_weights(device):
        network = ZImageTransformer2DModel(
            dim=shape.heads * shape.head,
            n_layers=shape.layers - 4,
            n_heads=shape.heads,
            n_kv_heads=shape.heads,
            cap_feat_dim=shape.caption,
            axes_dims=[shape.head - 2 * third, third, third],
            axes_lens=[1536, 512, 512],
        )
        # The class leaves these two as they are in memory.
        torch.nn.init.normal_(network.x_pad_token, std=0.02)
        torch.nn.init.normal_(network.cap_pad_token, std=0.02)
        encoder = Qwen3Model(Qwen3Config(**_encoder(shape, 128, 4)))
        vae = _flux_vae(shape)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=encoder.eval(),
        tokenizer=_tokenizer(),
        transformer=network.eval(),
    )


def _encoder(shape: Shape, head: int, groups: int) -> dict[str, Any]:
    """A language model of two layers that gives `caption` channels."""
    head = 16 if shape.is_tiny else head
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": shape.caption,
        "intermediate_size": 4 * shape.caption,
        "num_hidden_layers": 2,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": groups,
        "head_dim": head,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _flux_vae(shape: Shape) -> AutoencoderKL:
    return flux_shape.build_vae(flux_shape.TINY if shape.is_tiny else flux_shape.FLUX1)


def _tokenizer() -> PreTrainedTokenizerFast:
    """Words that it does not know are `w0`, and padding is `w1`, which a prompt of words does not have."""
    tokenizer = build_tokenizer(_VOCABULARY)
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template = "w1", "right", _CHAT
    tokenizer.model_max_length = 512
    return tokenizer


_LARGE: dict[str, Any] = {"max_shard_size": "5GB", "checked_size": 256}
_TINY: dict[str, Any] = {"max_shard_size": "2MB", "checked_size": 64, "is_tiny": True}
SHAPES = {
    "flux1": Shape(build=build_flux, **_LARGE),
    "sdxl": Shape(build=build_sdxl, **_LARGE),
    "pixart-sigma": Shape(build=build_pixart, heads=16, head=72, **{**_LARGE, "checked_size": 1024}),
    "lumina2": Shape(build=build_lumina, heads=24, head=96, caption=2304, **_LARGE),
    "z-image": Shape(build=build_z_image, heads=30, head=128, caption=2560, **_LARGE),
    "tiny-flux1": Shape(build=build_flux, **_TINY),
    "tiny-sdxl": Shape(build=build_sdxl, **_TINY),
    "tiny-pixart-sigma": Shape(build=build_pixart, heads=2, head=16, **{**_TINY, "checked_size": 256}),
    "tiny-lumina2": Shape(build=build_lumina, heads=3, head=24, caption=32, **_TINY),
    "tiny-z-image": Shape(build=build_z_image, heads=2, head=32, caption=32, **_TINY),
}


def build_pipeline(shape: Shape, tokenizers: Path, device: torch.device) -> DiffusionPipeline:
    """All parts with random weights, made on `device` in bf16."""
    return shape.build(shape, tokenizers, device)


if __name__ == "__main__":
    random_pipeline.main(__doc__, SHAPES, build_pipeline)
