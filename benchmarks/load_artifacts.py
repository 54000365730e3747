"""How long does a warm boot of a text model take to load its artifacts, with nothing beside it?

    python benchmarks/llama_boot.py --shape deep --model /tmp/deep --write
    python benchmarks/load_artifacts.py --model /tmp/deep --store /tmp/deep-store --rounds 5

The first boot fills the store. Each round is a fresh process that imports what loading needs, and loads, when the
weights are there; in a boot, that runs beside the weights, and shares Python's lock with them. To compare two states of
the code, run it in both checkouts, each with a store of its own, in turn. With `--without` it also loads without one of
the library's patches of torch, in turn, which is what the patch is worth.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

from boot_process import describe_machine, wait_published
from fresh_boot import new_log, run_process
from table import spread
from text_boot import boot_text, describe_boot, text_environment, text_settings

from compile_cache.lifecycle.preload import Preloading

# The library's patches of torch that are only for speed, as contexts of `load_function`.
PATCHES = {
    "workers": "_no_workers",
    "torch-key": "_set_torch_key",
    "compiler": "without_compiler",
    "explanations": "_without_explanations",
}


def leave_out(patch: str) -> None:
    """Load without one of the patches."""
    from compile_cache.aot import adapter

    setattr(adapter, PATCHES[patch], lambda *_: contextlib.nullcontext())


def boot_loading_late(model: str) -> None:
    """One boot that loads its artifacts when the weights are there, and meanwhile nothing else; prints the seconds."""
    seconds = []

    def load(preloading: Preloading) -> None:
        if not seconds:
            if patch := os.environ.get("_WITHOUT_PATCH"):
                leave_out(patch)
            started = time.perf_counter()
            preloading._run()
            seconds.append(time.perf_counter() - started)

    Preloading.start = lambda _: None  # type: ignore[method-assign]
    Preloading.wait = load  # type: ignore[method-assign]
    booted = boot_text(text_settings(model))
    print(describe_boot(booted), file=sys.stderr)
    wait_published(booted.boot, 600)
    print(f"{seconds[0] if booted.boot.report.fully_precompiled else float('nan')}")


def main() -> None:
    """Fill the store, measure in fresh processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="folder of the store, cache directory and logs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--without", choices=PATCHES, help="a patch of torch to measure")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        boot_loading_late(str(args.model))
        return
    args.store.mkdir(parents=True, exist_ok=True)
    work = args.store.resolve()
    environ = {"PROMPT_BUCKETS": "128", **os.environ}
    os.environ.update(environ)
    environ = text_environment(work, "warm", work / "store", False)
    command = [sys.executable, __file__, "--in-process", "--model", str(args.model.resolve()), "--store", str(work)]

    def load(without: str = "") -> float:
        given = {**environ, "_WITHOUT_PATCH": without}
        return float(run_process("warm", command, given, new_log(work, "warm"), args.timeout))

    load()
    print(f"machine: {describe_machine()}")
    names = ["", args.without] if args.without else [""]
    seconds = [[load(name) for name in names] for _ in range(args.rounds)]
    for name, taken in zip(names, zip(*seconds, strict=True), strict=True):
        without = f" without {name}" if name else ""
        print(f"artifacts loaded{without} in {spread(list(taken), 2)} s, n = {args.rounds}")


if __name__ == "__main__":
    main()
