"""Folders with random weights that public predictors load: tiny ones, or of their published shapes.

predictors.toml has the predictors and most sizes, real_predictors.py serves them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from llama import build_tokenizer
from pipelines import SHAPES, build_pipeline, clip_config, random_weights, save
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer

_TOKENIZERS = Path(__file__).resolve().parents[1] / "demo/flux-digits"
_WORDS = 1000
# The widths of every tiny transformer.
_SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_VISION: dict[str, Any] = {**_SMALL, "image_size": 32, "patch_size": 8}
_SQUARE = {"height": 32, "width": 32}


def build(name: str, folder: Path, device: str, dtype: str, sizes: dict[str, Any]) -> None:
    """Write what the predictor of this name loads into the folder in which it is served."""
    with random_weights(torch.device(device), getattr(torch, dtype)):
        _BUILDERS[name](folder, **sizes)


def _classifier(folder: Path) -> None:
    """ViT."""
    folder = folder / "Falconsai/nsfw_image_detection"
    config = transformers.ViTConfig(**_VISION, id2label={0: "normal", 1: "nsfw"})
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessor(size=_SQUARE).save_pretrained(folder)


def _pipeline(folder: Path, shape: str, **parts: dict[str, Any]) -> None:
    """Save a pipeline of pipelines.py, with other sizes of some `parts`."""
    chosen = SHAPES[shape]
    chosen = replace(chosen, **{part: {**getattr(chosen, part), **sizes} for part, sizes in parts.items()})
    pipeline = build_pipeline(chosen, _TOKENIZERS, torch.get_default_device(), torch.get_default_dtype())
    save(pipeline, folder, chosen.max_shard_size)


def _z_image(folder: Path, shape: str = "tiny-z-image", **parts: dict[str, Any]) -> None:
    _pipeline(folder / "Tongyi-MAI/Z-Image-Turbo", shape, **parts)


def _siglip(folder: Path) -> None:
    """Two towers."""
    texts = {**_SMALL, "vocab_size": _WORDS, "max_position_embeddings": 64, "projection_size": 32}
    folder = folder / "google/siglip-base-patch16-224"
    config = transformers.SiglipConfig(text_config=texts, vision_config=_VISION)
    transformers.SiglipModel(config).save_pretrained(folder)
    tokenizer = build_tokenizer(_WORDS)
    tokenizer.pad_token, tokenizer.model_max_length = "w1", 64
    pictures = transformers.SiglipImageProcessor(size=_SQUARE)
    transformers.SiglipProcessor(pictures, tokenizer).save_pretrained(folder)


def _modernbert(folder: Path, words: int = _WORDS, **sizes: Any) -> None:
    """Four layers: one of three looks at all words."""
    tokenizer = build_tokenizer(words)
    tokenizer.add_special_tokens({"mask_token": "[MASK]"})
    tokenizer.save_pretrained(folder / "checkpoints")
    special = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}
    sizes = {**_SMALL, "num_hidden_layers": 4, **sizes, **special, "vocab_size": len(tokenizer)}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**sizes))
    model.save_pretrained(folder / "checkpoints")


def _clip(folder: Path) -> None:
    """Two towers, and real words."""
    folder.joinpath("model_cache/models--openai--clip-vit-large-patch14").mkdir(parents=True)
    folder = folder / "openai/clip-vit-large-patch14"
    texts = clip_config(_SMALL, "quick_gelu").to_dict()
    config = transformers.CLIPConfig(text_config=texts, vision_config=_VISION, projection_dim=32)
    transformers.CLIPModel(config).save_pretrained(folder)
    words = CLIPTokenizer.from_pretrained(_TOKENIZERS / "tokenizer")
    transformers.CLIPProcessor(_image_processor(), words).save_pretrained(folder)


def _image_processor() -> Any:
    return transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=_SQUARE)


_VAE = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2}


def _stable_diffusion(
    unet: dict[str, Any],
    text: dict[str, Any] = _SMALL,
    vision: dict[str, Any] = _VISION,
    vae: dict[str, Any] = _VAE,
    scheduler: dict[str, Any] | None = None,
    activation: str = "quick_gelu",
    projection: int = 32,
) -> Any:
    """A pipeline with a safety checker that lets everything pass: its concepts are at distance 1."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    checker = transformers.CLIPConfig(vision_config=vision, projection_dim=projection)
    with torch.device("cpu"):  # it makes arrays of its tensors
        betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "skip_prk_steps": True}
        schedule = diffusers.PNDMScheduler(**betas, **(scheduler or {}))
    return diffusers.StableDiffusionPipeline(
        vae=diffusers.AutoencoderKL(**blocks, latent_channels=4, **vae),
        text_encoder=transformers.CLIPTextModel(clip_config(text, activation)),
        tokenizer=CLIPTokenizer.from_pretrained(_TOKENIZERS / "tokenizer"),
        unet=diffusers.UNet2DConditionModel(**unet),
        scheduler=schedule,
        safety_checker=StableDiffusionSafetyChecker(checker),
        feature_extractor=_image_processor(),
    )


def _save_stable_diffusion(folder: Path, **sizes: Any) -> None:
    pipeline = _stable_diffusion(**sizes)
    pipeline.save_pretrained(folder / "stabilityai/stable-diffusion-2-1")
    pipeline.safety_checker.save_pretrained(folder / "CompVis/stable-diffusion-safety-checker")


