"""What a region's call costs beside the same call of an untouched module, on a CPU.

    python benchmarks/call_cost.py [--against CHECKOUT]

The modules do next to nothing, and have 12, 52 and 402 parts. EAGER and PRECOMPILED are held against the untouched
module, GRAPHS against plain `torch.compile` of a module with the same graph break. A figure is the median of 40 rounds
of 200 calls of both, in turn, in a marked prediction. The last row is a token of whisper's shape with a growing cache
and 8 layers, over the untouched model's: the median, the least and the greatest of 40 pairs in turn.

With --against, the same is measured with another checkout of this project, in turn.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import compile_cache

PROJECT = Path(__file__).parents[1]
CALLS, ROUNDS, PAIRS, TOKENS = 200, 40, 40, 96
PARTS = (12, 52, 402)

if __name__ != "__main__":
    import torch
    from torch import nn

    class Plain(nn.Module):
        """A product, and many parts."""

        def __init__(self, parts: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.others = nn.ModuleList(nn.Identity() for _ in range(parts - 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Break the graph, if it is a subclass."""
            return x * self.weight

    class Breaking(Plain):
        """The same with a graph break."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Multiply, and add one."""
            y = x * self.weight
            torch._dynamo.graph_break()
            return y + 1


def boot(**settings: str) -> Any:
    """A boot without a store."""
    folder = tempfile.mkdtemp(prefix="call-cost-")
    os.environ.update({"COMPILE_CACHE_STORE": "off", "COMPILE_CACHE_DIR": f"{folder}/c", **settings})
    return compile_cache.boot("call-cost", sources=[__file__])


def in_turn(one: Callable[[], Any], other: Callable[[], Any]) -> list[float]:
    """The medians of both in microseconds a call."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for call, found in zip((one, other), times, strict=True):
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - started) / CALLS * 1e6)
    return [round(statistics.median(found), 1) for found in times]


def states(parts: int) -> dict[str, Any]:
    """A call in each state, and what it is held against, in microseconds."""
    with boot(COMPILE_CACHE_COLD_START="block", COMPILE_CACHE_UNSEEN="eager") as begun:
        torch.set_num_threads(1)
        eager, ahead, broken = Plain(parts), Plain(parts), Breaking(parts)
        twin, plain = Plain(parts), torch.compile(Breaking(parts))
        x, y = torch.ones(2, 4), torch.ones(3, 4)
        for module in (eager, ahead, broken):
            begun.compile(module, whole=True)
        begun.warm_up(torch.inference_mode()(lambda: [(ahead(y), broken(x)) for _ in range(3)]))
    for _ in range(2):
        with torch.inference_mode(), begun.prediction() as prediction:
            for _ in range(3):
                eager(x), ahead(y), broken(x), plain(x)
            found = {
                "EAGER": in_turn(lambda: eager(x), lambda: twin(x)),
                "PRECOMPILED": in_turn(lambda: ahead(y), lambda: twin(y)),
                "GRAPHS": in_turn(lambda: broken(x), lambda: plain(x)),
            }
    return {**found, "served": prediction.served()}


def growing() -> dict[str, Any]:
    """A token's time over the untouched model's, in pairs."""
    with boot(COMPILE_CACHE_COLD_START="background") as begun:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        sizes = {"d_model": 256, "encoder_layers": 1, "decoder_layers": 8, "max_source_positions": 100}
        sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        tokens = {"vocab_size": 1000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = WhisperConfig(**sizes, **tokens, decoder_start_token_id=1, encoder_ffn_dim=512, decoder_ffn_dim=512)
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config).eval().requires_grad_(False)
        twin, features = copy.deepcopy(model), torch.randn(1, config.num_mel_bins, 200)

        def run(model: Any, count: int = TOKENS) -> float:
            started = time.perf_counter()
            with torch.inference_mode(), begun.prediction():
                model.generate(input_features=features, max_new_tokens=count, min_new_tokens=count, do_sample=False)
            return time.perf_counter() - started

        begun.compile(model.model.decoder)
        begun.warm_up(lambda: run(model, 4))
    quiet = 0
    for _ in range(60):  # each layer gets code for the first token
        begun.wait_compiled(900)
        run(model), run(twin)
        quiet = 0 if begun.waiting else quiet + 1
        if quiet == 3:
            break
    ratios = []
    for pair in range(PAIRS):
        seconds = {subject is model: run(subject) for subject in ((model, twin), (twin, model))[pair % 2]}
        ratios.append(seconds[True] / seconds[False])
    (region,) = begun.report.regions
    spread = [round(ratio, 3) for ratio in (statistics.median(ratios), min(ratios), max(ratios))]
    return {"ratio": spread, "reason": region.reason}


def main() -> None:
    """Measure in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.path.insert(0, str(Path(__file__).parent))
        own = importlib.import_module("call_cost")  # another process imports its classes
        print(json.dumps(own.growing() if options.one == "growing" else own.states(int(options.one))))
        return
    checkouts = [path.resolve() for path in (options.against, PROJECT) if path is not None]
    for what in (*map(str, PARTS), "growing"):
        for checkout in checkouts:
            command = [sys.executable, __file__, "--one", what]
            environ = {**os.environ, "PYTHONPATH": str(checkout)}
            done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            told = done.stdout.strip().rpartition("\n")[2] or f"failed with {done.returncode}"
            print(json.dumps({"checkout": checkout.name, "what": what}), told, flush=True)


if __name__ == "__main__":
    main()
