"""What the time of a token and of a prompt goes to, kernel by kernel, on the steps that TextPredictor serves.

    python benchmarks/decode_account.py --model /tmp/llama --store /tmp/long --out account.jsonl

The kernels of recorded steps, and of prompts, by name, and what of their time is no kernel. A prompt's time stands
beside that of its matrix products alone, each weight once, one after the other, measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from boot_process import describe_machine, synchronize, wait_published
from table import markdown
from text_boot import Timing, add_arguments, boot_text, describe_boot, set_environment, text_settings

if TYPE_CHECKING:
    from models.text.generation import Generator

# torch is imported in the boot, after the restore has started.

_WARM_UP_TOKENS = 20
# More than are queued ahead of the token that is looked at: each token then queues one step.
_SPARE_TOKENS = 8
_ANSWER_TOKENS = 128
_PROFILED_PROMPTS = 3
_REPEATS = 10
_LONGEST_NAME = 90


@dataclass(frozen=True)
class Kernel:
    """All runs of the kernels of one name in a step. `share` is of its time, measured without the profiler."""

    name: str
    count: float
    us: float
    share: float


@dataclass(frozen=True)
class StepAccount:
    """One step. `step_us` is measured without the profiler; `profiled_us`, from the first kernel's start to the last
    one's end, and `busy_us`, what of it any kernel ran, with it."""

    step_us: float
    profiled_us: float
    busy_us: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class PrefillAccount:
    """One prompt: medians. `first_token_ms` is what a consumer waits; `matmuls_ms` are the products of all linear
    layers, the last one's of one token, as in the step."""

    tokens: int
    first_token_ms: float
    step: StepAccount
    matmuls_ms: float
    matmuls_tflop_per_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel's run, or an operator's on the CPU, in microseconds."""

    name: str
    start: float
    end: float


def account_token(generator: Generator, prompt: tuple[int, ...], steps: int) -> StepAccount:
    """Time answers without the profiler, then some steps with it."""
    from models.text.generation import Request

    request = Request(prompt, _ANSWER_TOKENS)
    token_us = median(Timing.of(generator.tokens(request)).token_ms for _ in range(_REPEATS)) * 1e3
    print(f"a token: {token_us:.1f} µs", flush=True)
    tokens = generator.tokens(Request(prompt, _WARM_UP_TOKENS + 2 * steps + _SPARE_TOKENS))
    for _ in range(_WARM_UP_TOKENS):
        next(tokens)
    profile(lambda: next(tokens), 2)  # the profiler's own start
    account = account_step(profile(lambda: next(tokens), steps), steps, token_us)
    tokens.close()
    return account


def account_step(spans: Sequence[Span], steps: int, step_us: float) -> StepAccount:
    """What ran in so many steps, by name."""
    if not spans:
        raise SystemExit("the profiler saw nothing")
    counts: dict[str, int] = defaultdict(int)
    sums_us: dict[str, float] = defaultdict(float)
    for span in spans:
        counts[span.name] += 1
        sums_us[span.name] += span.end - span.start
    kernels = tuple(
        Kernel(name, counts[name] / steps, sums_us[name] / steps, sums_us[name] / steps / step_us)
        for name in sorted(sums_us, key=lambda name: -sums_us[name])
    )
    profiled_us = max(span.end for span in spans) - min(span.start for span in spans)
    return StepAccount(step_us, profiled_us / steps, busy_us(spans) / steps, kernels)


def profile(call: Callable[[], Any], times: int) -> list[Span]:
    """What ran on the device, or on the CPU where there is none, in so many calls."""
    from torch import profiler as torch_profiler
    from torch.autograd import DeviceType
    from torch.cuda import is_available

    synchronize()
    on_gpu = is_available()
    activity = torch_profiler.ProfilerActivity.CUDA if on_gpu else torch_profiler.ProfilerActivity.CPU
    with torch_profiler.profile(activities=[activity]) as profiler:
        for _ in range(times):
            call()
        synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == wanted and not event.cpu_children and not getattr(event, "is_user_annotation", False)
    ]


def busy_us(spans: Sequence[Span]) -> float:
    """How long at least one of them ran."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def account_prefill(generator: Generator, prompt: tuple[int, ...]) -> PrefillAccount:
    """Time a prompt as its consumer waits for it, its step alone, and the products in it."""
    import torch
    import torch.nn.functional as F  # noqa: N812, as everybody calls it
    from clock import median_s
    from torch import nn

    from models.text.generation import Request

    tokens = len(prompt)
    timings = [Timing.of(generator.tokens(Request(prompt, 1))) for _ in range(_REPEATS)]
    model = generator.prefill.model
    layers = [(layer, tokens) for layer in model.modules() if isinstance(layer, nn.Linear)]
    output = model.get_output_embeddings()
    with torch.inference_mode():
        step_s = median_s(lambda: generator.fill(tokens), _REPEATS)
        profile(lambda: generator.fill(tokens), 1)
        spans = profile(lambda: generator.fill(tokens), _PROFILED_PROMPTS)
        inputs = {
            width: torch.randn(tokens, width, dtype=model.dtype, device=model.device)
            for width in {layer.in_features for layer, _ in layers}
        }
        products = [
            (inputs[layer.in_features][: 1 if layer is output else rows], layer.weight) for layer, rows in layers
        ]

        def multiply() -> None:
            for rows, weight in products:
                F.linear(rows, weight)

        matmuls_s = median_s(multiply, _REPEATS)
    operations = sum(2 * len(rows) * weight.numel() for rows, weight in products)
    return PrefillAccount(
        tokens=tokens,
        first_token_ms=median(timing.first_s for timing in timings) * 1e3,
        step=account_step(spans, _PROFILED_PROMPTS, step_s * 1e6),
        matmuls_ms=matmuls_s * 1e3,
        matmuls_tflop_per_s=operations / matmuls_s / 1e12,
    )


