"""Folders with tiny random weights of the architectures that the examples serve.

    python examples/tiny_models.py e5 /tmp/tiny-e5
    MODEL=/tmp/tiny-e5 …

A function for each model. The texts' tokens are bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def byte_tokenizer(**special: str) -> Any:
    """A token for each byte, and `special` ones by their names in transformers, such as `pad_token`."""
    words = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if "cls_token" in special:
        start, end = special["cls_token"], special["sep_token"]
        pairs = [(word, words.index(word)) for word in (start, end)]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=pairs)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _encoder(folder: Path, family: str, pooling: str, **sizes: Any) -> None:
    """A text encoder, and the files of sentence-transformers that say what makes a vector of its states."""
    tokenizer = byte_tokenizer(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    config = getattr(transformers, f"{family}Config")(**_SIZES, **sizes, vocab_size=len(tokenizer), pad_token_id=0)
    getattr(transformers, f"{family}Model")(config).save_pretrained(folder)
    parts = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{part}"}
        for number, (part, path) in enumerate(parts.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens", "max_tokens")}
    config_text = json.dumps({"word_embedding_dimension": _SIZES["hidden_size"], **modes})
    (folder / "1_Pooling/config.json").write_text(config_text)


def modernbert(folder: Path) -> None:
    """ModernBERT: one of three layers looks at all tokens, the others at their neighbours."""
    special = {f"{name}_token_id": number for name, number in (("cls", 1), ("bos", 1), ("sep", 2), ("eos", 2))}
    _encoder(folder, "ModernBert", "mean_tokens", **special, max_position_embeddings=512)


def e5(folder: Path) -> None:
    """E5, which is a BERT."""
    _encoder(folder, "Bert", "mean_tokens", max_position_embeddings=512)


def siglip(folder: Path) -> None:
    """SigLIP: a tower for pictures, and one for texts."""
    tokenizer = byte_tokenizer(pad_token="</s>", eos_token="</s>")
    tokenizer.model_input_names = ["input_ids"]
    tokenizer.save_pretrained(folder)
    special = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    texts = {**_SIZES, **special, "vocab_size": len(tokenizer), "max_position_embeddings": 16, "projection_size": 32}
    pictures = {**_SIZES, "image_size": 32, "patch_size": 8}
    config = transformers.SiglipConfig(text_config=texts, vision_config=pictures)
    transformers.SiglipModel(config).save_pretrained(folder)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def whisper(folder: Path) -> None:
    """Whisper with all that a request may ask of it: languages, tasks, times. A text has 32 tokens at most."""
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    special += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special, *(f"<|{n / 50:.2f}|>" for n in range(1501))]
    ids = {word: number for number, word in enumerate(words)}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    widths = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 128}
    towers = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    config = transformers.WhisperConfig(**widths, **towers, **tokens, vocab_size=len(ids), max_target_positions=32)
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        **tokens,
        max_length=config.max_target_positions,
        is_multilingual=True,
        lang_to_id={name: ids[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={name: ids[f"<|{name}|>"] for name in ("translate", "transcribe")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=50,
        return_timestamps=True,
    )
    model.save_pretrained(folder)
    tokenizer = transformers.WhisperTokenizer(vocab=ids, merges=[], pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    sounds = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    transformers.WhisperProcessor(sounds, tokenizer).save_pretrained(folder)


# Every tiny denoiser has two heads.
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
_SHIFTING = {"use_dynamic_shifting": True, "shift": 3.0}


def _words(length: int) -> Any:
    tokenizer = byte_tokenizer(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.model_max_length = length
    return tokenizer


def _t5(family: str = "T5") -> Any:
    """T5's encoder, or UMT5's."""
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 300}
    config = getattr(transformers, f"{family}Config")(**sizes, feed_forward_proj="gated-gelu", is_encoder_decoder=False)
    return getattr(transformers, f"{family}EncoderModel")(config)


def _flux(folder: Path, kind: str) -> None:
    """A pipeline of FLUX.1's parts."""
    clip = {**_SIZES, "projection_dim": 32, "vocab_size": 300, "eos_token_id": 2, "bos_token_id": 0}
    network = diffusers.FluxTransformer2DModel(
        **_HEADS,
        num_layers=2,
        num_single_layers=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
        guidance_embeds=True,
    )
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    getattr(diffusers, kind)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**_SHIFTING),
        vae=diffusers.AutoencoderKL(
            **blocks, block_out_channels=(8,) * 4, norm_num_groups=2, latent_channels=16, shift_factor=0.1
        ),
        text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(**clip)),
        tokenizer=_words(77),
        text_encoder_2=_t5(),
        tokenizer_2=_words(512),
        transformer=network,
    ).save_pretrained(folder)


