"""Processes that publish overlapping sets of artifacts at once under one key, while some are killed.

    python benchmarks/soak_publish.py --rounds 200 --processes 32 --seed 0 --store local

Each process is a container with a cache directory of its own: it restores, writes what a compile would, with bytes
and file names of its own under logical keys that all share, and publishes through a `Publisher`. It lives on over
rounds, or boots anew. Some publish as containers do that are told to stop, without waiting for their turn; some
merge, whatever others do. Some get SIGKILL, at a random moment or around a chosen request to the store, and
some stall there.

After each round a new container must restore every logical key that any publish that finished had, with the right
content, and every pack listed must verify. Exits with 1 if anything is missing or wrong, or if less than half of the
publishes finish.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from containers import Artifact, graph, packs_in, restored_keys, s3_server
from mortal_container import PATIENCE_S, Event, Moment, Turn, serve
from table import markdown, spread

from compile_cache.errors import PackError, StoreError
from compile_cache.storage.rules import Rules
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.verify import verify_pack

LEAST_FINISHED = 0.5
_GRAPHS = 20
_GRAPH_BYTES = (2 << 10, 8 << 10, 8 << 10, 16 << 10, 64 << 10, 200 << 10)
_NEW_GRAPH_BYTES = (2 << 10, 4 << 10, 16 << 10)
_NEW_ARTIFACTS = 3
# Kinds of calls to the store, and how many moments, just before or just after one, a process may have of each.
_CALLS = {"any": 40, "list": 4, "put pack": 2, "read pack": 12, "delete pack": 4}
_KILLED = 0.4
_STALLED = 0.2
_MERGES = 0.4
_STALL_S = (0.1, 0.8)
_MOST_LINES = 50
_FORK = get_context("fork")


@dataclass(slots=True)
class Round:
    """One round's figures. `packs` are what it left, `incomplete` those restores that did without packs that vanished
    while they read, `failures` what the store refused."""

    number: int
    published: int = 0
    finished: int = 0
    killed: int = 0
    packs: int = 0
    merges: int = 0
    boots: int = 0
    incomplete: int = 0
    failures: int = 0
    keys: int = 0
    seconds: float = 0.0
    check_s: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Worker:
    """The parent's side of a process."""

    process: ForkProcess
    connection: Connection
    root: Path

    def kill(self) -> None:
        """End it as the kernel does when memory is short."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        shutil.rmtree(self.root, ignore_errors=True)


def base_artifacts() -> list[Artifact]:
    """What processes compile in any round."""
    return [a for n in range(_GRAPHS) for a in graph(f"graph {n}", random.Random(n).choice(_GRAPH_BYTES))]


def make_turn(seed: int, round_number: int, number: int) -> Turn:
    """What process `number` does: some of the artifacts of all rounds, and some of this round's own."""
    chance = random.Random(f"{seed} {round_number} {number}")
    size_bytes = random.Random(round_number).choice(_NEW_GRAPH_BYTES)
    new = graph(f"{seed} round {round_number}", size_bytes)[:_NEW_ARTIFACTS]
    chosen = [*chance.sample(base_artifacts(), 10), *chance.sample(new, chance.randint(1, 2))]
    death, killed_after = None, None
    if chance.random() < _KILLED:
        if chance.random() < 0.3:
            killed_after = chance.random()
        else:
            death = make_moment(chance)
    merges = chance.random() < _MERGES
    stall = make_moment(chance) if chance.random() < _STALLED else None
    if merges and chance.random() < 0.5:
        stall = Moment("delete pack", chance.randint(1, _CALLS["delete pack"]))
    return Turn(
        number,
        round_number,
        chance.getrandbits(64),
        tuple(chosen),
        boots=chance.random() < 0.2,
        is_stopped=chance.random() < 0.25,
        merges=merges,
        death=death,
        stall=stall,
        stall_s=chance.uniform(*_STALL_S),
        killed_after=killed_after,
    )


def make_moment(chance: random.Random) -> Moment:
    """Any that a process may have."""
    calls = chance.choice(sorted(_CALLS))
    return Moment(calls, chance.randint(1, _CALLS[calls]))