def step_table(account: StepAccount, most: int, what: str) -> str:
    """The kernels that take longest, the others together, and the rest of the time."""
    shown, others = account.kernels[:most], account.kernels[most:]
    rows = [(short(kernel.name), kernel.count, kernel.us, kernel.share) for kernel in shown]
    sums = [sum(getattr(kernel, name) for kernel in others) for name in ("count", "us", "share")]
    rows += [(f"{len(others)} other names", *sums)] if others else []
    gap_us = account.step_us - account.busy_us
    lines = [[name, f"{count:.2f}", f"{us:.1f}", f"{share:.1%}"] for name, count, us, share in rows]
    lines += [["no kernel", "–", f"{gap_us:.1f}", f"{gap_us / account.step_us:.1%}"]]
    lines += [[f"{what}, without the profiler", "–", f"{account.step_us:.1f}", "100.0%"]]
    return markdown(("kernel", what, f"µs {what}", "share"), lines)


def short(name: str) -> str:
    """A name that fits a table."""
    name = name.replace("|", "/")
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def prefill_table(account: PrefillAccount) -> str:
    """The prompt against its products."""
    rows = [
        ["first token, as its consumer waits", account.first_token_ms],
        ["the prefill step", account.step.step_us / 1e3],
        ["its matrix products alone", account.matmuls_ms],
    ]
    header = (f"{account.tokens} tokens", "ms", "over the products")
    return markdown(header, [[name, f"{ms:.2f}", f"{ms / account.matmuls_ms:.2f}"] for name, ms in rows])


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--prompt", type=int, default=128, help="tokens before those that are accounted for")
    parser.add_argument("--steps", type=int, default=20, help="decoded tokens with the profiler")
    parser.add_argument(
        "--prefill", type=int, help="tokens of the timed prompt, one of PROMPT_BUCKETS; the largest if not given"
    )
    parser.add_argument("--rows", type=int, default=20, help="kernels in the table; the JSON has all")
    return parser.parse_args()


def main() -> None:
    """Boot, time a prompt, take a token apart."""
    args = parse_arguments()
    set_environment(args.store, args.tuned)
    # CUDA graphs and a CUPTI that ends and begins anew do not go together (torch/profiler/profiler.py).
    os.environ.update({"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"})
    booted = boot_text(text_settings(str(args.model.resolve())))
    wait_published(booted.boot, 600)
    print(describe_boot(booted), flush=True)
    from llama import make_prompt

    generator = booted.model.generator
    vocabulary = generator.decode.model.config.vocab_size
    bucket = args.prefill or generator.buckets[-1]
    if bucket not in generator.buckets:
        raise SystemExit(f"--prefill {bucket} is none of PROMPT_BUCKETS: {generator.buckets}")
    prefill = account_prefill(generator, make_prompt(vocabulary, bucket))
    print(f"{prefill_table(prefill)}\n\nproducts: {prefill.matmuls_tflop_per_s:.1f} TFLOP/s\n")
    print(f"{step_table(prefill.step, args.rows, 'a prompt')}\n", flush=True)
    token = account_token(generator, make_prompt(vocabulary, args.prompt), args.steps)
    idle_us = token.profiled_us - token.busy_us
    print(f"{step_table(token, args.rows, 'a token')}\n")
    print(f"with the profiler: {token.profiled_us:.1f} µs a token, of which {idle_us:.1f} µs without a kernel")
    if args.out:
        record = {"token": dataclasses.asdict(token), "prefill": dataclasses.asdict(prefill)}
        with args.out.open("a") as file:
            file.write(json.dumps({**record, "tuned": args.tuned, "machine": describe_machine()}) + "\n")


if __name__ == "__main__":
    main()
