"""Answers of one way to generate, timed in this process; prints one JSON line, a decode.Decoded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from boot_process import describe_machine, wait_published
from decode import CHOICES, WAYS, Answer, Decoded
from text_boot import Timing, boot_text, describe_boot, text_settings, weight_bytes

if TYPE_CHECKING:
    import torch

# torch and the models are imported in the boot, after the restore has started.

# As many as one of the ways needs until it compiles nothing and records no CUDA graph any more.
_WARM_UPS = 3
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


class Generated:
    """transformers' generate: what is compiled, it compiles itself, at its first calls."""

    boot_line = ""
    graphs_after_ready = 0

    def __init__(self, folder: str, cache: str | None, prompt: int, tokens: int) -> None:
        import torch
        from llama import make_prompt

        from models.text.model import load_model

        self.model = load_model(folder, None)
        ids = make_prompt(self.model.config.vocab_size, prompt)
        self._prompt = torch.tensor([ids], device=self.model.device)
        self._arguments: dict[str, Any] = {"max_new_tokens": tokens, "attention_mask": torch.ones_like(self._prompt)}
        if cache:
            self._arguments["cache_implementation"] = cache

    def _generate(self, choice: str, **arguments: Any) -> Any:
        chosen = {"do_sample": True, **_SAMPLING} if choice == "sampled" else {"do_sample": False}
        return self.model.generate(self._prompt, **self._arguments, **chosen, **arguments)

    def time(self, choice: str) -> Timing:
        """One answer, timed as its consumer sees it."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        class Consumer(BaseStreamer):
            """Is handed the prompt, and then each token, on the host."""

            def __init__(self) -> None:
                self.times_s: list[float] = []

            def put(self, value: torch.Tensor) -> None:
                self.times_s.append(time.perf_counter())

            def end(self) -> None:
                pass

        consumer = Consumer()
        torch.manual_seed(0)
        started = time.perf_counter()
        self._generate(choice, streamer=consumer)
        return Timing(tuple(arrived - started for arrived in consumer.times_s[1:]))

    def greedy(self) -> tuple[list[int], list[float], list[int]]:
        """The greedy answer's tokens, by how much its logits prefer each to the runner-up, and the runners-up."""
        import torch

        found = self._generate("greedy", return_dict_in_generate=True, output_logits=True)
        # [tokens, 2], of logits: [1, vocabulary] each
        best = torch.cat(found.logits).float().topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        tokens = found.sequences[0, self._prompt.shape[1] :].tolist()
        return tokens, margins, best.indices[:, 1].tolist()

    def end(self) -> None:
        """Nothing is published."""


class Ours:
    """The Generator, in a boot like TextPredictor's."""

    def __init__(self, folder: str, prompt: int, tokens: int, timeout_s: float) -> None:
        self._booted = boot_text(text_settings(folder))
        from llama import make_prompt

        from models.text.generation import Request
        from models.text.sampling import Sampling

        self.model = self._booted.model.generator.decode.model
        self._timeout_s = timeout_s
        self._before = self._booted.boot.counts()
        ids = make_prompt(self.model.config.vocab_size, prompt)
        sampling = {"greedy": Sampling(), "sampled": Sampling(**_SAMPLING)}
        self._requests = {choice: Request(ids, tokens, sampling[choice]) for choice in CHOICES}
        self.boot_line = describe_boot(self._booted)

    def time(self, choice: str) -> Timing:
        """One answer, timed as its consumer sees it."""
        return Timing.of(self._booted.model.generator.tokens(self._requests[choice]))

    def greedy(self) -> tuple[list[int], list[float], list[int]]:
        """The greedy answer's tokens; no margins."""
        return self._booted.model.run(self._requests["greedy"]), [], []

    @property
    def graphs_after_ready(self) -> int:
        """How many graphs predictions have compiled."""
        return self._booted.boot.counts().since(self._before).graphs

    def end(self) -> None:
        """Wait until what was compiled is in the store."""
        wait_published(self._booted.boot, self._timeout_s)


def measure(way: Generated | Ours, choice: str, repeats: int) -> Answer:
    """Medians of several answers."""
    timings = [way.time(choice) for _ in range(repeats)]
    return Answer(
        total_s=median(timing.total_s for timing in timings),
        first_s=median(timing.first_s for timing in timings),
        token_ms=median(timing.token_ms for timing in timings),
        gap_ms=median(timing.median_gap_ms for timing in timings),
    )


def main() -> None:
    """Load, warm up, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for what is published")
    args = parser.parse_args()

    way: Generated | Ours
    if args.way.startswith("ours"):
        way = Ours(args.model, args.prompt, args.tokens, args.timeout)
    else:
        way = Generated(args.model, "static" if args.way.startswith("static") else None, args.prompt, args.tokens)
    for _ in range(1 if args.way == "eager" else _WARM_UPS):
        way.time("greedy")
    answers = {choice: measure(way, choice, args.repeats) for choice in CHOICES}
    tokens, margins, runners_up = way.greedy()
    from clock import copy_bytes_per_s

    way.end()
    record = Decoded(
        way=args.way,
        answers=answers,
        tokens=tokens,
        margins=margins,
        runners_up=runners_up,
        weight_bytes=weight_bytes(way.model),
        copy_bytes_per_s=copy_bytes_per_s(),
        graphs_after_ready=way.graphs_after_ready,
        boot=way.boot_line,
        machine=describe_machine(),
    )
    print(json.dumps(dataclasses.asdict(record)), flush=True)


if __name__ == "__main__":
    main()