def flux(folder: Path) -> None:
    """FLUX.1-dev."""
    _flux(folder, "FluxPipeline")


def kontext(folder: Path) -> None:
    """FLUX.1-Kontext."""
    _flux(folder, "FluxKontextPipeline")


# The least and the most that Qwen-Image-Edit's encoder sees of a picture.
_SEEN_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 112 * 112}


def qwen_edit(folder: Path) -> None:
    """Qwen-Image-Edit. Its processor needs torchvision."""
    names = [f"<|{name}|>" for name in ("im_start", "vision_start", "vision_end", "image_pad", "video_pad")]
    tokenizer = byte_tokenizer(pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    special = dict(zip(keys, tokenizer.convert_tokens_to_ids(names[1:]), strict=True))
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    texts = {**_SIZES, "num_key_value_heads": 2, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
    texts |= {"rope_parameters": rope, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    seen = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=texts, vision_config={**seen, "fullatt_block_indexes": [1], "window_size": 56}, **special
    )
    pictures = transformers.Qwen2VLImageProcessor(**_SEEN_PIXELS)
    diffusers.QwenImageEditPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**_SHIFTING),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
        processor=transformers.Qwen2VLProcessor(pictures, tokenizer, transformers.Qwen2VLVideoProcessor()),
        transformer=diffusers.QwenImageTransformer2DModel(
            **_HEADS, num_layers=2, joint_attention_dim=32, axes_dims_rope=(4, 6, 6)
        ),
    ).save_pretrained(folder)


def ltx(folder: Path) -> None:
    """LTX-Video: a latent is 8 frames of 32 x 32 pixels."""
    blocks = {f"{side}block_out_channels": (8, 8, 8, 8) for side in ("", "decoder_")}
    layers = {f"{side}layers_per_block": (1, 1, 1, 1, 1) for side in ("", "decoder_")}
    diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=diffusers.AutoencoderKLLTXVideo(latent_channels=8, **blocks, **layers),
        text_encoder=_t5(),
        tokenizer=_words(128),
        transformer=diffusers.LTXVideoTransformer3DModel(
            **_HEADS, in_channels=8, out_channels=8, cross_attention_dim=32, caption_channels=32, num_layers=2
        ),
    ).save_pretrained(folder)


def wan(folder: Path) -> None:
    """Wan2.2-TI2V-5B: a latent is 4 frames of 16 x 16 pixels, and a token is 2 x 2 of them."""
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 5.0}
    widths = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    pixels = {"in_channels": 12, "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "is_residual": True}
    diffusers.WanPipeline(
        scheduler=diffusers.UniPCMultistepScheduler(**flow),
        vae=diffusers.AutoencoderKLWan(**widths, **pixels, latents_mean=[0.0] * 8, latents_std=[1.0] * 8),
        text_encoder=_t5("UMT5"),
        tokenizer=_words(512),
        transformer=diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=24,
            in_channels=8,
            out_channels=8,
            text_dim=32,
            freq_dim=16,
            ffn_dim=64,
            num_layers=2,
        ),
        expand_timesteps=True,
    ).save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (modernbert, e5, siglip, whisper, flux, kontext, qwen_edit, ltx, wan)
}


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path, help="a new folder")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    torch.manual_seed(0)
    MODELS[args.model](args.folder)


if __name__ == "__main__":
    main()
