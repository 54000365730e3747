"""Many requests of all lengths, greedy and sampled, one after another: is each token as fast as the one before?

    python benchmarks/mixed_requests.py --model /tmp/llama --store /tmp/long --out mixed.jsonl

One process, booted as TextPredictor boots; prompts are as long as the largest bucket or shorter. Exits with 1 if
anything was compiled after READY, memory grew, or a request had another number of tokens than it asked for.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from boot import conclude
from boot_process import describe_machine, synchronize, wait_published
from table import markdown
from text_boot import Timing, add_arguments, boot_text, describe_boot, set_environment, text_settings

if TYPE_CHECKING:
    from models.text.generation import Generator, Request

# torch is imported in the boot, after the restore has started.

_SEED = 0
_SHORTEST_ANSWER = 8
# Requests after which memory is expected to stay as it is.
_SETTLED = 50
# Of the host's memory: what Python's and the C library's allocators may take more of meanwhile.
_ALLOWED_GROWTH_BYTES = 16 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes in use; of the device's, by tensors and the most that torch has reserved, 0 without one."""

    allocated: int
    max_reserved: int
    rss: int

    @classmethod
    def now(cls) -> Memory:
        """What this process uses."""
        import torch

        synchronize()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device = (0, 0)
        if torch.cuda.is_available():
            device = torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved()
        return cls(*device, pages * os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True)
class Mixed:
    """What all requests took. A gap is the time between two consecutive tokens of a request, as its consumer sees it;
    `request_*` are of the mean gap of each request."""

    requests: int
    tokens: int
    seconds: float
    gap_p50_ms: float
    gap_p99_ms: float
    request_p50_ms: float
    request_p99_ms: float
    graphs: int
    misses: int
    wrong_lengths: int
    settled: Memory
    end: Memory
    machine: dict[str, str]


def make_requests(count: int, generator: Generator, longest_answer: int) -> list[Request]:
    """Short prompts as often as long ones, on a scale of ratios; every other answer is sampled, with all that can be
    asked for."""
    from models.text.generation import Request
    from models.text.sampling import Sampling

    vocabulary, longest = generator.decode.model.config.vocab_size, generator.buckets[-1]
    rng = random.Random(_SEED)
    found = []
    for number in range(count):
        prompt = tuple(rng.choices(range(vocabulary), k=round(longest ** rng.random())))
        sampling = Sampling()
        if number % 2:
            sampling = Sampling(
                temperature=rng.uniform(0.1, 2),
                top_p=rng.uniform(0.1, 1),
                top_k=rng.choice((0, 1, 20, 50)),
                repetition_penalty=rng.uniform(0.8, 1.5),
                seed=rng.randrange(2**32),
            )
        found.append(Request(prompt, rng.randint(_SHORTEST_ANSWER, longest_answer), sampling))
    return found


@dataclass
class Gaps:
    """The gaps of all requests so far, in milliseconds, and each request's mean."""

    every: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    means: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    tokens: int = 0
    wrong_lengths: int = 0

    def serve(self, generator: Generator, requests: Sequence[Request]) -> None:
        """Answer them, one after another."""
        for request in requests:
            timing = Timing.of(generator.tokens(request))
            self.every.extend(gap_s * 1e3 for gap_s in timing.gaps_s)
            self.means.append(timing.token_ms)
            self.tokens += len(timing.arrivals_s)
            self.wrong_lengths += len(timing.arrivals_s) != request.max_new_tokens


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of them do not pass."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def measure(model: str, count: int, longest_answer: int) -> Mixed:
    """Boot and serve."""
    booted = boot_text(text_settings(model))
    wait_published(booted.boot, 600)
    print(describe_boot(booted), flush=True)
    generator = booted.model.generator
    requests = make_requests(count, generator, longest_answer)
    gaps = Gaps()
    before = booted.boot.counts()
    started = time.perf_counter()
    gaps.serve(generator, requests[:_SETTLED])
    settled = Memory.now()
    gaps.serve(generator, requests[_SETTLED:])
    seconds = time.perf_counter() - started
    compiled = booted.boot.counts().since(before)
    return Mixed(
        requests=count,
        tokens=gaps.tokens,
        seconds=seconds,
        gap_p50_ms=percentile(gaps.every, 50),
        gap_p99_ms=percentile(gaps.every, 99),
        request_p50_ms=percentile(gaps.means, 50),
        request_p99_ms=percentile(gaps.means, 99),
        graphs=compiled.graphs,
        misses=compiled.misses,
        wrong_lengths=gaps.wrong_lengths,
        settled=settled,
        end=Memory.now(),
        machine=describe_machine(),
    )


def tables(mixed: Mixed) -> str:
    """Times, and memory."""
    times = [
        ["between two tokens", mixed.gap_p50_ms, mixed.gap_p99_ms],
        ["the same, mean of a request", mixed.request_p50_ms, mixed.request_p99_ms],
    ]
    rows = [[name, f"{p50:.3f}", f"{p99:.3f}", f"{p99 / p50:.3f}"] for name, p50, p99 in times]
    memory = [
        [name, *(f"{value / 1e6:.1f}" for value in (before, after, after - before))]
        for name, before, after in (
            ("tensors on the device", mixed.settled.allocated, mixed.end.allocated),
            ("most reserved on the device", mixed.settled.max_reserved, mixed.end.max_reserved),
            ("the process, on the host", mixed.settled.rss, mixed.end.rss),
        )
    ]
    header = ("memory, MB", f"after {_SETTLED} requests", f"after {mixed.requests}", "more")
    return f"{markdown(('time, ms', 'p50', 'p99', 'p99 / p50'), rows)}\n\n{markdown(header, memory)}"


def check(mixed: Mixed, bar: float | None) -> dict[str, bool]:
    """Every claim that has a yes or no."""
    results = {
        "nothing is compiled after READY": mixed.graphs == mixed.misses == 0,
        "every request has as many tokens as it asked for": mixed.wrong_lengths == 0,
        "tensors on the device take no more": mixed.end.allocated <= mixed.settled.allocated,
        "torch reserves no more on the device": mixed.end.max_reserved <= mixed.settled.max_reserved,
        "the process takes no more": mixed.end.rss - mixed.settled.rss <= _ALLOWED_GROWTH_BYTES,
    }
    if bar is not None:
        results[f"p99 / p50 between two tokens is at most {bar:g}"] = mixed.gap_p99_ms <= bar * mixed.gap_p50_ms
    return results


def main() -> None:
    """Boot, serve, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest answer")
    parser.add_argument("--bar", type=float, help="the most that p99 / p50 may be")
    args: Any = parser.parse_args()
    if args.requests <= _SETTLED:
        parser.error(f"--requests must be more than {_SETTLED}")
    set_environment(args.store, args.tuned)
    mixed = measure(str(args.model.resolve()), args.requests, args.longest)
    print(f"machine: {mixed.machine}")
    print(f"{mixed.requests} requests, {mixed.tokens} tokens, {mixed.seconds:.1f} s\n\n{tables(mixed)}\n")
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps({**dataclasses.asdict(mixed), "tuned": args.tuned}) + "\n")
    conclude(check(mixed, args.bar))


if __name__ == "__main__":
    main()
