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


MODELS: dict[str, Callable[[Path], None]] = {one.__name__: one for one in (modernbert, e5, siglip, whisper)}


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
