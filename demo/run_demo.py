"""Boot both demo models three times each in a real Cog server: eager, compiled cold, and restored.

    make demo

Exits non-zero unless the restored boots compiled nothing, with every region precompiled or cached, and gave the cold
boots' answers.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cog_server import PROJECT, CogServer, files
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from sums import answer, prompt, unseen_sums

OUTPUT = PROJECT / "demo" / "output"
BOOTS = {"eager": "compilation off", "cold": "compiled, empty cache", "restored": "compiled, cache of the cold boot"}
SUMS = unseen_sums(50)
# Steps of the ladder that a restored boot may take.
RESTORED_STEPS = ("precompiled", "cached")


@dataclass(frozen=True)
class Prediction:
    """What was answered, the same after every compiled boot; a line on it; and how long a part of it took.

    `metrics` are those of the first prediction after READY.
    """

    answer: bytes
    is_right: bool
    shown: str
    seconds: float
    metrics: dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A family of models: its predictor, its settings, what to ask it, and what `Prediction.seconds` are of."""

    name: str
    predictor: str
    environment: dict[str, str]
    ask: Callable[[CogServer, Path], Prediction]
    timed: str


def predict(server: CogServer, **inputs: Any) -> dict[str, Any]:
    """One prediction.

    Raises:
        RuntimeError: it failed.
    """
    prediction = server.predict(**inputs)
    if prediction["status"] != "succeeded":
        raise RuntimeError(f"the prediction failed: {prediction.get('error')}; see {server.log}")
    return prediction


def draw(server: CogServer, folder: Path) -> Prediction:
    """A seven, left in the folder."""
    prediction = predict(server, prompt="a handwritten seven", seed=7, num_inference_steps=8, output_format="png")
    picture = files(prediction)[0]
    (folder / "picture.png").write_bytes(picture)
    metrics = prediction["metrics"]
    return Prediction(picture, True, "picture.png", metrics["predict_time"], metrics["compile_cache"])


def add(server: CogServer, folder: Path) -> Prediction:
    """Sums that the model was not trained on, left in the folder."""
    predictions = [predict(server, prompt=prompt(a, b)) for a, b in SUMS]
    answers = ["".join(prediction["output"]) for prediction in predictions]
    lines = [prompt(a, b) + found for (a, b), found in zip(SUMS, answers, strict=True)]
    (folder / "sums.txt").write_text("\n".join(lines) + "\n")
    right = sum(found == answer(a, b) for (a, b), found in zip(SUMS, answers, strict=True))
    metrics = [prediction["metrics"] for prediction in predictions]
    tokens = sum(entry["output_token_count"] for entry in metrics)
    seconds = sum(entry["predict_time"] for entry in metrics) / tokens
    shown = f"{right} of {len(SUMS)} unseen sums right, as {lines[0]}"
    return Prediction(
        "\n".join(answers).encode(), right >= 0.99 * len(SUMS), shown, seconds, metrics[0]["compile_cache"]
    )


FAMILIES = (
    Family(
        "text to image",
        "predict.py:Predictor",
        {"MODEL": "demo/flux-digits", "IMAGE_SIZES": "64x64,96x64,64x96"},
        draw,
        "picture",
    ),
    Family(
        "text generation",
        "predict.py:TextPredictor",
        {"MODEL": "demo/llama-adder", "CACHE_TOKENS": "64", "PROMPT_BUCKETS": "16,64"},
        add,
        "token",
    ),
)


@dataclass(frozen=True)
class DemoBoot:
    """What one boot did. `ready_s` is wall-clock, from the server's start to its READY."""

    name: str
    ready_s: float
    prediction: Prediction
    report: dict[str, Any]


def boot(family: Family, name: str, progress: Progress) -> DemoBoot:
    """Start a server, predict, stop it; answers, report and log are left in `demo/output/<family>/<name>`."""
    work = OUTPUT / family.name.replace(" ", "-")
    folder = work / name
    folder.mkdir(parents=True)
    title = f"{family.name}, {name}"
    task = progress.add_task(f"{title}: booting ({BOOTS[name]})", total=1)
    environ = {
        **family.environment,
        "COMPILE_CACHE_SCOPE": "off" if name == "eager" else "regional",
        "COMPILE_CACHE_STORE": str(work / "store"),
        "COMPILE_CACHE_DIR": str(work / "cache"),
        "COMPILE_CACHE_REPORT": str(folder / "report.json"),
        "COMPILE_CACHE_COLD_START": "block",
        "HF_HUB_OFFLINE": "1",
    }
    started = time.perf_counter()
    with CogServer(family.predictor, folder / "server.log", environ) as server:
        server.wait_ready(600)
        ready_s = time.perf_counter() - started
        progress.update(task, description=f"{title}: ready after {ready_s:.1f} s, predicting")
        prediction = family.ask(server, folder)
        progress.update(task, description=f"{title}: stopping")
    progress.update(task, description=f"{title}: ready after {ready_s:.1f} s", completed=1)
    return DemoBoot(name, ready_s, prediction, json.loads((folder / "report.json").read_text()))


def table(family: Family, boots: list[DemoBoot]) -> Table:
    """One row a boot."""
    columns = ("boot", "ready s", "compile s", f"{family.timed} ms", "hits", "misses", "regions")
    result = Table(*columns, title=f"{family.name.capitalize()}: three boots")
    for entry in boots:
        counts = entry.prediction.metrics
        result.add_row(
            entry.name,
            f"{entry.ready_s:.1f}",
            f"{sum(region['compile_s'] + region['precompile_s'] for region in entry.report['regions']):.1f}",
            f"{entry.prediction.seconds * 1e3:.1f}",
            str(counts["hits"]),
            str(counts["misses"]),
            ", ".join(sorted(set(counts["regions"].values()))) or "eager",
        )
    return result


def failures(cold: DemoBoot, restored: DemoBoot) -> list[str]:
    """What the restored boot should have done and did not, in words."""
    report, counts = restored.report, restored.report["counts"]
    anew = {name: counts[name] for name in ("fxgraph_misses", "aotautograd_misses", "kernels_compiled", "benchmarks")}
    below = {region["name"]: region["step"] for region in report["regions"] if region["step"] not in RESTORED_STEPS}
    found = []
    if not report["fully_cached"]:
        found.append(f"the restored boot was not fully cached: anew {anew}, regions below cached {below}")
    if compiled := restored.prediction.metrics["compiled_now"]:
        found.append(f"the first prediction after READY compiled {compiled} graphs")
    if restored.prediction.answer != cold.prediction.answer:
        found.append("the restored boot gave another answer than the cold one")
    return found


def main() -> int:
    """Run the demo; the exit code."""
    console = Console()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    problems = []
    for family in FAMILIES:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            boots = [boot(family, name, progress) for name in BOOTS]
        console.print(table(family, boots))
        console.print(boots[-1].prediction.shown)
        problems += [f"{family.name}: {problem}" for problem in failures(boots[1], boots[2])]
        problems += [
            f"{family.name}, {one.name}: {one.prediction.shown}" for one in boots if not one.prediction.is_right
        ]
    console.print(f"Answers, reports and logs: {OUTPUT.relative_to(PROJECT)}", soft_wrap=True)
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}")
    if not problems:
        console.print("The restored boots compiled nothing, and gave the cold boots' answers.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
