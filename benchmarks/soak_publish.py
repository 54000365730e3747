"""Processes that publish overlapping sets of artifacts at once under one key, while some are killed.

    python benchmarks/soak_publish.py --rounds 200 --processes 32 --seed 0 --store local
    python benchmarks/soak_publish.py --calm --rounds 3 --store s3

Each process is a container with a cache directory of its own: it restores, writes what a compile would, with bytes
and file names of its own under logical keys that all share, publishes through a `Publisher`, and does so again. Some
publish as containers do that are told to stop, without waiting for their turn; some merge, whatever others do. Some get
SIGKILL, at a random moment or around a chosen request to the store, and some stall there.

After each round a new container must restore every logical key that any publish that finished had, with the right
content, and every pack listed must verify. Exits with 1 if anything is missing or wrong, or if less than half of the
publishes finish.

With `--calm`, nothing of that goes wrong: the processes of a round are a fleet that boots at once, and most of what
they compile is the same. Exits with 1 too if more than five packs are left, or if more than three times what they
compiled together was uploaded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from containers import (
    Artifact,
    CountingStore,
    compile_missing,
    damaged,
    files_in,
    graph,
    open_cache,
    packs_below,
    restored_keys,
    s3_server,
)
from table import markdown, spread

from compile_cache.errors import StoreError
from compile_cache.lifecycle import publisher
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.settings import Settings
from compile_cache.storage.directory import logical_key
from compile_cache.storage.stores.base import ObjectStore, open_url
from compile_cache.storage.stores.local import LocalStore

LEAST_FINISHED = 0.5
MOST_PACKS_LEFT, MOST_UPLOADED = 5, 3.0  # of a calm round
# A publisher's pace, so that a round takes some seconds. In a fleet no prediction is disturbed by a merge.
PACE = {"_POLL_S": 0.05, "_RETRY_S": 0.5, "_SPREAD_S": 0.2, "_MERGE_AFTER_S": 0.2}
CALM_PACE = {"_MERGE_AFTER_S": 1.0}
_CALM_COMPILE_S = 5.0  # at most
PATIENCE_S, CALM_PATIENCE_S = 60.0, 600.0
_GRAPHS = 20
_GRAPH_BYTES = (2 << 10, 8 << 10, 8 << 10, 16 << 10, 64 << 10, 200 << 10)
_NEW_GRAPH_BYTES = (2 << 10, 4 << 10, 16 << 10)
_NEW_ARTIFACTS = 3
# Kinds of calls to the store, and how many moments, just before or just after one, a process may have of each.
_CALLS = {"any": 40, "list": 4, "put pack": 2, "read pack": 12, "delete pack": 4}
_KILLED = 0.6  # a third of them: the others end before their moment
_STALLED = 0.2
_MERGES = 0.4
_STALL_S = (0.1, 0.8)
_MOST_LINES = 50
_FORK = get_context("fork")


@dataclass(frozen=True, slots=True)
class Moment:
    """The `number`th that is just before or just after such a call to the store."""

    calls: str
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one process does once. One that `merges` does so whatever others do, and whatever its publisher decides."""

    seed: int
    artifacts: tuple[Artifact, ...]
    is_stopped: bool = False
    merges: bool = False
    death: Moment | None = None
    stall: Moment | None = None
    stall_s: float = 0.0
    killed_after: float | None = None  # of the time that the round before took
    is_calm: bool = False


def make_turn(seed: int, round_number: int, number: int, is_calm: bool = False) -> Turn:
    """What process `number` does: some of the artifacts of all rounds, and some of this round's own."""
    chance = random.Random(f"{seed} {round_number} {number}")
    size_bytes = random.Random(round_number).choice(_NEW_GRAPH_BYTES)
    new = graph(f"{seed} round {round_number}", size_bytes)[:_NEW_ARTIFACTS]
    base = [a for n in range(_GRAPHS) for a in graph(f"graph {n}", random.Random(n).choice(_GRAPH_BYTES))]
    chosen = (*chance.sample(base, 10), *chance.sample(new, chance.randint(1, 2)))
    if is_calm:
        return Turn(chance.getrandbits(64), (*base, *chosen[-1:]), is_calm=True)
    is_killed, at_once = chance.random() < _KILLED, chance.random() < 0.3
    merges, stalls = chance.random() < _MERGES, chance.random() < _STALLED
    stall = make_moment(chance) if stalls else None
    if merges and chance.random() < 0.5:
        stall = Moment("delete pack", chance.randint(1, _CALLS["delete pack"]))
    return Turn(
        chance.getrandbits(64),
        chosen,
        is_stopped=chance.random() < 0.25,
        merges=merges,
        death=make_moment(chance) if is_killed and not at_once else None,
        stall=stall,
        stall_s=chance.uniform(*_STALL_S),
        killed_after=chance.random() if is_killed and at_once else None,
    )


