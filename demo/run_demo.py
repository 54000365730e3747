"""Boot both demo models three times each in a real Cog server: eager, cold (compiling after READY), and restored.

    make demo

Exits with 1 unless the restored boots compiled nothing, with every region precompiled or served by graphs, and gave
the cold boots' answers, and 99 % of the sums are right.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from cog_server import PROJECT, CogServer
from families import FAMILIES, Family
from outcome import WHY_A_STEP_GAINS_LITTLE, DemoBoot, failures, headline, table
from progress import doing, told
from rich import box
from rich.console import Console
from side_by_side import largest_difference, side_by_side

OUTPUT = PROJECT / "demo" / "output"
PICTURES = OUTPUT / "pictures.png"
LONGEST_BOOT_S = 1800.0
BOOTS = {
    "eager": "nothing is compiled",
    "cold": "nothing stored; a second process compiles after READY",
    "restored": "from what the cold boot stored",
}
_PAUSE_S = 2.0
_ROUNDS = 3  # once all is compiled: new code is compared in one prediction, and serves from the next on


def boot(family: Family, name: str, console: Console) -> DemoBoot:
    """Start a server, predict, stop it. Answers, report and log stay in `demo/output/<family>/<name>`."""
    work = OUTPUT / family.name.replace(" ", "-")
    folder, cache = work / name, work / "cache"
    folder.mkdir(parents=True)
    title = f"{family.name}, {name} boot"
    environ = {
        **family.environment,
        "COMPILE_CACHE_SCOPE": "off" if name == "eager" else "regional",
        "COMPILE_CACHE_STORE": str(work / "store"),
        "COMPILE_CACHE_DIR": str(cache),
        "COMPILE_CACHE_REPORT": str(folder / "report.json"),
        "HF_HUB_OFFLINE": "1",
    }
    started = time.perf_counter()
    log = folder / "server.log"
    with CogServer(family.predictor, log, environ) as server:
        with told(console, title, lambda: doing(log, cache)):
            server.wait_ready(LONGEST_BOOT_S)
            ready_s = time.perf_counter() - started
        console.print(f"{title} ({BOOTS[name]}): ready after {ready_s:.1f} s", soft_wrap=True)
        first = family.ask(server, folder)
        if name != "eager":  # a restored boot loads after READY what a prediction calls once
            with told(console, title, lambda: doing(log, cache)):
                compiled_s = wait_compiled(family, server, folder)
        if name == "cold":
            console.print(f"{title}: compiled {compiled_s:.0f} s after READY", soft_wrap=True)
        later = family.ask(server, folder)
        prediction = replace(later, metrics=first.metrics) if name == "restored" else later
        more = family.ask_more(server, folder) if name == "restored" else []
    return DemoBoot(name, ready_s, prediction, json.loads((folder / "report.json").read_text()), more)


def wait_compiled(family: Family, server: CogServer, folder: Path) -> float:
    """Ask until the second process has compiled all that was asked, and its code serves. Returns the seconds that the
    compiling took."""
    started = time.monotonic()
    while family.ask(server, folder).metrics["compiling"] and time.monotonic() < started + LONGEST_BOOT_S:
        time.sleep(_PAUSE_S)
    compiled_s = time.monotonic() - started
    for _ in range(_ROUNDS):
        family.ask(server, folder)
    return compiled_s


def show_pictures(boots: list[DemoBoot], folder: Path) -> str:
    """Put the boots' pictures into one file; return a sentence about them."""
    pictures = {entry.name: folder / entry.name / "picture.png" for entry in boots}
    labels = {
        entry.name: f"ready after {entry.ready_s:.1f} s, drawn in {entry.prediction.seconds * 1e3:.0f} ms"
        for entry in boots
    }
    side_by_side(pictures, labels, '"a handwritten seven", seed 7', PICTURES)
    difference = largest_difference(pictures["eager"], pictures["restored"])
    alike = f"differ by at most {difference} of 255" if difference else "are identical"
    return f"Pictures side by side: {PICTURES.relative_to(PROJECT)}. The eager and the restored one {alike}."


def failed(family: Family, boots: list[DemoBoot]) -> list[str]:
    """All that went wrong with one family, in words."""
    _, cold, restored = boots
    answers = [(entry.name, answer) for entry in boots for answer in (entry.prediction, *entry.more)]
    wrong = [f"{name} boot: {answer.shown}" for name, answer in answers if not answer.is_right]
    return [f"{family.name}: {problem}" for problem in [*failures(cold, restored), *wrong]]


def main() -> int:
    """Run the demo; the exit code."""
    console = Console(highlight=False)
    # An exit ends the server, which is in a session of its own.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    shutil.rmtree(OUTPUT, ignore_errors=True)
    said, problems = [], []
    for family in FAMILIES:
        boots = [boot(family, name, console) for name in BOOTS]
        rows = table(family, boots)
        rows.box = box.SIMPLE_HEAD if console.is_terminal else None
        console.print("", rows, "", sep="\n")
        said.append(headline(family.name, *(entry.ready_s for entry in boots)))
        said += [f"  answer: {answer.shown}" for answer in (boots[-1].prediction, *boots[-1].more)]
        if family.timed == "picture":
            said.append(f"  {show_pictures(boots, OUTPUT / 'text-to-image')}")
        problems += failed(family, boots)
    for line in (*said, "", WHY_A_STEP_GAINS_LITTLE, ""):
        console.print(line, soft_wrap=not console.is_terminal)
    console.print(f"Answers, reports and logs: {OUTPUT.relative_to(PROJECT)}", soft_wrap=True)
    for problem in problems:
        console.print(f"[red]FAILED[/red] {problem}", soft_wrap=True)
    if not problems:
        console.print("The restored boots compiled nothing, and gave the cold boots' answers.", soft_wrap=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
