"""A token's time, batch 1: transformers' generate, with its default cache and with a static one, and the Generator.

    python benchmarks/decode.py --model /tmp/llama --store /tmp/long --rounds 3 --out decode.jsonl

Each measurement is a fresh process, the ways in turn. Every answer is timed as its consumer sees it: each token is on
the host when it counts. Prints a table, and how far greedy answers agree with those of plain generate. Exits with 1 if
the Generator compiled anything after READY.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from boot import conclude
from fresh_boot import ROOT, new_log, run_process
from table import markdown, spread
from text_boot import text_environment

WAYS = {
    "eager": "generate, eager",
    "static": 'generate, cache_implementation="static"',
    "static-tuned": "the same, tuned",
    "ours": "Generator",
    "ours-tuned": "Generator, tuned",
}
CHOICES = ("greedy", "sampled")
_COLUMNS = (
    "way",
    "choice",
    "n",
    "total / token, ms",
    "tokens/s",
    "first token, ms",
    "token after the first, ms",
    "median gap, ms",
    "weights, GB/s",
    "of a copy's GB/s",
)


@dataclass(frozen=True)
class Answer:
    """One choice of tokens in one process: medians of its repetitions. `token_ms` is the mean of a token after the
    first, `gap_ms` the median."""

    total_s: float
    first_s: float
    token_ms: float
    gap_ms: float


@dataclass(frozen=True)
class Decoded:
    """What one process measured. `tokens` are a greedy answer's; `margins` are by how much its logits prefer each to
    the runner-up, and `runners_up` these, for generate alone. `weight_bytes` are read for each token."""

    way: str
    answers: dict[str, Answer]
    tokens: list[int]
    margins: list[float]
    runners_up: list[int]
    weight_bytes: int
    copy_bytes_per_s: float
    graphs_after_ready: int
    boot: str
    machine: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """What all processes have in common."""

    model: str
    work: Path
    prompt: int
    tokens: int
    repeats: int
    timeout_s: float

    def run(self, way: str) -> Decoded:
        """One process.

        Raises:
            SystemExit: it failed.
        """
        command = [sys.executable, str(ROOT / "benchmarks" / "one_decode.py"), way, "--model", self.model]
        command += ["--prompt", str(self.prompt), "--tokens", str(self.tokens), "--repeats", str(self.repeats)]
        command += ["--timeout", str(self.timeout_s)]
        environ = text_environment(self.work, "warm", self.work / "store", way.endswith("-tuned"))
        if not way.startswith("ours"):  # a boot has a directory of its own
            folders = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
            environ |= {name: str(self.work / folder) for name, folder in folders.items()}
        record = json.loads(run_process(way, command, environ, new_log(self.work, way), self.timeout_s))
        answers = {choice: Answer(**answer) for choice, answer in record["answers"].items()}
        return Decoded(**{**record, "answers": answers})


def describe(decoded: Decoded) -> str:
    """One line on one process."""
    answers = "; ".join(
        f"{choice} {answer.token_ms:.3f} ms a token, the first after {answer.first_s * 1e3:.2f} ms"
        for choice, answer in decoded.answers.items()
    )
    tokens = " ".join(map(str, decoded.tokens[:6]))
    return f"{decoded.way}: {answers}; greedy {tokens} …{f'; {decoded.boot}' if decoded.boot else ''}"


def rows(found: Sequence[Decoded], tokens: int) -> Iterator[list[str]]:
    """The table's lines: a way's greedy answers, and its sampled ones."""
    for way in dict.fromkeys(decoded.way for decoded in found):
        of_way = [decoded for decoded in found if decoded.way == way]
        for choice in CHOICES:
            yield row(way, choice, of_way, tokens)


def row(way: str, choice: str, of_way: Sequence[Decoded], tokens: int) -> list[str]:
    """One line of the table: medians, with their range."""

    def of(value: Callable[[Answer, Decoded], float], digits: int = 2) -> str:
        return spread([value(decoded.answers[choice], decoded) for decoded in of_way], digits)

    def weights_bytes_per_s(answer: Answer, decoded: Decoded) -> float:
        return decoded.weight_bytes / answer.token_ms * 1e3

    return [
        WAYS[way],
        choice,
        str(len(of_way)),
        of(lambda answer, _: answer.total_s / tokens * 1e3),
        of(lambda answer, _: tokens / answer.total_s, 1),
        of(lambda answer, _: answer.first_s * 1e3),
        of(lambda answer, _: answer.token_ms),
        of(lambda answer, _: answer.gap_ms),
        of(lambda *both: weights_bytes_per_s(*both) / 1e9, 0),
        of(lambda *both: weights_bytes_per_s(*both) / both[1].copy_bytes_per_s),
    ]


def agreements(found: Sequence[Decoded]) -> Iterator[str]:
    """A line on how far the first greedy answer of each way agrees with that of plain generate."""
    firsts = {decoded.way: decoded for decoded in reversed(found)}
    plain = firsts.pop("eager", None)
    if plain is None:
        return
    of_plain = [decoded.tokens for decoded in found if decoded.way == "eager"]
    alike = sum(tokens == plain.tokens for tokens in of_plain)
    yield f"{alike} of {len(of_plain)} processes of generate, eager, found the same tokens"
    for way, decoded in firsts.items():
        pairs = enumerate(zip(plain.tokens, decoded.tokens, strict=True))
        place = next((number for number, (one, other) in pairs if one != other), None)
        if place is None:
            yield f"{WAYS[way]}: all {len(plain.tokens)} tokens are those of generate, eager"
            continue
        is_runner_up = decoded.tokens[place] == plain.runners_up[place]
        yield (
            f"{WAYS[way]}: the first {place} tokens are those of generate, eager; its logits then prefer its own by "
            f"{plain.margins[place]:.4g} to the runner-up, which is {'the' if is_runner_up else 'not the'} one found "
            f"here (median margin: {median(plain.margins):.4g})"
        )


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder that llama_boot.py --write wrote")
    parser.add_argument("--store", type=Path, required=True, help="folder of the store, cache directories and logs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["eager", "static", "ours"])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each way; 0 only fills the store")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--repeats", type=int, default=3, help="answers of each choice in a process, after a warm-up")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--out", type=Path, help="file to which each process is added as a JSON line")
    return parser.parse_args()


def main() -> None:
    """Fill the store, measure in turn, compare."""
    args = parse_arguments()
    args.store.mkdir(parents=True, exist_ok=True)
    plan = Plan(str(args.model.resolve()), args.store.resolve(), args.prompt, args.tokens, args.repeats, args.timeout)
    filling = dataclasses.replace(plan, tokens=min(8, args.tokens), repeats=1)
    for way in dict.fromkeys(args.ways):
        if way.startswith("ours"):
            print(f"not measured, to fill the store: {describe(filling.run(way))}", flush=True)
    found = []
    for way in args.ways * args.rounds:
        found.append(plan.run(way))
        print(describe(found[-1]), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(found[-1])) + "\n")
    if not found:
        return
    copied = spread([decoded.copy_bytes_per_s / 1e9 for decoded in found], 0)
    print(f"\nmachine: {found[0].machine}\ncopy within the device, read and written: {copied} GB/s")
    print(f"{found[0].weight_bytes / 1e9:.3f} GB of weights are read for a token; medians (least–greatest)\n")
    print(f"{markdown(_COLUMNS, rows(found, args.tokens))}\n")
    for line in agreements(found):
        print(line)
    conclude({"nothing is compiled after READY": not any(decoded.graphs_after_ready for decoded in found)})


if __name__ == "__main__":
    main()