def make_moment(chance: random.Random) -> Moment:
    """Any that a process may have."""
    calls = chance.choice(sorted(_CALLS))
    return Moment(calls, chance.randint(1, _CALLS[calls]))


class MortalStore(CountingStore):
    """Another store, in a process that stalls and dies when its turn says so."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._turn: Turn | None = None
        self._passed: Counter[str] = Counter()

    def begin(self, turn: Turn | None) -> None:
        """What is asked from now on belongs to `turn`."""
        self._turn = turn
        self._passed.clear()

    @contextmanager
    def watch(self, method: str, name: str, content: Path | bytes = b"") -> Iterator[None]:
        """Mortal before and after the call."""
        kinds = ("any", method, f"{method} {name.rpartition('.')[2]}")
        self._pass(kinds)
        with super().watch(method, name, content):
            yield
        self._pass(kinds)

    def _pass(self, kinds: Sequence[str]) -> None:
        if self._turn is None:
            return
        self._passed.update(kinds)
        now = [Moment(kind, self._passed[kind]) for kind in kinds]
        if self._turn.death in now:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._turn.stall in now:
            time.sleep(self._turn.stall_s)


class Container:
    """What lives in one process. It tells what happens in the lines of a file: `booted`, `incomplete` (that boot did
    without a pack), `publishing`, `finished` with its logical keys, `merged`, `failed` (the store's fault), `wrong` (a
    violation), and in the end `ended` with the bytes that it uploaded."""

    def __init__(self, url: str, root: Path) -> None:
        self._store = MortalStore(open_url(url))
        self._told = root.with_suffix(".jsonl")
        self._cache = open_cache(self._store, root)

    def live(self, turns: Sequence[Turn]) -> None:
        """Boot in the first turn, publish in all, and end."""
        for name, value in (CALM_PACE if turns[0].is_calm else PACE).items():
            assert hasattr(publisher, name), name
            setattr(publisher, name, value)
        try:
            self._store.begin(turns[0])
            self._boot()
            for turn in turns:
                self._store.begin(turn)
                self._publish(turn)
        except StoreError as error:
            self._say("failed", text=f"{type(error).__name__}: {error}")
        except Exception:
            self._say("wrong", text=traceback.format_exc())
        self._say("ended", uploaded_bytes=self._store.uploaded_bytes)
        os._exit(0)  # publishers have registered exit hooks, and have nothing left

    def _say(self, kind: str, keys: Iterable[str] = (), text: str = "", uploaded_bytes: int = 0) -> None:
        told = {"kind": kind, "keys": sorted(keys), "text": text, "uploaded_bytes": uploaded_bytes}
        with self._told.open("a") as file:
            file.write(json.dumps(told) + "\n")

    def _boot(self) -> None:
        refused = self._cache.restore().refused
        self._say("booted")
        for pack in refused:
            self._say("incomplete" if not pack.is_final else "wrong", text=f"{pack.name} is refused: {pack.reason}")

    def _publish(self, turn: Turn) -> None:
        folder, chance = self._cache.directory.path, random.Random(turn.seed)
        time.sleep(chance.uniform(0.0, _CALM_COMPILE_S) if turn.is_calm else 0.0)
        compile_missing(folder, turn.artifacts, turn.seed)
        self._cache.hand_over()
        keys = {logical_key(path) for path in files_in(folder)}
        self._say("publishing")
        boot = BootReport()
        report = boot.publish
        running = publisher.Publisher(self._cache.publication, boot, Settings(exit_budget_s=PATIENCE_S))
        running.start()
        if not turn.is_stopped:
            if running.wait(PATIENCE_S) and not report.failures:
                self._say("finished", keys)
            # A merge that it has begun is stopped at some moment, but for that of a calm turn.
            time.sleep(2.0 if turn.is_calm else chance.uniform(0.0, 0.5))
        running.flush()
        for failure in report.failures:
            self._say("failed", text=failure)
        if turn.is_stopped and running.wait(0.0) and not report.failures:
            self._say("finished", keys)
        if report.merged_packs:
            self._say("merged")
        for _ in range(2 if turn.merges else 0):  # the second finds packs that others are deleting
            if self._cache.publication.merge("a process"):
                self._say("merged")


@dataclass
class Round:
    """One round's figures: what its processes told, and how often; the packs that it left."""

    number: int
    told: Counter[str] = field(default_factory=Counter)
    packs: int = 0
    uploaded_bytes: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


