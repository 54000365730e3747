"""Ways to boot compiled, side by side in one run: eager, torch.compile, what others store of it, and this project.

    python benchmarks/peers.py --work /tmp/peers --out peers.jsonl --limit-s 1500
    python benchmarks/peers.py --model /tmp/flux1 --sizes 1024x1024 --work /tmp/peers --out peers.jsonl
    python benchmarks/peers.py --model /tmp/llama --text --work /tmp/peers --out peers.jsonl
    python benchmarks/peers.py --out peers.jsonl --tables --svg benchmarks/peers.svg

Each boot is a process of its own with an empty cache directory and temporary folder, as in a new container. A cold
boot begins with an empty store and fills it. Warm boots begin with a copy of the filled store, an eager boot before
each round of them. The first boot of a call is not measured. Every boot is added to --out as a JSON line when it is
done. A call goes on where the last one stopped: it skips the boots that --out has.

How each way works was read on 2026-11-22: fal 1.83.0 (`fal/toolkit/compilation.py`), b10-transfer 0.4.1, torch 2.13.0
(`torch/compiler/_cache.py`), diffusers 0.42.1 (`compile_repeated_blocks`), and copies of Replicate's cog-flux-kontext
(`generate_torch_compile_cache.py`, `predict.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fresh_boot import (
    ROOT,
    Model,
    add_line,
    add_model_options,
    boot_environment,
    new_log,
    read_lines,
    run_process,
    within,
)
from table import markdown, percentile, spread

EAGER, COLD, WARM = "eager", "cold", "warm"
_COLUMNS = (
    "way",
    "n, cold / warm",
    "cold READY, s",
    "compiled after READY, s",
    "warm READY, s",
    "− eager, in pairs, s",
    "stored, MB",
    "first request, cold / warm, ms",
    "later ones: p50 / p99, ms (n)",
)
_COLOURS = {COLD: "#b9c4ce", WARM: "#0b6e99", "ours": "#b4540a", "range": "#1f2328", EAGER: "#59636e"}
_BAR = 0.36  # of the height of a row
# A boot as JSON: which one of the run it is, and what one_peer.py measured (`boot`, None where it failed with `error`).
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to boot.

    `compiles` is what torch.compile is applied to: nothing, `whole`, `dynamic` (whole, for all sizes), `regional`, or
    `ours`. `keeps` is how that is stored: nothing, `zip`, `mega`, `committed`, or `ours`.
    """

    name: str
    title: str
    compiles: str
    keeps: str

    @property
    def is_ours(self) -> bool:
        """Whether the library boots it."""
        return self.compiles == "ours"

    @property
    def suits_text(self) -> bool:
        """Whether it is for language models too: diffusers' regional compilation is for its own models."""
        return self.compiles != "regional"


WAYS = (
    Way(EAGER, "eager", "", ""),
    Way("compile", "`torch.compile`", "whole", ""),
    Way("zip", "zip of the directory (fal, Baseten)", "whole", "zip"),
    Way("mega", "Mega-Cache", "whole", "mega"),
    Way("regional", "diffusers' regional compilation, zip", "regional", "zip"),
    Way("committed", "committed cache file (Replicate)", "dynamic", "committed"),
    Way("background", "this project, `background`", "ours", "ours"),
    Way("block", "this project, `block`", "ours", "ours"),
)
BY_NAME = {way.name: way for way in WAYS}


@dataclass(frozen=True, slots=True)
class Asked:
    """What one process does. A boot that is `is_filling` waits until everything is compiled and stored, and stands for
    a build step too. `requests` follow the first one."""

    way: str
    is_text: bool
    inputs: dict[str, Any]
    requests: int
    is_filling: bool


