"""A token's time, batch 1: transformers' generate, with its default cache and with a static one, and TextPredictor.

    python benchmarks/decode.py --model /tmp/llama --store /tmp/decode --rounds 2

Each measurement is a fresh process, the ways in turn. Every answer is timed as its consumer sees it: generate's tokens
count when they are on the host, TextPredictor's when they are text. The first boot of TextPredictor fills the store and
is not measured. Exits with 1 if TextPredictor compiled anything after READY, or is not precompiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fresh_boot import ROOT, Model, boot_environment, conclude, new_log, run_process
from table import markdown, spread

WAYS = {
    "eager": "`generate`, eager",
    "static": "`generate`, static cache",
    "ours": "this project",
}
CHOICES = ("greedy", "sampled")
_COLUMNS = ("way", "choice", "n", "first token, ms", "token, ms", "tokens/s", "weights, GB/s")
# What one process printed: by choice, seconds of the first token and milliseconds of a later one.
Decoded = dict[str, Any]


def decode(way: str, model: Model, args: Any) -> Decoded:
    """One process.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "one_decode.py"), way, json.dumps(model.inputs)]
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
    read_gb = found[0]["weight_bytes"] / 1e9
    return [
        WAYS[way],
        choice,
        str(len(answers)),
        spread(answer["first_s"] * 1e3 for answer in answers),
        spread(token_ms),
        spread((1e3 / value for value in token_ms), 1),
        spread((read_gb / value * 1e3 for value in token_ms), 0),
    ]


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
    args = parser.parse_args()
    args.store = args.store.resolve()
    args.store.mkdir(parents=True, exist_ok=True)
    model = Model.of_text(args.model, args.prompt, args.tokens)
    if "ours" in args.ways:
        decode("ours", model, args)
    found: list[Decoded] = []
    for way in args.ways * args.rounds:
        found.append(decode(way, model, args))
        print(json.dumps(found[-1]), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
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