class Soak:
    """All rounds over one store, and what has been promised so far."""

    def __init__(self, url: str, processes: int, seed: int, folder: Path, is_calm: bool = False) -> None:
        self._url = url
        self._processes = processes
        self._seed = seed
        self._folder = folder
        self._is_calm = is_calm
        self._last_s = 0.5
        self.promised: set[str] = set()

    def run_round(self, number: int) -> Round:
        """One round, and the check after it."""
        done, started_s = Round(number), time.monotonic()
        running = [self._start(number, process) for process in range(self._processes)]
        timers = [
            threading.Timer(turn.killed_after * self._last_s, child.kill)
            for child, turn, _ in running
            if turn.killed_after is not None
        ]
        for timer in timers:
            timer.start()
        deadline_s = started_s + (CALM_PATIENCE_S if self._is_calm else PATIENCE_S)
        for child, _, root in running:
            child.join(max(0.0, deadline_s - time.monotonic()))
            if child.is_alive():
                done.violations.append(f"{root.name} is not done")
                child.kill()
                child.join()
            done.told["killed"] += child.exitcode == -signal.SIGKILL
            self._hear(done, root.with_suffix(".jsonl"))
            shutil.rmtree(root, ignore_errors=True)
        for timer in timers:
            timer.cancel()
        done.seconds = self._last_s = time.monotonic() - started_s
        if self._is_calm:
            self._check_calm(done)
        self.check(done)
        return done

    def _start(self, number: int, process: int) -> tuple[ForkProcess, Turn, Path]:
        """Start a process that has one turn or two. What it dies of comes in the last one."""
        root = self._folder / f"round {number}" / f"process {process}"
        root.parent.mkdir(exist_ok=True)
        turn = make_turn(self._seed, number, process, self._is_calm)
        turns = [turn]
        if not self._is_calm and process % 2:
            turns.insert(0, Turn(turn.seed + 1, turn.artifacts[::2]))
        child = _FORK.Process(target=lambda: Container(self._url, root).live(turns), daemon=True)
        child.start()
        return child, turn, root

    def _hear(self, done: Round, file: Path) -> None:
        for line in file.read_text().splitlines() if file.exists() else ():
            with suppress(json.JSONDecodeError):  # it was killed while it wrote
                event = json.loads(line)
                done.told[event["kind"]] += 1
                done.uploaded_bytes += event["uploaded_bytes"]
                self.promised |= set(event["keys"])
                done.violations += [event["text"]] * (event["kind"] == "wrong")

    def check(self, done: Round) -> None:
        """What the next container restores, and every pack by itself."""
        store, root = open_url(self._url), self._folder / "next"
        shutil.rmtree(root, ignore_errors=True)
        keys, problems = restored_keys(store, root)
        done.violations += problems
        done.violations += [f"{key} was published, and cannot be restored" for key in sorted(self.promised - keys)]
        done.violations += damaged(store, packs_below(store))
        done.packs = len(packs_below(store))

    def _check_calm(self, done: Round) -> None:
        """What a fleet left, once the next container has merged it, and what it uploaded."""
        store = open_url(self._url)
        following = open_cache(store, self._folder / "following")
        following.restore()
        following.publication.merge("the next container")
        turns = (make_turn(self._seed, done.number, process, True) for process in range(self._processes))
        alone = open_cache(LocalStore(self._folder / "nothing"), self._folder / "alone")
        compile_missing(alone.directory.path, {artifact for turn in turns for artifact in turn.artifacts}, 0)
        uploaded = done.uploaded_bytes / sum(pack.stored_bytes for pack in alone.stage())
        if len(packs_below(store)) > MOST_PACKS_LEFT or uploaded > MOST_UPLOADED:
            done.violations.append(f"{len(packs_below(store))} packs are left, and {uploaded:.2f} caches were uploaded")


def violations(results: Sequence[Round], seed: int) -> list[str]:
    """All that is not as it should be, a line each."""
    found = [f"seed {seed}, round {done.number}: {line}" for done in results for line in done.violations]
    published, finished = (sum(done.told[name] for done in results) for name in ("publishing", "finished"))
    if finished < LEAST_FINISHED * published or not finished:
        found.append(f"seed {seed}: of {published} publishes only {finished} finished")
    return found


def table(results: Sequence[Round], store: str) -> str:
    """The sums of all rounds."""
    told = ("publishing", "finished", "killed", "merged")
    sums = [sum(done.told[name] for done in results) for name in told]
    packs, wrong = spread([done.packs for done in results], 0), sum(len(done.violations) for done in results)
    header = ("store", "rounds", *told, "packs left", "violations")
    return markdown(header, [[store, len(results), *sums, packs, wrong]])


def main() -> int:
    """Run all rounds, each printed as a line of JSON; the exit code. The first round with a violation is the last, so
    that the store can be looked at as it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    parser.add_argument("--calm", action="store_true", help="nothing goes wrong")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-publish-"))
    is_local = arguments.store == "local"
    results: list[Round] = []
    with nullcontext() if is_local else s3_server("soak"):
        url = str(folder / "store") if is_local else "s3://soak/cache"
        soak = Soak(url, arguments.processes, arguments.seed, folder, arguments.calm)
        while len(results) < arguments.rounds and not (results and results[-1].violations):
            results.append(soak.run_round(len(results)))
            print(json.dumps(vars(results[-1])), flush=True)
    print(table(results, arguments.store))
    found = violations(results, arguments.seed)
    print("\n".join([*found[:_MOST_LINES], f"{len(found)} violations"]))
    if found:
        print(f"kept for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