def steps(ways: Sequence[Way], cold: int, warm: int) -> Iterator[tuple[Way, str, int]]:
    """Way, kind and round of each boot, in order. A way that stores nothing has cold boots alone, and an eager one warm
    boots alone."""
    for number in range(1, max(cold, warm) + 1):
        if number <= cold:
            yield from ((way, COLD, number) for way in ways if way.compiles)
        if number <= warm:
            yield from ((way, WARM, number) for way in ways if way.keeps or way.name == EAGER)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all boots of one model have in common."""

    model: Model
    work: Path
    requests: int
    timeout_s: float

    def run(self, way: Way, kind: str, number: int) -> Record:
        """One boot. A failure is a record with its error."""
        store, log = self._prepare_store(way, kind), new_log(self.work, f"{way.name}-{kind}")
        is_filling = kind == COLD and bool(way.keeps)
        asked = Asked(way.name, self.model.is_text, self.model.inputs, 0 if is_filling else self.requests, is_filling)
        command = [sys.executable, str(ROOT / "benchmarks" / "one_peer.py"), json.dumps(dataclasses.asdict(asked))]
        boot, error = None, ""
        try:
            boot = json.loads(
                run_process(f"{way.name} {kind}", command, self._environment(way, store), log, self.timeout_s)
            )
        except SystemExit as failed:
            error = str(failed).splitlines()[-1][:300]
        if is_filling and boot:
            shutil.copytree(store, self.filled(way), dirs_exist_ok=True)
        stored_bytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
        which = {"model": self.model.folder.name, "way": way.name, "kind": kind, "round": number}
        return {**which, "boot": boot, "error": error, "stored_bytes": stored_bytes}

    def filled(self, way: Way) -> Path:
        """What warm boots of this way begin with, if it is there."""
        return self.work / self.model.folder.name / way.name / "filled"

    def _prepare_store(self, way: Way, kind: str) -> Path:
        """The folder that the boot has as its store: empty, or filled."""
        store = self.filled(way).with_name("store")
        shutil.rmtree(store, ignore_errors=True)
        if kind == WARM and way.keeps:
            shutil.copytree(self.filled(way), store)
        store.mkdir(parents=True, exist_ok=True)
        return store

    def _environment(self, way: Way, store: Path) -> dict[str, str]:
        """The variables of a boot in a new container: what it leaves elsewhere than in the store is removed."""
        container = self.work / "container"
        shutil.rmtree(container, ignore_errors=True)
        (container / "tmp").mkdir(parents=True)
        environ = {**boot_environment(container, EAGER, store), **self.model.variables}
        environ |= {"MODEL": str(self.model.folder), "TMPDIR": str(container / "tmp")}
        if way.is_ours:
            return {**environ, "COMPILE_CACHE_SCOPE": "regional", "COMPILE_CACHE_COLD_START": way.name}
        directory = container / "inductor"
        folders = {"TORCHINDUCTOR_CACHE_DIR": directory, "TRITON_CACHE_DIR": directory / "triton"}
        return environ | {name: str(folder) for name, folder in folders.items()}


def run(plan: Plan, wanted: Sequence[tuple[Way, str, int]], done: Sequence[Record], limit_s: float) -> Iterator[Record]:
    """Every step that is not done, as far as the time allows. An eager boot before them fills the page cache. A warm
    boot whose store is not there, as on a new machine, comes after a boot that fills it."""
    known = {(record["model"], record["way"], record["kind"], record["round"]) for record in done}
    left = [step for step in wanted if (plan.model.folder.name, step[0].name, *step[1:]) not in known]
    for way, kind, number in within([(BY_NAME[EAGER], WARM, 0), *left] if left else [], limit_s):
        if kind == WARM and way.keeps and not plan.filled(way).exists():
            print(plan.run(way, COLD, 0), flush=True)
        if kind == WARM and way.keeps and not plan.filled(way).exists():
            continue  # its error was printed
        record = plan.run(way, kind, number)
        print(record, flush=True)
        if number:
            yield record


def tables(records: Sequence[Record]) -> str:
    """A table for each model of the records, and the errors."""
    parts = []
    for model in dict.fromkeys(record["model"] for record in records):
        of_model = [record for record in records if record["model"] == model]
        machine = next((record["boot"]["machine"] for record in of_model if record["boot"]), {})
        present = [way for way in WAYS if any(record["way"] == way.name for record in of_model)]
        errors = [f"{one['way']}, {one['kind']} {one['round']}: {one['error']}" for one in of_model if one["error"]]
        table = markdown(_COLUMNS, (row(way, of_model) for way in present))
        parts += [f"{model}, {machine}; median (least–greatest)", table, *errors]
    return "\n\n".join(parts)


def row(way: Way, records: Sequence[Record]) -> list[str]:
    """One line on a way. Its later requests are those of its warm boots, or of its cold ones if it stores nothing."""
    mine = [record for record in records if record["way"] == way.name]
    cold, warm = (values(mine, kind, "ready_s") for kind in (COLD, WARM))
    # In peers-h200.jsonl the cold boots were killed, and the next ones filled the store.
    stored = {record["round"]: record["stored_bytes"] / 1e6 for record in mine if record["kind"] != WARM}
    first_ms = (spread((s * 1e3 for s in values(mine, kind, "first_s")), 0) for kind in (COLD, WARM))
    later_s = [seconds for each in values(mine, WARM if warm else COLD, "later_s") for seconds in each]
    p50, p99 = (f"{percentile(later_s, percent) * 1e3:.0f}" if later_s else "–" for percent in (50, 99))
    return [
        way.title,
        f"{len(cold)} / {len(warm)}",
        spread(cold),
        spread(compiled_later(mine), 1),
        spread(warm),
        "–" if way.name == EAGER else spread(paired(way.name, records)),
        f"{median(stored.values()):.2f}" if stored and way.keeps else "0",
        " / ".join(first_ms),
        f"{p50} / {p99} ({len(later_s)})",
    ]


def values(records: Sequence[Record], kind: str, name: str) -> list[Any]:
    """What was measured in the boots of a kind."""
    boots = [record["boot"] for record in records if record["kind"] == kind and record["boot"]]
    return [boot[name] for boot in boots if boot[name] is not None]


def compiled_later(records: Sequence[Record]) -> list[float]:
    """Seconds from READY until a second process had compiled everything, of each boot that found nothing."""
    return [record["boot"]["settled_s"] for record in records if record["boot"] and record["boot"]["settled_s"]]


def paired(way: str, records: Sequence[Record]) -> list[float]:
    """Seconds to READY of each warm boot, less those of the eager boot of its round. A round without both has none."""
    boots = [record for record in records if record["kind"] == WARM and record["boot"]]
    ready = {(record["way"], record["round"]): record["boot"]["ready_s"] for record in boots}
    rounds = [number for name, number in ready if name == way and (EAGER, number) in ready]
    return [ready[way, number] - ready[EAGER, number] for number in rounds]


def plot(records: Sequence[Record], file: Path) -> None:
    """Draw seconds from process start to READY of each way, cold and warm, a panel for each model. The file's suffix
    says whether as SVG or PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    # The same records give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif"})
    models = {
        name: [one for one in records if one["model"] == name] for name in dict.fromkeys(r["model"] for r in records)
    }
    shown = {
        name: [way for way in WAYS if any(one["way"] == way.name and one["kind"] in (COLD, WARM) for one in of_model)]
        for name, of_model in models.items()
    }
    heights = [len(ways) for ways in shown.values()]
    figure = Figure(figsize=(9, 0.9 + 0.48 * sum(heights) + 0.6 * len(models)), layout="constrained", facecolor="white")
    panels = figure.subplots(len(models), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for name, panel in zip(models, panels, strict=True):
        _draw(panel, name, shown[name], models[name])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw(panel: Any, model: str, ways: Sequence[Way], records: Sequence[Record]) -> None:
    for place, way in enumerate(ways):
        mine = [record for record in records if record["way"] == way.name]
        for shift, kind in ((-_BAR / 2, WARM), (_BAR / 2, COLD)):
            if ready := values(mine, kind, "ready_s"):
                _bar(panel, way, kind, place + shift, ready, compiled_later(mine) if kind == COLD else [])
    if eager := values([record for record in records if record["way"] == EAGER], WARM, "ready_s"):
        panel.axvline(median(eager), color=_COLOURS[EAGER], linewidth=1, linestyle="--", label="eager, median")
    panel.set_yticks(range(len(ways)), [way.title.replace("`", "") for way in ways])
    panel.invert_yaxis()
    panel.margins(x=0.2, y=0.02)
    panel.set_xlim(left=0)
    panel.set_title(f"{model}: process start to READY, s", loc="left", fontsize=11, fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)


def _bar(panel: Any, way: Way, kind: str, place: float, ready: Sequence[float], later: Sequence[float]) -> None:
    """A bar with its range, and in words its median, its number of boots and when a second process had compiled."""
    middle = median(ready)
    colour = _COLOURS["ours" if way.is_ours and kind == WARM else kind]
    label = None if colour == _COLOURS["ours"] else {COLD: "cold, nothing stored", WARM: "warm"}[kind]
    seen = panel.get_legend_handles_labels()[1]
    panel.barh(place, middle, _BAR, color=colour, label=None if label in seen else label)
    panel.hlines(place, min(ready), max(ready), color=_COLOURS["range"], linewidth=1)
    after = f", compiled {median(later):.0f} s later" if later else ""
    words = f"{middle:.1f} (n = {len(ready)}){after}"
    panel.annotate(words, (max(ready), place), (5, 0), textcoords="offset points", va="center", fontsize=9)


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS), help="which ways, in this order")
    parser.add_argument("--work", type=Path, help="folder of stores, cache directories and logs")
    parser.add_argument("--out", type=Path, required=True, help="file to which each boot is added as a JSON line")
    parser.add_argument("--cold", type=int, default=2, help="cold boots of each way")
    parser.add_argument("--warm", type=int, default=5, help="warm boots of each way")
    parser.add_argument("--requests", type=int, default=20, help="requests of each boot after the first one")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of one boot and its requests")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of everything")
    parser.add_argument("--tables", action="store_true", help="boot nothing; print the tables of --out")
    parser.add_argument("--svg", type=Path, help="file for the plot")
    args = parser.parse_args()
    if args.work is None and not args.tables:
        parser.error("give --work, or --tables")
    return args


def main() -> None:
    """Boot what is missing, print the tables, draw the plot."""
    args = parse_arguments()
    records = read_lines(args.out)
    if not args.tables:
        plan = Plan(Model.of(args), args.work.resolve(), args.requests, args.timeout)
        plan.work.mkdir(parents=True, exist_ok=True)
        ways = [BY_NAME[name] for name in args.ways.split(",") if BY_NAME[name].suits_text or not args.text]
        for record in run(plan, list(steps(ways, args.cold, args.warm)), records, args.limit_s):
            records.append(record)
            add_line(args.out, record)
    print(f"\n{tables(records)}")
    if args.svg:
        plot(records, args.svg)


if __name__ == "__main__":
    main()
