"""Answers of one way to generate, timed in this process; prints one JSON line. decode.py starts it."""

from __future__ import annotations

import argparse
import json
import os
import time
from statistics import median
from typing import Any

from decode import CHOICES, WAYS
from served import InProcess, describe_machine

# As many as a way needs until it compiles nothing and records no CUDA graph any more.
_WARM_UPS = 3
_REPEATS = 3
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}


class Generated:
    """transformers' generate: what is compiled, it compiles itself, at its first calls."""

    def __init__(self, inputs: dict[str, Any], cache: str | None) -> None:
        import torch
        from transformers import AutoTokenizer

        from models.text.model import load_model

        self.model = load_model(os.environ["MODEL"], None)
        tokenizer = AutoTokenizer.from_pretrained(os.environ["MODEL"])
        prompt = tokenizer(inputs["prompt"], return_tensors="pt", return_token_type_ids=False).to(self.model.device)
        length = inputs["max_new_tokens"]
        self._arguments: dict[str, Any] = {**prompt, "max_new_tokens": length, "min_new_tokens": length}
        if cache:
            self._arguments["cache_implementation"] = cache
        self._seed = torch.manual_seed

    def arrivals_s(self, choice: str) -> list[float]:
        """Seconds from the request until each token is on the host."""
        from transformers.generation.streamers import BaseStreamer

        class Consumer(BaseStreamer):
            """Is handed the prompt, and then each token, on the host."""

            def __init__(self) -> None:
                self.times_s: list[float] = []

            def put(self, value: Any) -> None:
                self.times_s.append(time.perf_counter())

            def end(self) -> None:
                pass

        consumer = Consumer()
        chosen = {"do_sample": True, **_SAMPLING} if choice == "sampled" else {"do_sample": False}
        self._seed(0)
        started = time.perf_counter()
        self.model.generate(**self._arguments, **chosen, streamer=consumer)
        return [arrived - started for arrived in consumer.times_s[1:]]

    def conclude(self) -> dict[str, Any]:
        """Nothing was booted."""
        return {}


class Ours:
    """TextPredictor, after its setup."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        from predict import TextPredictor

        self._predictor = TextPredictor()
        self._predictor.setup()
        self.model = self._predictor.model.generator.decode.model
        self._before = self._predictor.boot.counts()
        self._served = InProcess(self._predictor)
        self._inputs = inputs

    def arrivals_s(self, choice: str) -> list[float]:
        """Seconds from the request until each piece of text; a token of llama.py's models is a piece."""
        chosen = _SAMPLING if choice == "sampled" else {}
        return list(self._served.answer(**{**self._inputs, **chosen}).arrivals_s)

    def conclude(self) -> dict[str, Any]:
        """What was compiled after READY, and whether all was restored; then wait until it is in the store."""
        boot = self._predictor.boot
        if not boot.wait_published(300.0) or boot.report.publish.failures:
            raise SystemExit(f"not published: {boot.report.publish.failures}")
        return {
            "graphs_after_ready": boot.counts().since(self._before).graphs,
            "fully_precompiled": boot.report.fully_precompiled,
            "ready_s": boot.report.process_s,
        }


def measure(way: Generated | Ours, choice: str) -> dict[str, float]:
    """Medians of several answers: the first token, and the mean of a token after it."""
    found = [way.arrivals_s(choice) for _ in range(_REPEATS)]
    return {
        "first_s": median(arrivals[0] for arrivals in found),
        "token_ms": median((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) for arrivals in found) * 1e3,
    }


def weight_bytes(model: Any) -> int:
    """What one token reads of the weights: all but the input embedding, of which it reads a row; that one as well where
    the logits are made with it."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    is_tied = output is not None and output.weight is embedding
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(total - (0 if is_tied else embedding.numel() * embedding.element_size()))


def main() -> None:
    """Load, warm up, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("inputs", help="JSON of a request")
    args = parser.parse_args()
    inputs = json.loads(args.inputs)
    way = Ours(inputs) if args.way == "ours" else Generated(inputs, "static" if args.way == "static" else None)
    for _ in range(1 if args.way == "eager" else _WARM_UPS):
        way.arrivals_s("greedy")
    answers = {choice: measure(way, choice) for choice in CHOICES}
    found = {**way.conclude(), "weight_bytes": weight_bytes(way.model), "machine": describe_machine(), **answers}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
