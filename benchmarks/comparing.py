"""What the request costs in which compiled code is compared with eager: seconds and GPU memory over an eager request.

    python benchmarks/comparing.py --store /tmp/comparing
    python benchmarks/comparing.py --model /tmp/flux1 --sizes 1024x1024 --store /tmp/comparing --out comparing.jsonl
    python benchmarks/comparing.py --model /tmp/llama --text --store /tmp/comparing --out comparing.jsonl

Two boots, each a process of its own. The first is eager. The second one has an empty store, compiles in the background,
and gets no request until all code has arrived: its first request compares, and the later ones are served by the code.
All requests are the same. Exits with 1 if the first one is not served eager, or a later one not precompiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import ROOT, Model, boot_environment, conclude, new_log, prepare, run_process
from one_unseen import wait_compiled
from served import InProcess, describe_machine
from table import markdown

_PATIENCE_S = 1200.0


def serve(kind: str, inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Boot, wait, ask: seconds, peak of the GPU's memory in bytes, and what served, of each request."""
    import predict

    predictor = (predict.TextPredictor if "max_new_tokens" in inputs else predict.Predictor)()
    predictor.setup()
    import torch

    served = InProcess(predictor)
    if kind == "eager":
        served.answer(**inputs)
    waited_s = wait_compiled(predictor.boot, _PATIENCE_S)
    answers, peaks = [], []
    for _ in range(count):
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        answers.append(served.answer(**inputs))
        peaks.append(torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None)
    steps = [sorted({*answer.served.values()}) for answer in answers]
    seconds = [answer.seconds for answer in answers]
    told = {"kind": kind, "waited_s": waited_s, "seconds": seconds, "peak_bytes": peaks, "steps": steps}
    return {**told, "machine": describe_machine()}


def row(name: str, eager: dict[str, Any], background: dict[str, Any]) -> list[str]:
    """One line of the table."""
    eager_s, (comparing_s, *later_s) = median(eager["seconds"]), background["seconds"]
    peaks = [eager["peak_bytes"][-1], background["peak_bytes"][0]]
    memory = ["–" if peak is None else f"{peak / 1e9:.3f}" for peak in peaks]
    seconds = [eager_s, comparing_s, comparing_s - eager_s, median(later_s)]
    return [name, *(f"{value:.3f}" for value in seconds), *memory]


def main() -> None:
    """Boot both and print the table, or serve one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder; a demo model if not given")
    parser.add_argument("--text", action="store_true", help="it is a language model")
    parser.add_argument("--sizes", default="64x64", help="the size of the picture")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt of random words")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--requests", type=int, default=8, help="of each boot")
    parser.add_argument("--store", type=Path, help="new folder for the store, cache directories and logs")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    parser.add_argument("--kind", help=argparse.SUPPRESS)  # the process that serves
    args = parser.parse_args()
    model = Model.of(args, args.sizes)
    if args.kind:
        print(json.dumps(serve(args.kind, model.inputs, args.requests)), flush=True)
        return
    work = prepare(args.store)
    boots = {}
    for kind in ("eager", "background"):
        environ = boot_environment(work, kind, work / "store")
        environ |= {"MODEL": str(model.folder), "COMPILE_CACHE_COLD_START": "background", **model.variables}
        command = [sys.executable, str(ROOT / "benchmarks" / "comparing.py"), *sys.argv[1:], "--kind", kind]
        boots[kind] = json.loads(run_process(kind, command, environ, new_log(work, kind), 2 * _PATIENCE_S))
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({"model": model.folder.name, **boots[kind]}) + "\n")
    header = ("model", "eager, s", "comparing, s", "− eager, s", "later, s", "eager's peak, GB", "comparing's, GB")
    print(f"{markdown(header, [row(model.folder.name, boots['eager'], boots['background'])])}\n")
    first, *later = boots["background"]["steps"]
    conclude(
        {
            "all code arrived": boots["background"]["waited_s"] is not None,
            "the first request is served eager": first == ["eager"],
            "later requests are served precompiled": all(steps == ["precompiled"] for steps in later),
        }
    )


if __name__ == "__main__":
    main()
