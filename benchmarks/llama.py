"""Write a Llama of any size with random weights and a tokenizer of made-up words: what `models.text` serves.

python benchmarks/llama.py --shape llama-3.1-8b --out /tmp/llama
"""

from __future__ import annotations

import argparse
import math
import tomllib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SEED = 0
SHAPES: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text())["llamas"]
TINY = SHAPES["tiny"] = SHAPES["llama-3.1-8b"] | SHAPES["tiny"]


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
            model = LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **shape))
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=4.0)
        for layer in model.model.layers:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
                linear.weight.div_(math.sqrt(2 * len(model.model.layers)))
    return model.eval()


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """One word a token: `w0`, `w1` … None is special, so that every token is text, and none ends it."""
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocabulary)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def write(shape: dict[str, Any], folder: Path) -> int:
    """Write the folder that `TextModel.load` reads; the number of its parameters."""
    model = build(shape)
    model.save_pretrained(folder, max_shard_size="5GB")
    build_tokenizer(shape["vocab_size"]).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()
    parameters = write(SHAPES[args.shape], args.out)
    size_bytes = sum(path.stat().st_size for path in args.out.glob("*.safetensors"))
    print(f"{parameters / 1e9:.3f} B parameters, {size_bytes / 1e9:.2f} GB in {args.out}")


if __name__ == "__main__":
    main()
