"""Boot the text-to-image model three times in a real Cog server: eager, compiled cold, and restored.

    make demo

Exits non-zero unless the restored boot compiled nothing, with every region cached, and drew the same picture.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from typing import Any

from cog_server import PROJECT, CogServer, files
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

OUTPUT = PROJECT / "demo" / "output"
SIZES = "64x64,96x64,64x96"
PICTURE = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 8, "output_format": "png"}
BOOTS = {"eager": "compilation off", "cold": "compiled, empty cache", "restored": "compiled, cache of the cold boot"}


@dataclass(frozen=True)
class DemoBoot:
    """What one boot did. Seconds are wall-clock, `ready_s` from the server's start to its READY."""

    name: str
    ready_s: float
    predict_s: float
    picture: bytes
    metrics: dict[str, Any]
    report: dict[str, Any]


def boot(name: str, progress: Progress) -> DemoBoot:
    """Start a server, draw a picture, stop it; picture, report and log are left in `demo/output/<name>`."""
    folder = OUTPUT / name
    folder.mkdir(parents=True)
    task = progress.add_task(f"{name}: booting ({BOOTS[name]})", total=1)
    started = time.perf_counter()
    with CogServer("predict.py:Predictor", folder / "server.log", environment(name)) as server:
        server.wait_ready()
        ready_s = time.perf_counter() - started
        progress.update(task, description=f"{name}: ready after {ready_s:.1f} s, drawing")
        prediction = server.predict(**PICTURE)
        if prediction["status"] != "succeeded":
            raise RuntimeError(f"the prediction failed: {prediction.get('error')}; see {server.log}")
        progress.update(task, description=f"{name}: stopping")
    metrics, picture = prediction["metrics"], files(prediction)[0]
    (folder / "picture.png").write_bytes(picture)
    progress.update(task, description=f"{name}: ready after {ready_s:.1f} s", completed=1)
    report = json.loads((folder / "report.json").read_text())
    return DemoBoot(name, ready_s, metrics["predict_time"], picture, metrics["compile_cache"], report)


def environment(name: str) -> dict[str, str]:
    """The settings of one boot, as cog.yaml has them, with a store of the demo's own."""
    return {
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": SIZES,
        "COMPILE_CACHE_SCOPE": "off" if name == "eager" else "regional",
        "COMPILE_CACHE_STORE": str(OUTPUT / "store"),
        "COMPILE_CACHE_DIR": str(OUTPUT / "cache"),
        "COMPILE_CACHE_REPORT": str(OUTPUT / name / "report.json"),
        "HF_HUB_OFFLINE": "1",
    }


def table(boots: list[DemoBoot]) -> Table:
    """One row a boot."""
    result = Table("boot", "ready s", "compile s", "prediction s", "hits", "misses", "regions", title="Three boots")
    for entry in boots:
        counts = entry.metrics
        result.add_row(
            entry.name,
            f"{entry.ready_s:.1f}",
            f"{counts['compile_s']:.1f}",
            f"{entry.predict_s:.2f}",
            str(counts["hits"]),
            str(counts["misses"]),
            ", ".join(sorted(set(counts["regions"].values()))) or "eager",
        )
    return result


def failures(cold: DemoBoot, restored: DemoBoot) -> list[str]:
    """What the restored boot should have done and did not, in words."""
    report, counts = restored.report, restored.report["counts"]
    anew = {name: counts[name] for name in ("fxgraph_misses", "aotautograd_misses", "kernels_compiled", "benchmarks")}
    below = {region["name"]: region["step"] for region in report["regions"] if region["step"] != "cached"}
    found = []
    if not report["fully_cached"]:
        found.append(f"the restored boot was not fully cached: anew {anew}, regions below cached {below}")
    if restored.metrics["compiled_now"]:
        found.append(f"the first prediction after READY compiled {restored.metrics['compiled_now']} graphs")
    if restored.picture != cold.picture:
        found.append("the restored boot drew another picture than the cold one")
    return found


def main() -> int:
    """Run the demo; the exit code."""
    console = Console()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        boots = [boot(name, progress) for name in BOOTS]
    console.print(table(boots))
    shown = OUTPUT.relative_to(PROJECT)
    console.print(
        f"Pictures, reports and logs: {shown}/{{{','.join(BOOTS)}}}/{{picture.png,report.json,server.log}}",
        soft_wrap=True,
    )
    problems = failures(boots[1], boots[2])
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}")
    if not problems:
        console.print("The restored boot compiled nothing, and drew the cold boot's picture.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
