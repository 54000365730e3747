"""Ways to boot compiled, side by side in one run: eager, torch.compile, what others store of it, and this project.

    python benchmarks/peers.py --work /tmp/peers --out peers.jsonl --limit-s 1500
    python benchmarks/peers.py --model /tmp/flux1 --sizes 1024x1024,768x1024 --work /tmp/peers --out peers.jsonl
    python benchmarks/peers.py --model /tmp/llama --text --work /tmp/peers --out peers.jsonl
    python benchmarks/peers.py --out peers.jsonl --tables --svg benchmarks/peers.svg

Each boot is a process of its own with an empty cache directory and temporary folder, as in a new container. A cold
boot begins with an empty store and is killed; the next boot takes what it has left, and fills the store. Warm boots
begin with a copy of the filled store, an eager boot before each round of them. Every boot is added to --out as a JSON
line when it is done. A call goes on where the last one stopped: it skips the boots that --out has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fresh_boot import ROOT, Model, boot_environment, new_log, run_process
from peer_records import COLD, NEXT, WARM, Asked, PeerBoot, Record, read_records
from peer_table import describe, tables
from peer_ways import BY_NAME, EAGER, WAYS, Way

_KILLS = ("ready", "request")
# A boot that has less time left is not begun.
_LEAST_S = 20.0


@dataclass(frozen=True, slots=True)
class Step:
    """One boot of a run. `fills` says that it leaves everything stored, and `asks_new` that it asks for a new size."""

    way: Way
    kind: str
    round: int
    killed_after: str = ""
    fills: bool = False
    asks_new: bool = False


def steps(ways: Sequence[Way], cold: int, warm: int, new: int) -> Iterator[Step]:
    """The boots in order: a cold one of each way and the one after it, the warm ones in turn, the other cold ones.

    A way that stores nothing has cold boots alone, which are not killed, and an eager one warm boots alone. The first
    `new` rounds ask for a new size.
    """
    yield from _cold_round(ways, 1, new)
    for number in range(1, warm + 1):
        for way in ways:
            if way.keeps or way.name == EAGER:
                yield Step(way, WARM, number, asks_new=number <= new)
    for number in range(2, cold + 1):
        yield from _cold_round(ways, number, new)


def _cold_round(ways: Sequence[Way], number: int, new: int) -> Iterator[Step]:
    for way in ways:
        if way.keeps:
            yield Step(way, COLD, number, killed_after=_killed_after(number))
            yield Step(way, NEXT, number, fills=True)
        elif way.compiles:
            yield Step(way, COLD, number, asks_new=number <= new)


def _killed_after(number: int) -> str:
    """Cold boots are killed in turn at READY and after the first request."""
    return _KILLS[(number - 1) % len(_KILLS)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What all boots of one model have in common."""

    model: Model
    work: Path
    requests: int
    timeout_s: float

    @property
    def name(self) -> str:
        """The model's in the records."""
        return self.model.folder.name

    def run(self, step: Step, timeout_s: float) -> Record:
        """One boot, in `timeout_s` at most. A failure is a record with its error."""
        store = self._prepare_store(step)
        asked = Asked(
            step.way.name,
            self.model.is_text,
            self.model.inputs,
            self.model.new_inputs if step.asks_new else None,
            0 if step.fills else self.requests,
            step.killed_after,
            step.fills,
        )
        found_bytes = size_bytes(store)
        log = new_log(self.work, f"{step.way.name}-{step.kind}")
        boot, error = self._boot(asked, store, log, timeout_s)
        if step.fills and boot is not None:
            shutil.copytree(store, self.filled(step.way), dirs_exist_ok=True)
        return Record(
            self.name,
            step.way.name,
            step.kind,
            step.round,
            boot,
            error,
            step.killed_after,
            found_bytes,
            size_bytes(store),
            str(log),
        )

    def store(self, way: Way) -> Path:
        """The folder that boots of this way have as their store."""
        return self.work / self.name / way.name / "store"

    def filled(self, way: Way) -> Path:
        """What warm boots of this way begin with, if it is there."""
        return self.store(way).with_name("filled")

    def _prepare_store(self, step: Step) -> Path:
        """The store's folder as this step finds it: empty, as the step before has left it, or filled."""
        store = self.store(step.way)
        if step.kind != NEXT:
            shutil.rmtree(store, ignore_errors=True)
        if step.kind == WARM and step.way.keeps:
            shutil.copytree(self.filled(step.way), store)
        store.mkdir(parents=True, exist_ok=True)
        return store

    def _boot(self, asked: Asked, store: Path, log: Path, timeout_s: float) -> tuple[PeerBoot | None, str]:
        record = log.with_suffix(".json")
        command = [sys.executable, str(ROOT / "benchmarks" / "one_peer.py")]
        command += [json.dumps(dataclasses.asdict(asked)), str(record)]
        begun = time.monotonic()
        try:
            run_process(asked.way, command, self._environment(BY_NAME[asked.way], store), log, timeout_s)
        except SystemExit:
            if time.monotonic() - begun >= timeout_s:
                return None, f"took more than {timeout_s:.0f} s"
            if not asked.killed_after or not record.exists():
                return None, last_line(log)
        measured = json.loads(record.read_text())
        return PeerBoot(**{**measured, "later_s": tuple(measured["later_s"])}), ""

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


