"""Public Cog predictors, and folders with random weights of their published shapes, made on the GPU.
real_predictors.py --full serves them.

Repositories, commits and patches are those of tiny_predictors.py. The predictors run as they are published: same types,
sizes and steps. The largest folder has 41 GB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DiffusionPipeline,
    FluxControlNetModel,
    PNDMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from pipelines import (
    SHAPES,
    Shape,
    build_pipeline,
    build_vae,
    build_z_image,
    clip_config,
    clip_sizes,
    random_weights,
    save,
)
from tiny_predictors import PREDICTORS as TINY
from tiny_predictors import TOKENIZERS, Public, build_modernbert, build_whisper, fill, picture, sound
from transformers import CLIPConfig, CLIPImageProcessor, CLIPTextModel, CLIPTokenizer

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_QWEN_WORDS = 151936


def build_qwen_z_image(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """As pipelines.py, with all rows of Qwen3's embedding."""
    pipeline = build_z_image(shape, tokenizers)
    pipeline.text_encoder.resize_token_embeddings(_QWEN_WORDS, mean_resizing=False)
    return pipeline


def build_sd2(shape: Shape, tokenizers: Path) -> DiffusionPipeline:
    """Stable Diffusion 2.1: no transformer blocks at the last width. `attention_head_dim` is the number of heads."""
    with torch.device("cpu"):  # it makes arrays of its tensors
        scheduler = PNDMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            skip_prk_steps=True,
            steps_offset=1,
            prediction_type="v_prediction",
        )
    return StableDiffusionPipeline(
        vae=build_vae(shape, 4, scaling_factor=0.18215),
        text_encoder=CLIPTextModel(clip_config(shape.encoder, "gelu")),
        tokenizer=CLIPTokenizer.from_pretrained(tokenizers / "tokenizer"),
        unet=UNet2DConditionModel(use_linear_projection=True, upcast_attention=True, **shape.network),
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=CLIPImageProcessor(),
        requires_safety_checker=False,
    )


# As published in huggingface.co, file by file: Tongyi-MAI/Z-Image-Turbo, stabilityai/stable-diffusion-2-1,
# black-forest-labs/FLUX.1-dev, Shakker-Labs/FLUX.1-dev-ControlNet-Union-Pro, openai/clip-vit-large-patch14 (the safety
# checker), openai/whisper-large-v3, answerdotai/ModernBERT-large.
_Z_IMAGE = replace(
    SHAPES["z-image"],
    build=build_qwen_z_image,
    network={**SHAPES["z-image"].network, "n_layers": 30},
    encoder={
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
_SD2 = Shape(
    build_sd2,
    network={
        "sample_size": 96,
        "block_out_channels": (320, 640, 1280, 1280),
        "attention_head_dim": (5, 10, 20, 20),
        "cross_attention_dim": 1024,
    },
    encoder=clip_sizes(1024, 4096, 23, 16),
    vae={**SHAPES["flux1"].vae, "sample_size": 768},
    clip={},
)
_SAFETY: dict[str, Any] = {**clip_sizes(1024, 4096, 24, 16), "patch_size": 14}
_FLUX = SHAPES["flux1"]
_CONTROL_NET: dict[str, Any] = {
    "in_channels": 64,
    "num_mode": 10,
    "num_layers": 5,
    "num_single_layers": 10,
    **_FLUX.network,
}
_WHISPER: dict[str, Any] = {
    "words": 50100,
    "d_model": 1280,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "num_mel_bins": 128,
}

_MODERNBERT: dict[str, Any] = {
    "words": 50360,
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}


def save_z_image(folder: Path) -> None:
    """20 GB of bf16."""
    save(build_pipeline(_Z_IMAGE, TOKENIZERS, _DEVICE), folder / "Tongyi-MAI/Z-Image-Turbo", _Z_IMAGE.max_shard_size)


def save_stable_diffusion(folder: Path) -> None:
    """6 GB of fp32, as the predictor loads them. The safety checker lets everything pass, as the tiny one."""
    pipeline = build_pipeline(_SD2, TOKENIZERS, _DEVICE, torch.float32)
    save(pipeline, folder / "stabilityai/stable-diffusion-2-1", _SD2.max_shard_size)
    with random_weights(_DEVICE, torch.float32):
        checker = StableDiffusionSafetyChecker(CLIPConfig(vision_config=_SAFETY, projection_dim=768))
    checker.save_pretrained(folder / "CompVis/stable-diffusion-safety-checker")


def save_flux_controlnet(folder: Path) -> None:
    """41 GB of bf16. What the ControlNet begins with as zero is random."""
    save(build_pipeline(_FLUX, TOKENIZERS, _DEVICE), folder / "FLUX.1-dev", _FLUX.max_shard_size)
    with random_weights(_DEVICE, torch.bfloat16):
        network = FluxControlNetModel(**_CONTROL_NET)
    fill(network)
    network.save_pretrained(folder / "FLUX.1-dev-ControlNet-Union-Pro")


def save_whisper(folder: Path) -> None:
    """3 GB of fp16."""
    with random_weights(_DEVICE, torch.float16):
        build_whisper(folder, **_WHISPER)


def save_modernbert(folder: Path) -> None:
    """0.8 GB of bf16."""
    with random_weights(_DEVICE, torch.bfloat16):
        build_modernbert(folder, **_MODERNBERT)


def _full(
    name: str, build: Callable[[Path], None], *inputs: dict[str, Any], replaced: dict[str, str] | None = None
) -> Public:
    """The predictor with other weights, and with requests whose inputs differ from the tiny one's in these."""
    requests = tuple({**TINY[name].requests[0], **each} for each in inputs)
    return replace(TINY[name], build=build, requests=requests, on_cpu={}, replace=replaced or {})


_NO_FFMPEG = {old: new for old, new in TINY["whisper"].replace.items() if "sound" in new}

PREDICTORS = {
    "z-image": _full("z-image", save_z_image, {"prompt": "w3 w4 w5 w6"}),
    "stable-diffusion": _full(
        "stable-diffusion",
        save_stable_diffusion,
        *({"width": 768, "height": 768, "num_inference_steps": steps} for steps in (10, 30)),
    ),
    "flux-controlnet": _full(
        "flux-controlnet",
        save_flux_controlnet,
        *({"control_image": picture(1024, 1024), "steps": steps} for steps in (4, 12)),
        replaced={"(512, 512)": "(1024, 1024)"},  # the warm-up's size
    ),
    "modernbert": _full(
        "modernbert", save_modernbert, {"prompt": "w3 w4 w5 [MASK] " * 16}, replaced=dict(TINY["modernbert"].replace)
    ),
    "whisper": _full("whisper", save_whisper, {"audio": sound(25.0)}, replaced=_NO_FFMPEG),
}
