"""A token's time, batch 1: transformers' generate, with its default cache and with a static one, and TextPredictor.

    python benchmarks/decode.py --model /tmp/llama --store /tmp/decode --rounds 2

Each measurement is a fresh process, the ways in turn. Every answer is timed as its consumer sees it: generate's tokens
count when they are on the host, TextPredictor's when they are text. The first boot of TextPredictor fills the store and
is not measured. Exits with 1 if TextPredictor compiled anything after READY, or is not precompiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import Model, add_line, boot_environment, conclude, new_log, run_process
from served import InProcess, describe_machine
from table import markdown, spread

WAYS = {
    "eager": "`generate`, eager",
    "static": "`generate`, static cache",
    "ours": "this project",
}
CHOICES = ("greedy", "sampled")
_COLUMNS = ("way", "choice", "n", "first token, ms", "token, ms", "tokens/s")
# As many as a way needs until it compiles nothing and records no CUDA graph any more.
_WARM_UPS = 3
_REPEATS = 3
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
# What one process printed: by choice, seconds of the first token and milliseconds of a later one.
Decoded = dict[str, Any]


def decode(way: str, model: Model, args: Any) -> Decoded:
    """One process.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, __file__, "--serve", way, json.dumps(model.inputs), "--store", str(args.store)]
    environ = boot_environment(args.store, "warm", args.store / "store") | model.variables
    environ |= {"MODEL": str(model.folder), "COMPILE_CACHE_COLD_START": "block"}
    if way != "ours":  # a boot has a directory of its own
        folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environ |= {name: str(args.store / folder) for name, folder in folders.items()}
    return {"way": way, **json.loads(run_process(way, command, environ, new_log(args.store, way), args.timeout))}


def row(way: str, choice: str, found: Sequence[Decoded]) -> list[str]:
    """One line of the table: medians, with their range."""
    answers = [decoded[choice] for decoded in found if decoded["way"] == way]
    token_ms = [answer["token_ms"] for answer in answers]
    return [
        WAYS[way],
        choice,
        str(len(answers)),
        spread(answer["first_s"] * 1e3 for answer in answers),
        spread(token_ms),
        spread((1e3 / value for value in token_ms), 1),
    ]


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
        }


def measure(way: Generated | Ours, choice: str) -> dict[str, float]:
    """Medians of several answers: the first token, and the mean of a token after it."""
    found = [way.arrivals_s(choice) for _ in range(_REPEATS)]
    return {
        "first_s": median(arrivals[0] for arrivals in found),
        "token_ms": median((arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) for arrivals in found) * 1e3,
    }


def serve(name: str, inputs: dict[str, Any]) -> Decoded:
    """Load, warm up, and time the answers of one way in this process."""
    way = Ours(inputs) if name == "ours" else Generated(inputs, "static" if name == "static" else None)
    for _ in range(1 if name == "eager" else _WARM_UPS):
        way.arrivals_s("greedy")
    answers = {choice: measure(way, choice) for choice in CHOICES}
    return {**way.conclude(), "machine": describe_machine(), **answers}


def main() -> None:
    """Fill the store, measure in turn, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder that llama.py wrote; a demo model if not given")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store, cache directories and logs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=2, help="processes of each way")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, help="file to which each process is added as a JSON line")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(serve(args.serve[0], json.loads(args.serve[1]))), flush=True)
        return
    args.store = args.store.resolve()
    args.store.mkdir(parents=True, exist_ok=True)
    model = Model.of_text(args.model, args.prompt, args.tokens)
    if "ours" in args.ways:
        decode("ours", model, args)
    found: list[Decoded] = []
    for way in args.ways * args.rounds:
        found.append(decode(way, model, args))
        print(json.dumps(found[-1]), flush=True)
        add_line(args.out, found[-1])
    rows = (row(way, choice, found) for way in args.ways for choice in CHOICES)
    print(f"\n{found[0]['machine']}; median (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    ours = [decoded for decoded in found if decoded["way"] == "ours"]
    conclude(
        {
            "nothing is compiled after READY": not any(decoded["graphs_after_ready"] for decoded in ours),
            "every boot is fully precompiled": all(decoded["fully_precompiled"] for decoded in ours),
        }
    )


if __name__ == "__main__":
    main()
