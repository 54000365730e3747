"""Are the tokens of a recorded step those of the same kernels, launched one at a time?

    python benchmarks/one_by_one.py --model /tmp/llama --store /tmp/long

On Hopper GPUs, kernels of a step start while the one before them ends; one that reads what is not written yet would
show here. One process, in which every launch waits for its kernel's end (CUDA_LAUNCH_BLOCKING), answers requests before
and after the step is recorded; what is recorded does not wait. Exits with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import os

from boot import conclude
from boot_process import describe_machine, wait_published
from mixed_requests import make_requests
from text_boot import add_arguments, boot_text, describe_boot, set_environment, text_settings

# torch is imported in the boot, after the restore has started.


def main() -> None:
    """Boot, answer twice, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--requests", type=int, default=30, help="as those of mixed_requests.py")
    parser.add_argument("--longest", type=int, default=128, help="tokens of the longest answer")
    parser.add_argument("--repeats", type=int, default=5, help="of all requests, recorded")
    args = parser.parse_args()
    set_environment(args.store, args.tuned)
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    booted = boot_text(text_settings(str(args.model.resolve())), record=False)
    wait_published(booted.boot, 600)
    print(describe_boot(booted), flush=True)
    generator = booted.model.generator
    requests = make_requests(args.requests, generator, args.longest)
    apart = [list(generator.tokens(request)) for request in requests]
    generator.record()
    recorded = [[list(generator.tokens(request)) for request in requests] for _ in range(args.repeats)]
    tokens = sum(map(len, apart))
    differing = sum(one != other for found in recorded for one, other in zip(apart, found, strict=True))
    print(f"machine: {describe_machine()}")
    print(f"{len(requests)} requests, {tokens} tokens; recorded {args.repeats} times, {differing} answers differ")
    conclude({"the step is recorded": generator.is_recorded, "all tokens are the same": not differing})


if __name__ == "__main__":
    main()
