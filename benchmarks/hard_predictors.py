"""Predictors that are hard to compile, in Cog's server: an eager boot, and three that share a store.

    python benchmarks/hard_predictors.py --store /tmp/hard

The predictors are those of hard_models.py: a graph break, `torch.autocast`, hooks, and requests of another length each.
Each boot has a new cache directory. The first one waits until all is compiled. Prints what served each boot, what it
made, and its seconds to READY. Exits with 1 if an answer differs from the eager boot's, if the second boot could serve
compiled code and does not, if a boot is READY late, or if the third boot makes anything.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from digit_server import with_tini
from fresh_boot import ROOT, boot_environment, conclude, new_log, prepare
from table import markdown

BOOTS = ("eager", "first", "second", "third")
# The lengths of requests, and the largest ‖found − eager‖ / ‖eager‖.
PREDICTORS = {
    "Breaking": ((16,), 1e-4),
    "Autocast": ((16,), 3e-2),
    "Hooked": ((16,), 1e-4),
    "Lengths": ((17, 21, 34, 55), 1e-4),
}
_READY_S = 300.0
_COMPILED_S = 600.0
_EXIT_S = 15.0
# What could not be compared is published 60 s after it arrived.
_PUBLISHED_S = 90.0
_PAUSE_S = 0.5
_ROUNDS = 3  # after all is compiled: new code is compared in one, and serves from the next on
_MADE = re.compile(r'background\.done .*reason=([^"]*)')
_LATE, _LATE_S = 1.1, 2.0


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot: its report at READY, and after it the metrics of its last predictions and what its log tells.

    `made` and `failed` count the jobs of the second process by whether they made code. `error` is the largest.
    """

    ready_s: float
    report: dict[str, Any]
    last: dict[str, Any]
    steps: set[str]
    made: int
    failed: int
    error: float

    @property
    def cached_s(self) -> float:
        """Seconds in which setup traced what is served CACHED."""
        return sum(float(region["compile_s"]) for region in self.report["regions"] if region["step"] == "cached")


def boot(name: str, kind: str, work: Path, answers: dict[int, list[float]]) -> Boot:
    """Boot a predictor in Cog's server and ask it. The eager boot's answers go into `answers`.

    Raises:
        RuntimeError: it is not READY.
    """
    shutil.rmtree(work / "directory", ignore_errors=True)
    log = new_log(work, kind)
    environ = boot_environment(work, kind, work / "store")
    environ |= {"COMPILE_CACHE_COLD_START": "background", "COMPILE_CACHE_REPORT": f"{log}.json"}
    environ[processes.MARK] = str(log)
    lengths, _ = PREDICTORS[name]
    began = time.monotonic()
    with with_tini(f"hard_models.py:{name}", log, environ, ROOT / "benchmarks") as server:
        server.wait_ready(_READY_S)
        ready_s = time.monotonic() - began
        error, left, last = 0.0, _ROUNDS, {}
        steps: set[str] = set()
        while left and time.monotonic() < began + _COMPILED_S:
            steps.clear()
            for tokens in lengths:
                answer = server.predict(tokens=tokens)
                last = answer["metrics"]["compile_cache"]
                found = json.loads(answer["output"])
                error = max(error, apart(found, answers.setdefault(tokens, found)))
                steps |= set((last.get("served") or {}).values())
            left -= last["compiling"] == 0
            time.sleep(_PAUSE_S)
        wait_published(log)
        server.stop(signal.SIGTERM)
        processes.wait_gone(str(log), _EXIT_S)  # the worker publishes in its exit, and may outlive the server
    reasons = _MADE.findall(log.read_text())
    made = sum(reason == "-" or "the next boot" in reason for reason in reasons)
    report = json.loads(Path(f"{log}.json").read_text())
    return Boot(ready_s, report, last, steps, made, len(reasons) - made, error)


def wait_published(log: Path) -> None:
    """Wait until a pack was put after the last job, for a while."""
    deadline = time.monotonic() + _PUBLISHED_S
    while (told := log.read_text()).rfind("publish.put") < told.rfind("background.done"):
        if time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)


def apart(found: list[float], right: list[float]) -> float:
    """‖found − right‖ / ‖right‖."""
    return math.dist(found, right) / math.hypot(*right) if len(found) == len(right) else math.inf


def check(name: str, boots: Mapping[str, Boot]) -> dict[str, bool]:
    """What must hold for a predictor."""
    eager, first, second, third = (boots[kind] for kind in BOOTS)
    compiled = {"eager"} if name == "Hooked" else {"precompiled", "compiled"}
    limit_s = _LATE * eager.ready_s + _LATE_S
    return {
        f"{name}: answers are eager's": all(found.error <= PREDICTORS[name][1] for found in boots.values()),
        f"{name}: nothing waits for a compiler": not any(
            found.last["waited_s"] or found.last["compiled_now"] for found in boots.values()
        ),
        f"{name}: the second and third boot serve {' or '.join(sorted(compiled))}": second.steps | third.steps
        <= compiled,
        f"{name}: READY at most {_LATE:g} × eager + {_LATE_S:g} s, and what CACHED took": all(
            found.ready_s <= limit_s + found.cached_s for found in (first, second, third)
        ),
        f"{name}: the third boot makes nothing": not third.made and third.failed <= first.failed,
    }


def row(name: str, kind: str, found: Boot) -> list[str]:
    """One line of the table."""
    steps = ", ".join(sorted(found.steps)) or "eager"
    restored = found.report["restore"]["outcome"]
    seconds, made = f"{found.ready_s:.2f}", f"{found.made}, {found.failed}"
    return [name, kind, restored, seconds, f"{found.cached_s:.2f}", steps, made, f"{found.error:.1e}"]


def main() -> None:
    """Boot all, print the table, check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, required=True, help="new folder for stores, cache directories and logs")
    parser.add_argument("--only", action="append", choices=PREDICTORS, help="these predictors alone")
    args = parser.parse_args()
    folder = prepare(args.store)
    rows, results = list[list[str]](), dict[str, bool]()
    for name in args.only or PREDICTORS:
        work, answers = folder / name, dict[int, list[float]]()
        work.mkdir()
        boots = dict[str, Boot]()
        for kind in BOOTS:
            boots[kind] = boot(name, kind, work, answers)
            rows.append(row(name, kind, boots[kind]))
            print(*rows[-1], sep=", ", flush=True)
        results |= check(name, boots)
    header = ("predictor", "boot", "restore", "READY, s", "of that CACHED, s", "served by", "made, failed", "error")
    print(f"\n{markdown(header, rows)}\n")
    conclude(results)


if __name__ == "__main__":
    main()
