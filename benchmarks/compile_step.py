"""A token's time with Inductor's options as given, of a step that is compiled without a boot: for what is tried.

    python benchmarks/compile_step.py --shape llama-3.1-8b combo_kernels=True triton.enable_pdl=True

Random weights, a prompt of 128 tokens, greedy answers. Options have the names of torch._inductor.config, and Python's
literals as values.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import llama
import torch
import torch._inductor.config

sys.path.append(str(Path(__file__).resolve().parents[1]))

from boot_process import describe_machine
from text_boot import Timing

from models.text.generation import Generator, Request

_CACHE_TOKENS, _PROMPT = 2304, 128
_ANSWERS = 4


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """`name=literal`, each."""
    pairs = (option.partition("=") for option in options)
    return {name: ast.literal_eval(value) for name, _, value in pairs}


def main() -> None:
    """Build, compile, record, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(llama.SHAPES), required=True)
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("options", nargs="*", help="name=literal")
    args = parser.parse_args()
    options = parse_options(args.options)
    model = llama.build(llama.SHAPES[args.shape])
    if not torch.cuda.is_available():
        model = model.float()
    generator = Generator(model, _CACHE_TOKENS, (_PROMPT,))
    request = Request(llama.make_prompt(model.config.vocab_size, _PROMPT), args.tokens)
    eager = list(generator.tokens(request))
    generator.decode = torch.compile(generator.decode, fullgraph=True)
    with torch._inductor.config.patch(options):
        compiled = list(generator.tokens(request))
    generator.record()
    token_ms = [Timing.of(generator.tokens(request)).token_ms for _ in range(_ANSWERS)][1:]
    same = next((number for number, pair in enumerate(zip(eager, compiled, strict=True)) if pair[0] != pair[1]), None)
    print(f"machine: {describe_machine()}")
    print(f"{options}: {median(token_ms):.3f} ms a token; {'all' if same is None else same} tokens as in eager")


if __name__ == "__main__":
    main()
