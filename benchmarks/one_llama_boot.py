"""One boot of a Llama in this process, as TextPredictor does it; prints one JSON line, a llama_boot.Boot."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from statistics import median

from boot_process import describe_machine, wait_published
from llama_boot import Boot
from text_boot import Booted, Timing, boot_text, text_settings

# torch and the models are imported in the boot, after the restore has started.


def digest_logits(booted: Booted, token: int) -> str:
    """Of the bytes of the logits of one step after an answer that ended with `token`: the same only where every sum was
    made in the same order."""
    import torch

    # Made outside of inference mode, as the generator's own: in it, it would be another kind of tensor to torch.
    step = torch.full((1, 1), token, device=booted.model.generator.decode.model.device)
    with torch.inference_mode():
        logits = booted.model.generator.decode(step)
    return hashlib.sha256(logits.float().cpu().numpy().tobytes()).hexdigest()


def main() -> None:
    """Boot, answer, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", help="eager, cold or warm, for the record")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, required=True, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, required=True, help="tokens to generate")
    parser.add_argument("--answers", type=int, default=3, help="answers to time")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for what is published")
    args = parser.parse_args()

    booted = boot_text(text_settings(args.model))
    from llama import make_prompt

    from models.text.generation import Request

    generator = booted.model.generator
    request = Request(make_prompt(generator.decode.model.config.vocab_size, args.prompt), args.tokens)
    before = booted.boot.counts()
    answers = [Timing.of(generator.tokens(request)) for _ in range(args.answers)]
    tokens = booted.model.run(request)
    logits = digest_logits(booted, tokens[-1])
    graphs_after_ready = booted.boot.counts().since(before).graphs
    wait_published(booted.boot, args.timeout)
    record = Boot(
        kind=args.kind,
        report=json.loads(booted.boot.report.to_json()),
        tokens=tokens,
        logits_sha256=logits,
        first_answer_s=answers[0].total_s,
        first_token_ms=median(answer.first_s for answer in answers) * 1e3,
        token_ms=median(answer.token_ms for answer in answers),
        graphs_after_ready=graphs_after_ready,
        is_recorded=booted.is_recorded,
        machine=describe_machine(),
    )
    print(json.dumps(dataclasses.asdict(record)), flush=True)


if __name__ == "__main__":
    main()
