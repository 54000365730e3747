"""A fleet of containers that start cold within seconds of one another: what reaches the store, and what it costs.

    python benchmarks/soak_fleet.py

Each simulated container has a cache directory and a `Publisher` of its own, and writes the artifacts that a compile
would, with bytes and file names of its own under logical keys that all share. In the fleet `same` all compile the same;
in `mixed` each has compiled one of eight further graphs as well, so that there is something to merge. Exits with 1
unless at most five packs are left, what was uploaded is at most three times one cache, and everything can be restored.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from containers import (
    Artifact,
    CountingStore,
    Counts,
    compile_missing,
    graph,
    open_cache,
    packs_in,
    restored_keys,
    s3_server,
)
from table import markdown

from compile_cache.errors import StoreError
from compile_cache.lifecycle import publisher as publish
from compile_cache.lifecycle.boot_report import BootReport, PublishReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.stores.base import open_url
from compile_cache.storage.stores.local import LocalStore

MOST_PACKS_LEFT = 5
MOST_CACHES_UPLOADED = 3.0
_GRAPHS = 7
_VARIANTS = 8
_EXIT_BUDGET_S = 7.0
# There are no predictions that it could disturb.
_MERGE_AFTER_S = 1.0
# A publisher that is idle may still merge; one that failed tries again after at most 45 s.
_QUIET_S, _QUIET_AFTER_FAILURES_S = 3.0, 50.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Containers in processes, each started at a random moment of the first `within_s` seconds."""

    name: str
    containers: int
    processes: int
    store: str
    is_mixed: bool = False
    graph_bytes: int = 128 << 10
    within_s: float = 5.0
    compile_s: float = 10.0
    seed: int = 0
    patience_s: float = 900.0

    def artifacts(self, number: int) -> list[Artifact]:
        """What container `number` compiles when nothing is restored."""
        names = [f"graph {n}" for n in range(_GRAPHS)]
        if self.is_mixed:
            names.append(f"variant {number % _VARIANTS}")
        return [artifact for name in names for artifact in graph(name, self.graph_bytes)]

    def all_artifacts(self) -> list[Artifact]:
        """What all of them compile together."""
        found = {a.key: a for number in range(_VARIANTS) for a in self.artifacts(number)}
        return list(found.values())


@dataclass(frozen=True, slots=True)
class FleetResult:
    """What one fleet left in the store and asked of it. `cache_bytes` are what all artifacts take, packed once."""

    name: str
    containers: int
    packs_left: int
    cache_bytes: int
    uploaded_bytes: int
    uploads: int
    uploaders: int
    merges: int
    idle_s: float
    requests: dict[str, int]
    failures: dict[str, int]
    problems: tuple[str, ...]

    @property
    def caches_uploaded(self) -> float:
        """Everything that was uploaded, in caches."""
        return self.uploaded_bytes / self.cache_bytes

    @property
    def is_good(self) -> bool:
        """Whether every bar was met."""
        few_packs = 1 <= self.packs_left <= MOST_PACKS_LEFT
        return few_packs and self.caches_uploaded <= MOST_CACHES_UPLOADED and not self.problems


def run_container(fleet: Fleet, number: int, store: CountingStore, folder: Path) -> tuple[Publisher, PublishReport]:
    """Boot one container up to READY; its publisher is at work afterwards."""
    chance = random.Random(f"{fleet.seed} {number}")
    time.sleep(chance.uniform(0.0, fleet.within_s))
    cache = open_cache(store, folder / str(number))
    try:
        cache.restore()
    except StoreError:  # as a boot whose restore failed: all is compiled
        cache = open_cache(store, folder / f"{number}-anew")
    time.sleep(fleet.compile_s * chance.uniform(0.8, 1.2))
    compile_missing(cache.directory.path, fleet.artifacts(number), chance.getrandbits(64))
    cache.hand_over()
    report = BootReport()
    publish._MERGE_AFTER_S = _MERGE_AFTER_S
    publisher = Publisher(cache.publication, report, Settings(exit_budget_s=_EXIT_BUDGET_S))
    publisher.start()
    return publisher, report.publish


