"""Boots with an empty store, compiled after READY, against eager ones: what does a miss cost whom?

    python benchmarks/cold_start.py --model /tmp/flux1 --sizes 1024x1024 --store /tmp/cold --pairs 5 --bars
    python benchmarks/cold_start.py --model /tmp/llama --text --store /tmp/cold --pairs 1 --through-cog

An eager boot and one in the background take turns, each a process of its own with an empty store and cache directory,
after an eager boot that is not measured. The server in the background predicts from READY on until precompiled code
serves everything. Exits with 1 if a check fails; with --bars, times and memory are checked as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from boot import conclude
from cold_start_table import bars, check, tables
from fresh_boot import PROMPT, ROOT, SEED, boot_environment, new_log, prepare, run_process
from observations import VARIABLE
from one_cold_start import Measured, Requests, measure
from served_by_cog import served_by_cog
from text_boot import SIZES

KINDS = ("eager", "background")
# A boot that has less time left is not begun.
_LEAST_S = 20.0
# The compiling process ends half a minute after its last job.
_END_S = 45.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What all boots have in common."""

    model: str
    sizes: str
    work: Path
    requests: Requests
    through_cog: bool
    timeout_s: float

    def run(self, number: int, kind: str, requests: Requests, timeout_s: float) -> Measured:
        """One boot with its predictions, in `timeout_s` at most.

        Raises:
            SystemExit: it failed, or took longer; names its log.
        """
        work = self.work / f"{number}-{kind}"
        work.mkdir()
        environ = self.environment(kind, work)
        log = new_log(work, kind)
        if self.through_cog:
            return self._run_cog(kind, requests, environ, log, timeout_s)
        command = [sys.executable, str(ROOT / "benchmarks" / "one_cold_start.py"), kind]
        command.append(json.dumps(dataclasses.asdict(requests)))
        environ["COMPILE_CACHE_COLD_START"] = "background"  # through Cog's server, the default is
        return Measured.from_json(run_process(kind, command, environ, log, timeout_s))

    def environment(self, kind: str, work: Path) -> dict[str, str]:
        """The variables of a boot whose store and cache directory are in `work`."""
        sizes = SIZES if self.requests.is_text else {"IMAGE_SIZES": self.sizes, "WARM_UP_SIZES": self.sizes}
        environ = boot_environment(work, kind, work / "store", "regional")
        if kind == "eager":  # as in a new container
            environ["TRITON_CACHE_DIR"] = str(work / "triton")
        return {**sizes, **environ, "MODEL": self.model, "HF_HUB_OFFLINE": "1", VARIABLE: str(work / "observations")}

    def _run_cog(self, kind: str, requests: Requests, environ: dict[str, str], log: Path, timeout_s: float) -> Measured:
        with served_by_cog(requests.is_text, environ, log, timeout_s) as ready:
            measured = measure(kind, ready.served, Path(environ[VARIABLE]), requests)
        return replace(measured, http_ready_s=ready.http_ready_s)


def boots(plan: Plan, pairs: int, watched: int, limit_s: float) -> Iterator[Measured]:
    """One eager boot to fill the page cache, then pairs, as far as the time allows. The servers of the first `watched`
    pairs are asked until all is precompiled."""
    begun = time.monotonic()
    short = replace(plan.requests, eager=3, pairs=0, patience_s=0.0, end_s=0.0)
    order = [(0, "eager", replace(short, eager=1))]
    for number in range(1, pairs + 1):
        requests = plan.requests if number <= watched else short
        order += [(number, kind, requests) for kind in KINDS]
    ends_to_see = 1
    for number, kind, requests in order:
        remaining_s = begun + limit_s - time.monotonic()
        if remaining_s < _LEAST_S:
            print(f"no further boot: {limit_s:g} s are nearly over", flush=True)
            return
        sees_end = kind == "background" and requests.patience_s and ends_to_see
        ends_to_see -= bool(sees_end)
        try:
            asked = replace(requests, end_s=requests.end_s if sees_end else 0.0)
            measured = replace(plan.run(number, kind, asked, min(plan.timeout_s, remaining_s)), pair=number)
        except SystemExit as failed:
            print(f"pair {number}: {failed}", flush=True)
            continue
        print(f"pair {number}: {describe(measured)}", flush=True)
        if number:
            yield measured


def describe(measured: Measured) -> str:
    """One line on one boot."""
    report = measured.ready.report
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["phases"].items())
    compiled = "" if measured.compiled_s is None else f"; precompiled after {measured.compiled_s:.1f} s"
    step = "" if measured.step_ms is None else f"; step or token {measured.step_ms:.2f} ms"
    return (
        f"{measured.kind}: {report['process_s']:.2f} s to READY ({phases}); {len(measured.answers)} predictions"
        f"{compiled}{step}"
    )


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/flux-digits", help="a model's folder")
    parser.add_argument("--text", action="store_true", help="it is a language model that llama_boot.py wrote")
    parser.add_argument("--sizes", default="64x64", help="of pictures; all are warmed up, the first is drawn")
    parser.add_argument(
        "--steps", type=int, nargs=2, default=(4, 12), help="denoising steps; predictions take the first"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a language model's prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of its answers")
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directories and logs")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of boots")
    parser.add_argument("--watched", type=int, help="pairs whose servers are asked until all is compiled; all of them")
    parser.add_argument("--eager", type=int, default=6, help="predictions of an eager server")
    parser.add_argument("--through-cog", action="store_true", help="through Cog's server, over HTTP")
    parser.add_argument("--patience", type=float, default=240.0, help="seconds from READY until all is compiled")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between predictions meanwhile")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one boot and its predictions")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of everything")
    parser.add_argument("--bars", action="store_true", help="check times and memory too, for an idle GPU machine")
    parser.add_argument("--out", type=Path, help="file to which each boot is added as a JSON line")
    return parser.parse_args()


def requests_of(args: Any) -> Requests:
    """What is asked of every server."""
    if args.text:
        from stream_http import make_text

        inputs = {"prompt": make_text(args.model, args.prompt), "max_new_tokens": args.tokens, "temperature": 0.0}
    else:
        inputs = {"prompt": PROMPT, "num_inference_steps": args.steps[0]}
    return Requests(
        is_text=args.text,
        inputs={**inputs, "seed": SEED},
        eager=args.eager,
        after=3,
        steps=tuple(args.steps),
        pairs=2,
        patience_s=args.patience,
        end_s=_END_S,
        pause_s=args.pause,
    )


def main() -> None:
    """Boot in turn, print the tables, check."""
    args = parse_arguments()
    args.model = str(Path(args.model).resolve())
    plan = Plan(args.model, args.sizes, prepare(args.store), requests_of(args), args.through_cog, args.timeout)
    watched = args.pairs if args.watched is None else args.watched
    found: dict[str, list[Measured]] = {kind: [] for kind in KINDS}
    for measured in boots(plan, args.pairs, watched, args.limit_s):
        found[measured.kind].append(measured)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps({**dataclasses.asdict(measured), "model": args.model}) + "\n")
    eager, background = found["eager"], found["background"]
    if not eager or not background:
        raise SystemExit("there is no pair of boots to compare")
    print(f"\nmedian (least–greatest)\n\n{tables(eager, background)}\n")
    conclude(check(eager, background, args.pairs, watched) | (bars(eager, background) if args.bars else {}))


if __name__ == "__main__":
    main()
