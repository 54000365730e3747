"""What a region's call costs beside the same call of an untouched module, on a CPU, by the state of its case.

    python benchmarks/call_cost.py [--rounds 60] [--inside]

The modules do next to nothing and have 12, 52 and 402 parts. EAGER is held against the untouched module, CACHED against
plain `torch.compile` of a module with the same graph break, PRECOMPILED against the untouched module. Each round times
200 calls of both, in turn; the figures are medians in microseconds a call. With --inside, the calls are made in a marked
prediction.

The last line is a text decoder with a growing cache, 8 layers: a token over the untouched decoder's, in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import compile_cache

CALLS = 200
PARTS = (12, 52, 402)


def boot(**settings: str) -> Any:
    folder = tempfile.mkdtemp(prefix="call-cost-")
    environ = {"COMPILE_CACHE_STORE": "off", "COMPILE_CACHE_DIR": f"{folder}/c", "COMPILE_CACHE_COLD_START": "block"}
    os.environ.update({**environ, **settings})
    return compile_cache.boot("call-cost", sources=[__file__])


def compared(one: Callable[[], Any], other: Callable[[], Any], rounds: int, calls: int = CALLS) -> tuple[float, float]:
    """The medians of both in microseconds a call, timed in turn."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for call, seconds in zip((one, other), times, strict=True):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            seconds.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--inside", action="store_true")
    options = parser.parse_args()
    for parts in PARTS:
        measure(parts, options.rounds, options.inside)
    measure_growing(10)


def measure(parts: int, rounds: int, inside: bool) -> None:
    with boot(COMPILE_CACHE_UNSEEN="eager") as begun:
        import torch
        from call_cost_modules import Breaking, Plain

        eager, broken, ahead = Plain(parts), Breaking(parts), Plain(parts)
        twins = Plain(parts), Breaking(parts)
        x, y = torch.ones(2, 4), torch.ones(3, 4)
        for module in (eager, broken, ahead):
            module.requires_grad_(False)
            begun.compile(module, whole=True)

        def warm() -> None:
            with torch.inference_mode():
                for _ in range(2):
                    ahead(y)
                    broken(x)

        begun.warm_up(warm)
    plain = torch.compile(twins[1])
    with torch.inference_mode(), begun.prediction() if inside else contextlib.nullcontext():
        for _ in range(3):
            for module in (eager, broken, plain):
                module(x)
            ahead(y)
        served = dict(eager=eager, cached=broken, precompiled=ahead)
        for name, module, twin, value in (
            ("EAGER", eager, twins[0], x),
            ("CACHED", broken, plain, x),
            ("PRECOMPILED", ahead, twins[0], y),
        ):
            ours, other = compared(lambda: module(value), lambda: twin(value), rounds)  # noqa: B023
            print(f"{parts:4d} parts {name:12s} {ours:8.1f} µs, {other:8.1f} without: {ours - other:+.1f}", flush=True)
    del served
    for report in begun.report.regions:
        print(f"     {report.name}: {report.step}; {report.reason[:160]}")


def measure_growing(pairs: int) -> None:
    """A token over the untouched decoder's, in pairs in turn."""
    with boot(COMPILE_CACHE_UNSEEN="background", COMPILE_CACHE_COLD_START="background") as begun:
        import copy

        import torch
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig(
            vocab_size=1000, d_model=256, encoder_layers=1, decoder_layers=8, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512, max_source_positions=100,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config).eval().requires_grad_(False)
        twin = copy.deepcopy(model)
        features = torch.randn(1, config.num_mel_bins, 200)

        def run(model: Any, tokens: int = 96) -> Any:
            with torch.inference_mode():
                return model.generate(
                    input_features=features, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
                )

        begun.compile(model.model.decoder)
        begun.warm_up(lambda: run(model, 4))
    assert begun.wait_compiled(600)
    for _ in range(3):
        with begun.prediction():
            run(model)
    begun.wait_compiled(600)
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for subject in (model, twin) if pair % 2 else (twin, model):
            started = time.perf_counter()
            with begun.prediction() as prediction:
                run(subject)
            seconds[subject is model] = time.perf_counter() - started
            if subject is model:
                served = {name: dict(steps) for name, steps in prediction.served().items()}
        ratios.append(seconds[True] / seconds[False])
    print(
        f"a token of whisper's shape with a growing cache: {statistics.median(ratios):.3f} of the untouched one's "
        f"({min(ratios):.3f}–{max(ratios):.3f}, n = {pairs}), {seconds[True] / 96 * 1e3:.2f} ms; {served}"
    )
    for report in begun.report.regions:
        print(f"     {report.name}: {report.step}; {report.reason[:200]}")


if __name__ == "__main__":
    main()
