"""One boot of the predictor in a process of its own: what to boot, how, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The steps of a region for which a boot compiled nothing, best first.
RESTORED_STEPS = ("precompiled", "cached")
PROMPT = "a handwritten three"
SEED = 0


@dataclass(frozen=True)
class Prediction:
    """`sha256` is of the picture's pixels, not of its file; a picture of NaN has a single colour."""

    seconds: float
    sha256: str
    colours: int
    graphs_compiled: int


@dataclass(frozen=True)
class Boot:
    """One boot and its predictions. `report` is the BootReport's JSON.

    `step_ms` is the difference of two predictions that differ in their number of denoising steps alone, a step: text
    encoding, VAE and picture file cancel out. `http_ready_s` counts from the start of Cog's server until it says
    READY. `prediction_peak_bytes` is the largest device memory in use during the first prediction.
    """

    kind: str
    report: dict[str, Any]
    first: Prediction
    step_ms: float
    http_ready_s: float | None = None
    prediction_peak_bytes: int | None = None
    machine: dict[str, str] | None = None

    @property
    def warm_up_s(self) -> float:
        """The calls that compile, or would."""
        return self.report["phases"]["warm_up"]

    @property
    def setup_s(self) -> float:
        """Importing the compiler and wrapping the regions; nothing when eager."""
        return self.report["phases"].get("compile_setup", 0.0)


@dataclass(frozen=True)
class Plan:
    """What all boots of one benchmark have in common. `steps` are two numbers of denoising steps."""

    model: str
    sizes: str
    steps: tuple[int, int]
    work: Path
    pairs: int = 3
    scope: str = "regional"
    timeout_s: float = 600.0

    def environment(self, kind: str, store: Path) -> dict[str, str]:
        """The variables of a boot; other `COMPILE_CACHE_*` ones reach it as they are."""
        model = os.path.abspath(self.model) if os.path.isdir(self.model) else self.model
        sizes = {"IMAGE_SIZES": self.sizes, "WARM_UP_SIZES": self.sizes}
        return {**boot_environment(self.work, kind, store, self.scope), "MODEL": model, **sizes}

    def log(self, kind: str) -> Path:
        """A new file for what a boot writes to stderr."""
        return new_log(self.work, kind)


def boot_environment(work: Path, kind: str, store: Path, scope: str) -> dict[str, str]:
    """This process's variables, and those of every boot of a benchmark in the folder `work`."""
    return {
        **os.environ,
        "COMPILE_CACHE_STORE": str(store),
        "COMPILE_CACHE_DIR": str(work / "directory"),
        "COMPILE_CACHE_SCOPE": "off" if kind == "eager" else scope,
        **({"COMPILE_CACHE_PRECOMPILE": "0"} if kind == "cached" else {}),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def new_log(work: Path, kind: str) -> Path:
    """A new file for what a boot writes to stderr."""
    return work / f"{time.strftime('%H%M%S')}-{kind}-{time.monotonic_ns() % 10**6}.log"


def prepare(work: Path) -> Path:
    """The absolute path of a benchmark's folder, made if it is not there.

    Raises:
        SystemExit: it has something in it, so that a cold boot might not be cold.
    """
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        raise SystemExit(f"{work} is not empty; give --store a new folder")
    return work.resolve()


def run_boot(plan: Plan, kind: str, store: Path) -> Boot:
    """Boot without Cog's server, predict and end. `kind` is `eager`, `cold` or `warm`.

    Raises:
        SystemExit: the boot failed or took longer than `plan.timeout_s`; names its log.
    """
    command = [sys.executable, str(ROOT / "benchmarks" / "one_boot.py"), kind]
    command += ["--steps", *map(str, plan.steps), "--pairs", str(plan.pairs), "--timeout", str(plan.timeout_s)]
    command += ["--without-preload"] if kind == "unpreloaded" else []
    return boot_from_json(run_process(kind, command, plan.environment(kind, store), plan.log(kind), plan.timeout_s))


def run_process(kind: str, command: list[str], environ: dict[str, str], log: Path, timeout_s: float) -> str:
    """Run a boot in a process of its own, with stderr in `log`; the last line that it prints.

    Raises:
        SystemExit: the boot failed or took longer than `timeout_s`; names its log.
    """
    with log.open("w") as stderr:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the {kind} boot took more than {timeout_s:g} s; see {log}") from None
        finally:
            end(child)
    lines = output.splitlines()
    if child.returncode or not lines:
        raise SystemExit(f"the {kind} boot ended with {child.returncode}; {log} ends with:\n{log.read_text()[-3000:]}")
    return lines[-1]


def end(child: subprocess.Popen[Any]) -> None:
    """Kill the process and those that it started, if it still runs."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def boot_from_json(line: str) -> Boot:
    """The inverse of `json.dumps(dataclasses.asdict(boot))`."""
    record = json.loads(line)
    return Boot(**{**record, "first": Prediction(**record["first"])})