def size_bytes(folder: Path) -> int:
    """Of all files below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def last_line(log: Path) -> str:
    """The line with which a failed boot's log ends: the exception."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "ended without a word"


def run(plan: Plan, wanted: Sequence[Step], done: Sequence[Record], limit_s: float) -> Iterator[Record]:
    """Every step that is not done, as far as the time allows."""
    begun = time.monotonic()
    known = {record.step: record for record in done}
    left = [step for step in wanted if (plan.name, step.way.name, step.kind, step.round) not in known]
    # Ways whose store cannot be filled have a row with the error, and no warm boots.
    failed = {record.way for record in done if record.kind == NEXT and record.boot is None}
    for step, is_recorded in in_order(plan, left, failed):
        remaining_s = begun + limit_s - time.monotonic()
        if remaining_s < _LEAST_S:
            print(f"no further boot: {limit_s:g} s are nearly over", flush=True)
            return
        record = plan.run(step, min(plan.timeout_s, remaining_s))
        print(describe(record), flush=True)
        if record.boot is None and time.monotonic() - begun >= limit_s:
            return  # it did not fail: the time of this call was over
        if step.fills and record.boot is None:
            failed.add(step.way.name)
        if is_recorded:
            yield record


def in_order(plan: Plan, left: Sequence[Step], failed: set[str]) -> Iterator[tuple[Step, bool]]:
    """The steps, and whether they are recorded. An eager boot before them fills the page cache; in a new folder, such
    as on a new machine, a cold one also has Python write the bytecode of torch's compiler. A boot whose store is not
    there comes after the boot that makes it."""
    if left and (plan.work / plan.name).exists():
        yield Step(BY_NAME[EAGER], WARM, 0), False
    elif left:
        yield Step(BY_NAME["block"], COLD, 0), False
    for step in left:
        if step.kind == NEXT and not plan.store(step.way).exists():
            yield Step(step.way, COLD, step.round, killed_after=_killed_after(step.round)), True
        if step.kind == WARM and step.way.keeps and not plan.filled(step.way).exists():
            if step.way.name not in failed:
                yield Step(step.way, NEXT, 0, fills=True), False
            if not plan.filled(step.way).exists():
                continue
        yield step, True


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder; a demo model if not given")
    parser.add_argument("--text", action="store_true", help="it is a language model")
    parser.add_argument("--sizes", default="64x64,96x64", help="of pictures: the one that is drawn, and a new one")
    parser.add_argument(
        "--prompt", type=int, default=128, help="tokens of a prompt of random words; twice for a new size"
    )
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens of an answer")
    parser.add_argument("--ways", default=",".join(way.name for way in WAYS), help="which ways, in this order")
    parser.add_argument("--work", type=Path, help="folder of stores, cache directories and logs")
    parser.add_argument("--out", type=Path, required=True, help="file to which each boot is added as a JSON line")
    parser.add_argument("--cold", type=int, default=2, help="cold boots of each way, and as many after them")
    parser.add_argument("--warm", type=int, default=5, help="warm boots of each way")
    parser.add_argument("--new", type=int, default=1, help="rounds that ask for a new size")
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
    if not args.tables:
        plan = Plan(Model.of(args, args.sizes.partition(",")[0]), args.work.resolve(), args.requests, args.timeout)
        plan.work.mkdir(parents=True, exist_ok=True)
        ways = [BY_NAME[name] for name in args.ways.split(",") if BY_NAME[name].suits_text or not args.text]
        wanted = list(steps(ways, args.cold, args.warm, args.new))
        for record in run(plan, wanted, read_records([args.out]), args.limit_s):
            with args.out.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
    records = read_records([args.out])
    print(f"\n{tables(records)}")
    if args.svg:
        from peer_plot import plot

        plot(records, args.svg)


if __name__ == "__main__":
    main()
