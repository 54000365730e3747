"""One boot of a Llama in this process, with the library alone; prints one JSON line, a llama_boot.Boot."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from boot_process import describe_machine, synchronize, wait_published
from llama_boot import Boot

import compile_cache

# torch, transformers and llama are imported in the boot, after the restore has started.

SOURCES = [Path(__file__).with_name("llama.py")]
_WARM_UP_TOKENS = 4


def boot_model(folder: str, prompt_tokens: int) -> tuple[compile_cache.Boot, Any, Any]:
    """A boot, its decoder and a prompt, READY."""
    with compile_cache.boot(folder, sources=SOURCES) as boot:
        with boot.timed("import"):
            import llama
        boot.preload()
        with boot.timed("weights"):
            step = llama.DecodeStep(llama.load(folder))
        boot.compile(step)
        prompt = llama.make_prompt(step.model.config.vocab_size, prompt_tokens)
        boot.warm_up(lambda: step.decode(step.prefill(prompt), prompt_tokens, _WARM_UP_TOKENS))
    return boot, step, prompt


def answer(step: Any, prompt: Any, tokens: int) -> tuple[list[int], float, float]:
    """The `tokens` that follow a prompt and its next one, the seconds this took, and milliseconds a decoded token."""
    synchronize()
    started = time.perf_counter()
    token = step.prefill(prompt)
    synchronize()
    prefilled = time.perf_counter()
    found = step.decode(token, prompt.shape[1], tokens)
    synchronize()
    ended = time.perf_counter()
    return found.flatten().tolist(), ended - started, (ended - prefilled) / tokens * 1e3


def digest_logits(step: Any, token: int, position: int) -> str:
    """Of the bytes of one step's logits: the same only where every sum was made in the same order."""
    import torch

    with torch.inference_mode():
        device = step.model.device
        logits = step(torch.tensor([[token]], device=device), torch.tensor([position], device=device))
    return hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    """Boot, answer, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager, cold or warm, for the record")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, required=True, help="tokens to decode")
    parser.add_argument("--answers", type=int, default=3, help="continuations to time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for what is published")
    args = parser.parse_args()

    boot, step, prompt = boot_model(args.model, args.prompt)
    before = boot.counts()
    answers = [answer(step, prompt, args.tokens) for _ in range(args.answers)]
    tokens, first_s, _ = answers[0]
    logits = digest_logits(step, tokens[-1], args.prompt + args.tokens)
    graphs_after_ready = boot.counts().since(before).graphs
    wait_published(boot, args.timeout)
    record = Boot(
        kind=args.kind,
        report=json.loads(boot.report.to_json()),
        tokens=tokens,
        logits_sha256=logits,
        first_answer_s=first_s,
        token_ms=median(token_ms for _, _, token_ms in answers),
        graphs_after_ready=graphs_after_ready,
        machine=describe_machine(),
    )
    print(json.dumps(dataclasses.asdict(record)), flush=True)


if __name__ == "__main__":
    main()
