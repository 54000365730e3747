"""A token's time through a real Cog server that streams, against the same answers in a process without one.

    python benchmarks/stream_http.py --model /tmp/llama --store /tmp/long --rounds 2 --out stream.jsonl

Both boot predict.py's TextPredictor, or what it does, over one store, one after the other, in turn. A token's time is
that between the first piece of text and the last one, a token. Exits with 1 if an answer was not whole, a step is not
compiled, or --bar is passed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from boot import conclude, has_regions
from boot_process import wait_published
from fresh_boot import RESTORED_STEPS, ROOT, end, new_log, run_process
from table import markdown, spread
from text_boot import (
    Timing,
    add_arguments,
    boot_text,
    text_environment,
    text_settings,
)

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer, streaming_project

PLACES = {"process": "in a process", "server": "through Cog's server"}
_SAMPLING = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 0}
# After an answer it takes a moment until the server takes the next request, which is no part of that one.
_PAUSE_S = 0.2


@dataclass(frozen=True)
class Streamed:
    """Several answers in one place: a token's milliseconds, and the seconds until the first piece and the last one, one
    for each answer. `pieces` are those of an answer, and `text` is the same in both places."""

    place: str
    token_ms: list[float]
    first_s: list[float]
    total_s: list[float]
    pieces: list[int]
    text: str
    report: dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What both places have in common."""

    model: str
    work: Path
    is_tuned: bool
    prompt: int
    tokens: int
    requests: int
    timeout_s: float

    @property
    def environment(self) -> dict[str, str]:
        """The variables of both."""
        return text_environment(self.work, "warm", self.work / "store", self.is_tuned)

    def run(self, place: str) -> Streamed:
        """A boot, its answers, and its end.

        Raises:
            SystemExit: it failed.
        """
        if place == "server":
            return self._run_server()
        command = [sys.executable, str(Path(__file__)), "--in-process", "--model", self.model]
        command += ["--store", str(self.work), "--timeout", str(self.timeout_s)]
        command += ["--prompt", str(self.prompt), "--tokens", str(self.tokens), "--requests", str(self.requests)]
        log = new_log(self.work, place)
        return Streamed(**json.loads(run_process(place, command, self.environment, log, self.timeout_s)))

    def _run_server(self) -> Streamed:
        report = self.work / "report.json"
        report.unlink(missing_ok=True)
        # The project's own modules are those of the server's folder.
        own = {"COMPILE_CACHE_REPORT": str(report), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        own |= {"COMPILE_CACHE_COLD_START": "block"}
        environ = {**self.environment, "MODEL": self.model, **own}
        with tempfile.TemporaryDirectory() as folder:
            project = streaming_project(Path(folder))
            server = CogServer("predict.py:TextPredictor", new_log(self.work, "server"), environ, project)
            server.start()
            try:
                server.wait_ready(self.timeout_s)
                found = [self._stream(server) for _ in range(self.requests + 1)][1:]
                server.stop(signal.SIGTERM)
            except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
                raise SystemExit(f"the server failed: {error}; see {server.log}") from error
            finally:
                end(server.process)
        return streamed("server", found, self.tokens, json.loads(report.read_text()))

    def _stream(self, server: CogServer) -> tuple[Timing, list[str]]:
        prompt = make_text(self.model, self.prompt)
        pieces: list[str] = []
        time.sleep(_PAUSE_S)
        timing = Timing.of(until_end(server, pieces, prompt=prompt, max_new_tokens=self.tokens, **_SAMPLING))
        return timing, pieces


def until_end(server: CogServer, pieces: list[str], **inputs: Any) -> Iterator[str]:
    """A streamed prediction's pieces, which are added to `pieces` as well.

    Raises:
        RuntimeError: it did not complete.
    """
    kind, data = "", {}
    for kind, data in server.stream(**inputs):
        if kind == "output":
            pieces.append(data["chunk"])
            yield data["chunk"]
    if kind != "completed":
        raise RuntimeError(f"the answer ended with {kind or 'nothing'}: {data}")


def streamed(place: str, found: list[tuple[Timing, list[str]]], tokens: int, report: dict[str, Any]) -> Streamed:
    """What one place's answers come to."""
    return Streamed(
        place=place,
        token_ms=[(timing.total_s - timing.first_s) / (tokens - 1) * 1e3 for timing, _ in found],
        first_s=[timing.first_s for timing, _ in found],
        total_s=[timing.total_s for timing, _ in found],
        pieces=[len(pieces) for _, pieces in found],
        text="".join(found[0][1]),
        report=report,
    )


@cache
def make_text(model: str, tokens: int) -> str:
    """The prompt."""
    from llama import make_prompt, text_of

    return text_of(make_prompt(json.loads((Path(model) / "config.json").read_text())["vocab_size"], tokens))


def answer_in_process(args: Any) -> Streamed:
    """Boot, and stream answers without a server."""
    booted = boot_text(text_settings(str(args.model)))
    wait_published(booted.boot, args.timeout)
    from models.text.model import TextInputs

    inputs = TextInputs(make_text(str(args.model), args.prompt), max_new_tokens=args.tokens, **_SAMPLING)
    found = []
    for _ in range(args.requests + 1):
        pieces: list[str] = []
        timing = Timing.of(pieces.append(piece) for piece in booted.model.answer(inputs))
        found.append((timing, pieces))
    return streamed("process", found[1:], args.tokens, json.loads(booted.boot.report.to_json()))


def check(found: list[Streamed], ratio: float, args: Any) -> dict[str, bool]:
    """Every claim that has a yes or no."""
    results = {
        "every answer came a token at a time": all(set(one.pieces) == {args.tokens} for one in found),
        "all answers are the same": len({one.text for one in found}) == 1,
        "all steps are compiled": all(has_regions(one.report, ("cold", *RESTORED_STEPS)) for one in found),
    }
    if args.bar is not None:
        results[f"the server's token takes at most {args.bar:g} times as long"] = ratio <= args.bar
    return results


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=2, help="boots of each")
    parser.add_argument("--requests", type=int, default=5, help="answers of each boot, after one that is not measured")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="tokens to generate")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one boot and its answers")
    parser.add_argument("--bar", type=float, help="the most that the ratio may be")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure in both places, in turn, and compare."""
    args = parse_arguments()
    if args.in_process:
        print(json.dumps(dataclasses.asdict(answer_in_process(args))), flush=True)
        return
    args.store.mkdir(parents=True, exist_ok=True)
    work, model = args.store.resolve(), str(args.model.resolve())
    plan = Plan(model, work, args.tuned, args.prompt, args.tokens, args.requests, args.timeout)
    found = []
    for place in list(PLACES) * args.rounds:
        found.append(plan.run(place))
        steps = ", ".join(f"{region['name']} {region['step']}" for region in found[-1].report["regions"])
        print(f"{place}: {spread(found[-1].token_ms, 3)} ms a token; {steps}; {found[-1].text[:40]} …", flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**dataclasses.asdict(found[-1]), "tuned": args.tuned}) + "\n")

    def all_of(place: str, name: str) -> list[float]:
        return [value for one in found if one.place == place for value in getattr(one, name)]

    def ratio_of(name: str) -> float:
        return median(all_of("server", name)) / median(all_of("process", name))

    rows = [
        [
            name,
            str(len(all_of(place, "token_ms"))),
            spread(all_of(place, "token_ms"), 3),
            spread([first_s * 1e3 for first_s in all_of(place, "first_s")], 1),
            spread([total_s * 1e3 for total_s in all_of(place, "total_s")], 1),
        ]
        for place, name in PLACES.items()
    ]
    header = ("where", "answers", "token, ms", "first piece, ms", "whole answer, ms")
    print(f"\n{markdown(header, rows)}\n")
    ratio = ratio_of("token_ms")
    print(f"ratio of a token: {ratio:.3f}; of whole answers: {ratio_of('total_s'):.3f}\n")
    conclude(check(found, ratio, args))


if __name__ == "__main__":
    main()