class Soak:
    """All rounds over one store, and what has been promised so far."""

    def __init__(self, url: str, processes: int, seed: int, folder: Path) -> None:
        self._url = url
        self._processes = processes
        self._seed = seed
        self._folder = folder
        self._workers: dict[int, Worker] = {}
        self._forked = 0
        self._last_s = 0.5
        self.promised: set[str] = set()
        self.failures: Counter[str] = Counter()

    def run_round(self, number: int) -> Round:
        """One round, and the check after it."""
        done = Round(number)
        started_s = time.monotonic()
        kill_at_s: dict[int, float] = {}
        for process in range(self._processes):
            turn = make_turn(self._seed, number, process)
            if process not in self._workers:
                self._workers[process] = self._fork()
            self._workers[process].connection.send(turn)
            if turn.killed_after is not None:
                kill_at_s[process] = started_s + turn.killed_after * self._last_s
        self._follow(done, kill_at_s, started_s + PATIENCE_S)
        done.seconds = self._last_s = time.monotonic() - started_s
        self.check(done)
        done.keys = len(self.promised)
        done.check_s = time.monotonic() - started_s - done.seconds
        return done

    def _fork(self) -> Worker:
        self._forked += 1
        root = self._folder / f"process {self._forked}"
        ours, theirs = _FORK.Pipe()
        process = _FORK.Process(target=serve, args=(self._url, root, theirs), daemon=True)
        process.start()
        theirs.close()  # or later processes would keep it open, and nobody would see this one die
        return Worker(process, ours, root)

    def _follow(self, done: Round, kill_at_s: dict[int, float], deadline_s: float) -> None:
        """Hear all processes until they are done or dead, and kill those that are due."""
        active = {worker.connection: process for process, worker in self._workers.items()}
        doomed: set[int] = set()  # they may have said that they are done just before

        def bury(connection: Connection) -> None:
            process = active.pop(connection)
            kill_at_s.pop(process, None)
            self._workers.pop(process).kill()
            done.killed += 1

        while active:
            now_s = time.monotonic()
            for process in [process for process, at_s in kill_at_s.items() if at_s <= now_s]:
                self._workers[process].process.kill()
                doomed.add(process)
                del kill_at_s[process]
            if now_s > deadline_s:
                done.violations += [f"process {process} is not done" for process in active.values()]
                for connection in list(active):
                    bury(connection)
                return
            due_s = min([deadline_s, *kill_at_s.values()])
            for connection in wait(list(active), max(0.0, due_s - now_s)):
                assert isinstance(connection, Connection)
                try:
                    event = connection.recv()
                except (EOFError, OSError):
                    bury(connection)
                    continue
                if event.kind == "done" and active[connection] not in doomed:
                    kill_at_s.pop(active.pop(connection), None)
                self._note(done, event)

    def _note(self, done: Round, event: Event) -> None:
        done.published += event.kind == "publishing"
        done.finished += event.kind == "finished"
        done.merges += event.kind == "merged"
        done.boots += event.kind == "booted"
        done.incomplete += event.kind == "incomplete"
        done.failures += event.kind == "failed"
        if event.kind == "failed":
            self.failures[event.text.partition("/")[0]] += 1
        if event.kind == "finished":
            self.promised |= event.keys
        if event.kind == "wrong":
            done.violations.append(event.text)

    def check(self, done: Round) -> None:
        """What the next container restores, and every pack by itself."""
        store = open_url(self._url)
        root = self._folder / "next"
        shutil.rmtree(root, ignore_errors=True)
        keys, problems = restored_keys(store, root)
        done.violations += problems
        done.violations += [f"{key} was published, and cannot be restored" for key in sorted(self.promised - keys)]
        packs = packs_in(store)
        done.packs = len(packs)
        for entry in packs:
            try:
                verify_pack(store, entry.name, entry.size_bytes, Rules())
            except (PackError, StoreError) as error:
                done.violations.append(f"{entry.name} does not verify: {error}")

    def close(self) -> None:
        """End the processes that still live."""
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()


def soak(rounds: int, processes: int, seed: int, url: str, folder: Path) -> tuple[list[Round], Mapping[str, int]]:
    """Run it, each round printed as a line of JSON. It ends with the first round that has a violation, so that the
    store can be looked at as it was."""
    results: list[Round] = []
    running = Soak(url, processes, seed, folder)
    try:
        for number in range(rounds):
            results.append(running.run_round(number))
            print(json.dumps(asdict(results[-1])), flush=True)
            if results[-1].violations:
                break
    finally:
        running.close()
    return results, running.failures


def violations(results: Sequence[Round], seed: int) -> list[str]:
    """All that is not as it should be, a line each."""
    found = [f"seed {seed}, round {done.number}: {line}" for done in results for line in done.violations]
    published, finished = sum(done.published for done in results), sum(done.finished for done in results)
    if finished < LEAST_FINISHED * published or not finished:
        found.append(f"seed {seed}: of {published} publishes only {finished} finished")
    return found


def table(results: Sequence[Round], store: str, processes: int, seed: int) -> str:
    """The sums of all rounds."""
    columns = ("published", "finished", "killed", "boots", "incomplete", "merges", "failures")
    header = ["store", "rounds", "processes", "seed", *columns, "logical keys", "packs left", "violations", "round, s"]
    row = [
        store,
        len(results),
        processes,
        seed,
        *(sum(getattr(done, column) for done in results) for column in columns),
        results[-1].keys,
        spread([done.packs for done in results], 0),
        sum(len(done.violations) for done in results),
        spread([done.seconds for done in results], 1),
    ]
    return markdown(header, [row])


def main() -> int:
    """Run all rounds; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--processes", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("local", "s3"), default="local")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-publish-"))
    shape = (arguments.rounds, arguments.processes, arguments.seed)
    if arguments.store == "local":
        results, failures = soak(*shape, str(folder / "store"), folder)
    else:
        with s3_server("soak"):
            results, failures = soak(*shape, "s3://soak/cache", folder)
    print(table(results, arguments.store, arguments.processes, arguments.seed))
    for text, count in failures.items():
        print(f"{count} × {text}")
    found = violations(results, arguments.seed)
    if found:
        print("\n".join(found[:_MOST_LINES]))
        print(f"{len(found)} violations")
        print(f"kept for a look: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
