"""Boots of a Llama compared, as TextPredictor does them: eager, cold (nothing stored yet) and warm (restored).

    python benchmarks/llama_boot.py --shape llama-3.1-8b --model /tmp/llama --write
    python benchmarks/llama_boot.py --model /tmp/llama --store /tmp/bench --warm 5 --out llama.jsonl

The prefill of a prompt and the step of decoding are compiled, each whole, and on a GPU both are recorded as CUDA
graphs, in eager boots as well. Each boot is a fresh process. One eager boot that is not measured comes first, so that
all measured ones read the weights from the page cache; then the cold ones, then eager and warm in turn. Exits with 1
if a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from boot import (
    KINDS,
    collect,
    conclude,
    describe_report,
    differs_within_tolerance,
    gigabytes,
    has_regions,
    in_order,
    misses,
    parse_boots,
)
from fresh_boot import RESTORED_STEPS, ROOT, new_log, prepare, run_process
from ptxas import count_runs, install_counters, log_to
from table import Row, markdown
from text_boot import text_environment

_COLUMNS = (
    "boot",
    "n",
    "process start to READY, s",
    "− eager, s",
    "boot to READY, s",
    "weights, s",
    "warm-up, s",
    "compile, s",
    "restore, s",
    "waited for it, s",
    "record, s",
    "first answer, s",
    "first token, ms",
    "token, ms",
    "token / eager",
    "kernels",
    "ptxas runs",
    "benchmarks",
    "largest error",
    "boot's peak, GB",
)


@dataclass(frozen=True)
class Boot:
    """One boot and its answers. `report` is the BootReport's JSON, `tokens` what greedy decoding found.

    `logits_sha256` is of the step after them: bitwise equal logits are more than equal tokens. `token_ms` is a token
    after the first. `ptxas_runs` counts until the process ended; None where there is no Triton.
    """

    kind: str
    report: dict[str, Any]
    tokens: list[int]
    logits_sha256: str
    first_answer_s: float
    first_token_ms: float
    token_ms: float
    graphs_after_ready: int
    is_recorded: bool
    machine: dict[str, str]
    ptxas_runs: int | None = None


@dataclass(frozen=True)
class Plan:
    """What all boots have in common. `variables` are added to their environment."""

    model: str
    work: Path
    variables: dict[str, str]
    is_tuned: bool
    prompt: int
    tokens: int
    timeout_s: float

    def run(self, kind: str, store: Path) -> Boot:
        """One boot in a process of its own.

        Raises:
            SystemExit: it failed.
        """
        command = [sys.executable, str(ROOT / "benchmarks" / "one_llama_boot.py"), kind, "--model", self.model]
        command += ["--prompt", str(self.prompt), "--tokens", str(self.tokens), "--timeout", str(self.timeout_s)]
        log = new_log(self.work, kind)
        ptxas_log = log.with_suffix(".ptxas")
        environ = {**text_environment(self.work, kind, store, self.is_tuned), **self.variables, **log_to(ptxas_log)}
        record = json.loads(run_process(kind, command, environ, log, self.timeout_s))
        record["ptxas_runs"] = count_runs(ptxas_log) if record["machine"]["triton"] else None
        return Boot(**record)


def describe(boot: Boot) -> str:
    """One line on one boot."""
    ptxas = "no Triton" if boot.ptxas_runs is None else f"{boot.ptxas_runs} ptxas runs"
    return (
        f"{describe_report(boot.kind, boot.report)}, {ptxas}; first answer {boot.first_answer_s:.3f} s, "
        f"token {boot.token_ms:.3f} ms, tokens {' '.join(map(str, boot.tokens[:6]))} …, "
        f"logits {boot.logits_sha256[:12]}"
    )


def row(kind: str, boots: Sequence[Boot], eager: Sequence[Boot]) -> list[str]:
    """One line of the table: medians, with their range."""
    shown = Row(boots, () if kind == "eager" else eager)
    return [
        kind,
        str(len(boots)),
        shown.of(lambda boot: boot.report["process_s"]),
        shown.against(lambda one, other: one - other, lambda boot: boot.report["process_s"]),
        shown.of(lambda boot: boot.report["ready_s"]),
        shown.of(lambda boot: boot.report["phases"]["weights"]),
        shown.of(lambda boot: boot.report["phases"]["warm_up"]),
        shown.of(lambda boot: boot.report["compile_s"]),
        shown.of(lambda boot: boot.report["restore"]["seconds"]),
        shown.of(lambda boot: boot.report["restore"]["waited_s"]),
        shown.of(lambda boot: boot.report["phases"]["record"], 3),
        shown.of(lambda boot: boot.first_answer_s),
        shown.of(lambda boot: boot.first_token_ms),
        shown.of(lambda boot: boot.token_ms),
        shown.against(lambda one, other: one / other, lambda boot: boot.token_ms),
        shown.of(lambda boot: boot.report["counts"]["kernels_compiled"], 0),
        shown.of(lambda boot: boot.ptxas_runs, 0),
        shown.of(lambda boot: boot.report["counts"]["benchmarks"], 0),
        "–" if kind == "eager" else f"{max(map(relative_error, boots)):.1e}",
        shown.of(lambda boot: gigabytes(boot.report["device_peak_bytes"])),
    ]


def relative_error(boot: Boot) -> float:
    """The compiled steps' largest difference from eager; 0 where nothing is compiled."""
    return max((float(region["relative_error"] or 0) for region in boot.report["regions"]), default=0.0)