def run_process(fleet: Fleet, numbers: Sequence[int]) -> dict[str, Any]:
    """Those containers of a fleet that run in this process, until all are idle."""
    started_s = time.time()
    store = CountingStore(open_url(fleet.store))
    running: list[tuple[Publisher, PublishReport]] = []
    with tempfile.TemporaryDirectory() as folder:

        def boot(number: int) -> None:
            running.append(run_container(fleet, number, store, Path(folder)))

        threads = [threading.Thread(target=boot, args=(number,), daemon=True) for number in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        is_idle = wait_until_idle(store, running, started_s + fleet.patience_s)
        for publisher, _ in running:
            publisher.flush()
    reports = [report for _, report in running]
    return {
        "booted": len(running),
        "is_idle": is_idle,
        "uploads": sum(report.packs for report in reports),
        "uploaders": sum(report.packs > 0 for report in reports),
        "merges": sum(report.merged_packs > 0 for report in reports),
        "requests": store.counts.requests,
        "uploaded_bytes": store.counts.uploaded_bytes,
        "failures": store.counts.failures,
        "last_s": store.counts.last_s,
        "started_s": started_s,
    }


def wait_until_idle(
    store: CountingStore, running: Sequence[tuple[Publisher, PublishReport]], deadline_s: float
) -> bool:
    """Until all publishers are idle, and nothing has been asked of the store for longer than they ever pause."""
    for publisher, _ in running:
        publisher.wait(max(0.0, deadline_s - time.time()))
    while time.time() < deadline_s:
        has_failed = any(report.failures for _, report in running)
        quiet_s = _QUIET_AFTER_FAILURES_S if has_failed else _QUIET_S
        are_idle = all(publisher.wait(0) for publisher, _ in running)
        if are_idle and time.time() - store.counts.last_s > quiet_s:
            return True
        time.sleep(0.1)
    return False


def run_fleet(fleet: Fleet) -> FleetResult:
    """Run a whole fleet, and look at what it left. The store must be empty."""
    command = [sys.executable, __file__, "--process", json.dumps(asdict(fleet))]
    children = [
        subprocess.Popen([*command, f"{first}"], stdout=subprocess.PIPE, env=os.environ)
        for first in range(fleet.processes)
    ]
    counts = Counts(last_s=0.0)
    totals: Counter[str] = Counter()
    problems = []
    started_s = float("inf")
    for child in children:
        output, _ = child.communicate()
        if child.returncode != 0:
            problems.append(f"a process of the fleet ended with {child.returncode}")
            continue
        done = json.loads(output.splitlines()[-1])
        started_s = min(started_s, done["started_s"])
        counts.add(
            Counts(
                Counter(done["requests"]), Counter(done["uploaded_bytes"]), Counter(done["failures"]), done["last_s"]
            )
        )
        totals += Counter({name: done[name] for name in ("booted", "uploads", "uploaders", "merges")})
        if not done["is_idle"]:
            problems.append(f"not idle after {fleet.patience_s:g} s")
    if totals["booted"] != fleet.containers:
        problems.append(f"{totals['booted']} of {fleet.containers} containers booted")
    store = open_url(fleet.store)
    with tempfile.TemporaryDirectory() as folder:
        keys, wrong = restored_keys(store, Path(folder))
        wanted = {artifact.key for artifact in fleet.all_artifacts()}
        problems += [*wrong, *(f"{key} cannot be restored" for key in sorted(wanted - keys))]
        cache_bytes = packed_bytes(fleet.all_artifacts(), Path(folder))
        following = open_cache(store, Path(folder, "following"))  # it has the files of all, and merges them
        following.restore()
        following.publication.merge("the next container")
    return FleetResult(
        fleet.name,
        fleet.containers,
        len(packs_in(store)),
        cache_bytes,
        sum(counts.uploaded_bytes.values()),
        totals["uploads"],
        totals["uploaders"],
        totals["merges"],
        counts.last_s - started_s,
        dict(counts.requests),
        dict(counts.failures),
        tuple(problems),
    )


def packed_bytes(artifacts: Sequence[Artifact], folder: Path) -> int:
    """What these artifacts take in a store when one container publishes them."""
    cache = open_cache(LocalStore(folder / "nothing"), folder / "one")
    compile_missing(cache.directory.path, artifacts, seed=0)
    return sum(pack.stored_bytes for pack in cache.stage())


def table(results: Sequence[FleetResult]) -> str:
    """The results, a line a fleet."""
    header = ["fleet", "containers", "one cache, MB", "uploaded, caches", "bar", "packs left", "bar"]
    header += ["uploads of packs", "by containers", "merges", "requests", "of a container", "idle after, s"]
    rows = [
        (
            result.name,
            result.containers,
            f"{result.cache_bytes / 1e6:.2f}",
            f"{result.caches_uploaded:.2f}",
            f"{MOST_CACHES_UPLOADED:g}",
            result.packs_left,
            MOST_PACKS_LEFT,
            result.uploads,
            result.uploaders,
            result.merges,
            (total := sum(result.requests.values())),
            f"{total / result.containers:.1f}",
            f"{result.idle_s:.0f}",
        )
        for result in results
    ]
    return markdown(header, rows)


def requests_table(results: Sequence[FleetResult]) -> str:
    """Requests by kind, a column a fleet."""
    kinds = sorted({kind for result in results for kind in result.requests})
    rows = [(kind, *(result.requests.get(kind, 0) for result in results)) for kind in kinds]
    return markdown(("request", *(result.name for result in results)), rows)


def main() -> int:
    """Run the fleets, print each as a line of JSON, and tables; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--containers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--within-s", type=float, default=5.0)
    parser.add_argument("--compile-s", type=float, default=10.0)
    parser.add_argument("--graph-bytes", type=int, default=128 << 10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fleet", choices=("same", "mixed"), action="append")
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process:
        fleet = Fleet(**json.loads(arguments.process[0]))
        print(json.dumps(run_process(fleet, range(int(arguments.process[1]), fleet.containers, fleet.processes))))
        return 0
    results = []
    names = arguments.fleet or ("same", "mixed")
    with s3_server(*names):
        for name in names:
            fleet = Fleet(
                name,
                arguments.containers,
                arguments.processes,
                f"s3://{name}/cache",
                name == "mixed",
                arguments.graph_bytes,
                arguments.within_s,
                arguments.compile_s,
                arguments.seed,
            )
            results.append(run_fleet(fleet))
            print(json.dumps(asdict(results[-1])), flush=True)
    print(table(results))
    print()
    print(requests_table(results))
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