def _upscaler(folder: Path, unet: dict[str, Any], doubling: dict[str, Any]) -> None:
    """Three of one shape, and the network that doubles their latents."""
    pipeline = _stable_diffusion(unet)
    for name in ("stabilityai/stable-diffusion-2-1", "runwayml/stable-diffusion-v1-5", "andite/anything-v4.0"):
        pipeline.save_pretrained(folder / name)
    parts = {"vae": pipeline.vae, "text_encoder": pipeline.text_encoder, "tokenizer": pipeline.tokenizer}
    scheduler = diffusers.EulerDiscreteScheduler(prediction_type="sample")
    network = diffusers.UNet2DConditionModel(norm_num_groups=None, mid_block_type=None, **doubling)
    upscaler = diffusers.StableDiffusionLatentUpscalePipeline(unet=network, scheduler=scheduler, **parts)
    upscaler.save_pretrained(folder / "stabilityai/sd-x2-latent-upscaler")


def _flux_controlnet(folder: Path, control: dict[str, Any], **parts: dict[str, Any]) -> None:
    """FLUX.1 and a ControlNet. What the ControlNet begins with as zero is random."""
    _pipeline(folder / "FLUX.1-dev", "flux1", **parts)
    sizes = {**SHAPES["flux1"].network, **parts.get("network", {}), **control}
    network = diffusers.FluxControlNetModel(in_channels=64, **sizes)
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    network.save_pretrained(folder / "FLUX.1-dev-ControlNet-Union-Pro")


def _chat(name: str, family: str, **sizes: Any) -> Callable[[Path], None]:
    """A causal language model. No token ends the text."""

    def write(folder: Path) -> None:
        tokens = {"vocab_size": _WORDS, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
        config = getattr(transformers, f"{family}Config")(**_SMALL, **tokens, **sizes)
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder / name)
        build_tokenizer(_WORDS).save_pretrained(folder / name)

    return write


def _hunyuan_video(folder: Path, network: dict[str, Any], vae: dict[str, Any]) -> None:
    """A text encoder of real words: the template that comes before a prompt must have 95 tokens or more."""
    tokenizer = CLIPTokenizer.from_pretrained(_TOKENIZERS / "tokenizer")
    diffusers.HunyuanVideoPipeline(
        text_encoder=transformers.LlamaModel(transformers.LlamaConfig(**_SMALL, vocab_size=49408)),
        tokenizer=tokenizer,
        transformer=diffusers.HunyuanVideoTransformer3DModel(**network),
        vae=diffusers.AutoencoderKLHunyuanVideo(**vae),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=transformers.CLIPTextModel(clip_config(_SMALL, "quick_gelu")),
        tokenizer_2=tokenizer,
    ).save_pretrained(folder / "checkpoints")


def _whisper(folder: Path, words: int = 0, **sizes: Any) -> None:
    """Bytes, so many words, and the tokens that Whisper has beside words."""
    special = ["<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    special += ["<|nospeech|>", "<|notimestamps|>", *(f"<|{number / 50:.2f}|>" for number in range(1501))]
    texts = [*pre_tokenizers.ByteLevel.alphabet(), *(f"w{word}" for word in range(words)), "<|endoftext|>"]
    vocabulary = {name: number for number, name in enumerate([*texts, *special])}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[:8]})
    end, start = vocabulary["<|endoftext|>"], vocabulary["<|startoftranscript|>"]
    special_ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    towers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 80}
    sizes = {**widths, **towers, **sizes, **special_ids, "vocab_size": len(vocabulary)}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=False,
        no_timestamps_token_id=vocabulary["<|notimestamps|>"],
        max_initial_timestamp_index=50,
        return_timestamps=True,
        **special_ids,
    )
    model.save_pretrained(folder / "openai/whisper-large-v3")
    sounds = transformers.WhisperFeatureExtractor(feature_size=sizes["num_mel_bins"])
    transformers.WhisperProcessor(sounds, tokenizer).save_pretrained(folder / "openai/whisper-large-v3")


def _lora(folder: Path) -> None:
    """SDXL as pipelines.py, and a LoRA of its attention. Needs peft, as the predictor does."""
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipeline = build_pipeline(SHAPES["tiny-sdxl"], _TOKENIZERS, torch.device("cpu"))
    pipeline.save_pretrained(folder / "stabilityai/stable-diffusion-xl-base-1.0")
    layers = ["to_q", "to_k", "to_v", "to_out.0"]
    pipeline.unet.add_adapter(LoraConfig(r=4, target_modules=layers, init_lora_weights=False))
    weights = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipeline.unet))
    pipeline.save_lora_weights(folder / "latent-consistency/lcm-lora-sdxl", weights)


def _rmbg(folder: Path) -> None:
    """The predictor's own network, of which predictors.toml makes a narrow one."""
    sys.path.insert(0, str(folder))
    from briarmbg import BriaRMBG

    folder.joinpath("checkpoints").mkdir()
    torch.save(BriaRMBG().state_dict(), folder / "checkpoints/model.pth")


_GEMMA = {"num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
_BUILDERS: dict[str, Callable[..., None]] = {
    "nsfw": _classifier,
    "z-image": _z_image,
    "siglip": _siglip,
    "modernbert": _modernbert,
    "clip": _clip,
    "stable-diffusion": _save_stable_diffusion,
    "img2img": lambda folder, unet: _stable_diffusion(unet).save_pretrained(folder / "cache"),
    "flux-controlnet": _flux_controlnet,
    "upscaler": _upscaler,
    "gemma": _chat("gemma-cache", "Gemma", **_GEMMA),
    "phi": _chat("microsoft/phi-2", "Phi"),
    "hunyuan-video": _hunyuan_video,
    "whisper": _whisper,
    "rmbg": _rmbg,
    "lora": _lora,
    "vllm": _chat("weights", "Gemma", **_GEMMA),
}
