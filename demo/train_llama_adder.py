"""Train a tiny Llama that adds.

    python demo/train_llama_adder.py --out demo/llama-adder

writes a folder that plain ``AutoModelForCausalLM.from_pretrained`` and
``AutoTokenizer.from_pretrained`` load. The model answers "23+45=" with "68" and
the end of the sequence, for operands from 0 to 999. It is trained from scratch
on sums drawn here, with a fixed seed, and tested on unseen sums (``sums.py``).
Exits 1 if fewer than 99 % of the test's sums come out right.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sums import answer, draw_operand, is_unseen, prompt, unseen_sums
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = "<bos>", "<eos>", "<pad>"
POSITIONS = 256
ROPE_THETA = 100.0  # the default's slow rotations hardly turn over 14 tokens, the longest sum
ANSWER_TOKENS = 5  # four digits and the end of the sequence
CHECK_BATCH = 500
CARRIES = 0.25  # share of training sums drawn to carry far, where the mistakes are
NO_LOSS = -100  # the label that cross entropy leaves out
ENOUGH = 0.99  # share of unseen sums that must come out right

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ message['content'] }}{% if message['role'] == 'system' %}{{ '\\n' }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Settings:
    """The differences between a full training and a quick trial."""

    steps: int = 4000
    batch: int = 256
    peak_rate: float = 3e-3
    device: str = "cpu"
    seed: int = 0


# Tokenizer


def byte_symbols() -> list[str]:
    """Return the byte-level alphabet in the order of the bytes, so that a byte is its own token id.

    A printable byte is its own character. The other bytes become, in order, the characters from 256 on.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = {ord(symbol): symbol for symbol in alphabet if ord(symbol) < 256}
    moved = iter(sorted(symbol for symbol in alphabet if ord(symbol) >= 256))
    return [printable.get(byte) or next(moved) for byte in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer without merges: one token a byte, and a BOS before the text."""
    ids = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, PAD)])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, backend.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


# Model


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Untrained Llama of width 128: 3 layers, grouped-query attention, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


# Training


def draw_carry(rng: random.Random) -> tuple[int, int]:
    """Draw a sum close to a round hundred: its first digit depends on a carry from the last digits."""
    while True:
        a = draw_operand(rng)
        b = 100 * rng.randint(1, 19) + rng.randint(-5, 5) - a
        if 0 <= b <= 999:
            return (a, b) if rng.random() < 0.5 else (b, a)


def training_sums(rng: random.Random) -> Iterator[tuple[int, int]]:
    """Draw sums without end, except those held out for the test."""
    while True:
        pair = draw_carry(rng) if rng.random() < CARRIES else (draw_operand(rng), draw_operand(rng))
        if not is_unseen(*pair):
            yield pair


def encode(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return the sums' tokens (N, L) and labels (N, L): only the answer and the EOS count."""
    texts = [prompt(a, b) + answer(a, b) + EOS for a, b in pairs]
    ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
    is_equals = ids == tokenizer.convert_tokens_to_ids("=")
    after_equals = is_equals.cumsum(1).bool() & ~is_equals
    counts = after_equals & (ids != tokenizer.pad_token_id)
    return ids, ids.masked_fill(~counts, NO_LOSS)


def batches(tokenizer: PreTrainedTokenizerFast, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    """Draw training batches without end."""
    pairs = training_sums(random.Random(settings.seed))
    while True:
        ids, labels = encode(tokenizer, list(itertools.islice(pairs, settings.batch)))
        yield ids.to(settings.device), labels.to(settings.device)


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> None:
    """Train with a rate that warms up to its peak and falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.peak_rate, betas=(0.9, 0.99), weight_decay=0.01)
    rate = OneCycleLR(optimizer, max_lr=settings.peak_rate, total_steps=settings.steps, pct_start=0.05)
    start = time.monotonic()
    for step, (ids, labels) in enumerate(itertools.islice(batches(tokenizer, settings), settings.steps)):
        # Right padding comes after every token that counts, so causal attention needs no mask.
        logits, targets = model(ids[:, :-1], use_cache=False).logits, labels[:, 1:]
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NO_LOSS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
        if step % 100 == 0 or step == settings.steps - 1:
            counts = targets != NO_LOSS
            right = ((logits.argmax(-1) == targets) | ~counts).all(1).float().mean().item()
            seconds = time.monotonic() - start
            print(f"step {step}: loss {loss.item():.4f}, right {right:.1%}, {seconds:.0f} s", flush=True)


# Checking and saving


def build_and_train(settings: Settings) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train from the fixed seed."""
    torch.manual_seed(settings.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to(settings.device)
    print(f"{model.num_parameters():,} parameters", flush=True)
    train(model, tokenizer, settings)
    return model, tokenizer


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the model and the tokenizer, with the weights in bfloat16, which halves the folder."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


@torch.no_grad()
def share_right(folder: Path, pairs: Sequence[tuple[int, int]], device: str, dtype: torch.dtype) -> float:
    """Load the saved folder and return the share of sums that greedy decoding gets right, EOS included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    right = 0
    for start in range(0, len(pairs), CHECK_BATCH):
        part = pairs[start : start + CHECK_BATCH]
        prompts = tokenizer([prompt(a, b) for a, b in part], padding=True, return_tensors="pt").to(device)
        tokens = model.generate(**prompts, max_new_tokens=ANSWER_TOKENS)[:, prompts.input_ids.shape[1] :]
        texts = [text.replace(PAD, "") for text in tokenizer.batch_decode(tokens)]
        right += sum(text == answer(a, b) + EOS for text, (a, b) in zip(texts, part, strict=True))
    return right / len(pairs)


def main() -> int:
    """Train, save and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--batch", type=int, default=Settings.batch)
    parser.add_argument("--sums", type=int, default=1000, help="unseen sums to check")
    args = parser.parse_args()
    settings = Settings(steps=args.steps, batch=args.batch, device=args.device)
    save(*build_and_train(settings), args.out)
    share = share_right(args.out, unseen_sums(args.sums), args.device, torch.float32)
    print(f"right of {args.sums} unseen sums: {share:.2%}")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