def check(boots: dict[str, list[Boot]]) -> dict[str, bool]:
    """Every claim of the table that has a yes or no."""
    cold, warm, eager = boots["cold"], boots["warm"], boots["eager"]
    compiled = cold + warm
    everything = compiled + eager
    on_gpu = all(boot.ptxas_runs is not None for boot in everything)
    results = {
        "there are cold, eager and warm boots": bool(cold and warm and eager),
        "every warm boot is restored": all(boot.report["restore"]["outcome"] == "hit" for boot in warm),
        "warm boots miss, compile and benchmark nothing": not any(map(made_anew, warm)),
        "cold boots compile both steps": all(has_regions(boot.report, ("cold",)) for boot in cold),
        "warm boots find them": all(has_regions(boot.report, RESTORED_STEPS) for boot in warm),
        "the compiled steps differ from eager, as rounding does": all(
            differs_within_tolerance(boot.report) for boot in compiled
        ),
        "all warm boots find the same tokens": len({tuple(boot.tokens) for boot in warm}) == 1,
        "every warm boot is fully precompiled": all(boot.report["fully_precompiled"] for boot in warm),
        "no answer is one token over and over": all(len(set(boot.tokens)) > 1 for boot in everything),
        "answers compile nothing": not any(boot.graphs_after_ready for boot in everything),
        "eager boots compile nothing": not any(boot.report["counts"]["graphs"] for boot in eager),
        "no boot warns": not any(boot.report["warnings"] for boot in everything),
    }
    if on_gpu:  # where weights are bf16, rounding decides between tokens that are nearly as likely
        results["cold boots ran ptxas, so its runs are counted"] = all(boot.ptxas_runs for boot in cold)
        results["warm boots ran no ptxas"] = not any(boot.ptxas_runs for boot in warm)
        results["every boot recorded its step"] = all(boot.is_recorded for boot in everything)
    else:
        results["all eager boots find the same tokens"] = len({tuple(boot.tokens) for boot in eager}) == 1
        results["compiled and eager boots find the same tokens"] = len({tuple(boot.tokens) for boot in everything}) == 1
    return results


def made_anew(boot: Boot) -> int:
    """Lookups that found nothing, kernels compiled and benchmarks run."""
    counts = boot.report["counts"]
    return misses(counts) + int(counts["kernels_compiled"]) + int(counts["benchmarks"])


def agreement(boots: dict[str, list[Boot]]) -> str:
    """A line on how far the answers of the kinds agree."""
    eager, compiled = boots["eager"][0].tokens, boots["cold"][0].tokens
    alike = ", ".join(f"{most_alike(boots[kind])} {kind}" for kind in ("eager", "warm") if boots[kind])
    same = next((number for number, pair in enumerate(zip(eager, compiled, strict=True)) if pair[0] != pair[1]), None)
    digests = {boot.logits_sha256 for boot in boots["cold"] + boots["warm"]}
    logits = "equal to the bit" if len(digests) == 1 else f"{len(digests)} different ones"
    return (
        f"{alike} boots find the same {len(eager)} tokens; the first eager boot and the first cold one agree on "
        f"{len(eager) if same is None else f'the first {same}'} of them; "
        f"logits of cold and warm boots: {logits}"
    )


def most_alike(boots: Sequence[Boot]) -> str:
    """`4 of 5`, where four found the same tokens."""
    return f"{Counter(tuple(boot.tokens) for boot in boots).most_common(1)[0][1]} of {len(boots)}"


def write_model(name: str, folder: Path) -> None:
    """Make the folder that is booted."""
    import llama

    started = time.perf_counter()
    parameters = llama.write(llama.SHAPES[name], folder)
    size_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    seconds = time.perf_counter() - started
    print(f"{parameters / 1e9:.3f} B parameters, {size_bytes / 1e9:.2f} GB in {folder}, {seconds:.1f} s")


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the folder that is booted, or written")
    parser.add_argument("--write", action="store_true", help="write the model's folder, and boot nothing")
    parser.add_argument(
        "--shape", choices=("llama-3.1-8b", "tiny", "deep"), default="llama-3.1-8b", help="of what is written"
    )
    parser.add_argument("--store", type=Path, help="new folder for stores, cache directory and logs")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--tuned", action="store_true", help="with Inductor's coordinate descent tuning, in all boots")
    args = parse_boots(parser)
    if not args.write and args.store is None:
        parser.error("give --store, or --write")
    return args


def main() -> None:
    """Write the model; or boot, compare, check."""
    args = parse_arguments()
    if args.write:
        write_model(args.shape, args.model)
        return
    work = prepare(args.store)
    variables = install_counters(work, os.environ)
    plan = Plan(str(args.model.resolve()), work, variables, args.tuned, args.prompt, args.tokens, args.timeout)
    unmeasured = plan.run("eager", work / "store-0")
    print(f"machine: {unmeasured.machine}")
    print(f"not measured, to fill the page cache: {describe(unmeasured)}", flush=True)
    order = in_order(work, args.cold, args.warm, ("eager", "warm"), args.budget)
    boots = collect((plan.run(kind, store) for kind, store in order), describe, args.out)

    rows = [row(kind, boots[kind], boots["eager"]) for kind in KINDS if boots[kind]]
    print(f"\nmedian (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    if boots["eager"]:
        print(agreement(boots))
    conclude(check(boots))


if __name__ == "__main__":
    main()
