"""A container that is stopped with packs staged: what has reached the store within the 3 s that `cog run` allows?

    python benchmarks/exit_flush.py --rounds 3

A process in a PID namespace under tini stages what it has compiled after READY, and is stopped before it would publish:
SIGTERM, and SIGKILL 3 s later, as `docker stop -t 3` does. It publishes to a real S3 protocol server (moto), 16 MB
directly, and 400 MB through a link of 80 Mbit/s, which takes forty seconds. Needs Linux, root and tini.

Exits with 1 unless all of the 16 MB is stored; of the 400 MB something is, graph entries before anything else; and each
pack that is listed verifies.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from containers import open_cache, packs_in
from exit import BAR_S, CREDENTIALS, NAMESPACE, s3_server
from link import limited_link
from table import markdown, spread

from compile_cache.store.opening import open_url
from compile_cache.versions.rules import Rules
from compile_cache.versions.verify import verify_pack

EXIT_BUDGET_S = 7.0
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Stopped:
    """What one stop left behind. Graph entries are what saves the most."""

    seconds: float
    was_killed: bool
    stored_bytes: int
    graphs: int
    others: int
    problems: tuple[str, ...] = ()


def run_child(store: str, endpoint_url: str, folder: Path, graphs_mb: int, others_mb: int) -> None:
    """Stage, say so, and wait to be stopped."""
    from compile_cache.lifecycle import publish as publisher
    from compile_cache.lifecycle.report import BootReport
    from compile_cache.regions.counters import CompileCounts
    from compile_cache.settings import Settings

    compiled = CompileCounts()
    publisher.read_counts = lambda: CompileCounts(compiled.graphs)
    cache, directory = open_cache(open_url(store, endpoint_url), folder)
    publishing = publisher.Publisher(cache, BootReport(), Settings(exit_budget_s=EXIT_BUDGET_S, most_packs=0))
    publishing.start()
    publishing.wait(60)
    for number in range(graphs_mb):
        write(directory.path / f"fxgraph/ab/fgraph{number}/entry")
    for number in range(others_mb):
        write(directory.path / f"triton/HASH{number}/kernel.cubin")
    compiled.graphs += 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while not publishing._staged:
        time.sleep(0.02)
    print("STAGED", flush=True)
    while True:
        signal.pause()


def write(path: Path) -> None:
    """A megabyte that cannot be compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(_MB))


def stop(wrapper: Sequence[str], endpoint_url: str, inside_url: str, graphs_mb: int, others_mb: int) -> Stopped:
    """Start a container, stop it when it has staged, and look at what is stored. `inside_url` is how it sees the
    server that is `endpoint_url` here."""
    import boto3

    bucket = f"bucket-{time.time_ns()}"
    boto3.client("s3", endpoint_url=endpoint_url).create_bucket(Bucket=bucket)
    with tempfile.TemporaryDirectory() as folder:
        child = [sys.executable, __file__, "--child", f"s3://{bucket}/cache", inside_url, folder]
        command = [*wrapper, *NAMESPACE, *child, str(graphs_mb), str(others_mb)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if process.stdout.readline() != "STAGED\n":
                raise SystemExit(f"the container ended with {process.wait()}")
            tini = tini_of(process.pid)
            started = time.perf_counter()
            os.kill(tini, signal.SIGTERM)
            try:
                process.wait(BAR_S)
            except subprocess.TimeoutExpired:
                os.kill(tini, signal.SIGKILL)
            was_killed = process.wait() != 0
            seconds = time.perf_counter() - started
        return look(f"s3://{bucket}/cache", endpoint_url, Path(folder, "next"), seconds, was_killed)


def tini_of(pid: int) -> int:
    """The first process of the namespace below `pid`, from here."""
    while True:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if Path(f"/proc/{child}/comm").read_text() == "tini\n":
                return int(child)
            pid = int(child)


def look(store_url: str, endpoint_url: str, folder: Path, seconds: float, was_killed: bool) -> Stopped:
    """What the next container finds."""
    store = open_url(store_url, endpoint_url)
    problems = []
    for entry in packs_in(store):
        try:
            verify_pack(store, entry.name, entry.size_bytes, Rules())
        except Exception as error:
            problems.append(f"{entry.name}: {error}")
    cache, _ = open_cache(store, folder)
    paths = cache.fetch().files
    graphs = sum(path.startswith("fxgraph/") for path in paths)
    stored_bytes = sum(entry.size_bytes for entry in packs_in(store))
    return Stopped(seconds, was_killed, stored_bytes, graphs, len(paths) - graphs, tuple(problems))


def small(rounds: int) -> list[Stopped]:
    """16 MB, a quarter of it graph entries, to a server on the same machine."""
    with s3_server() as url:
        return [stop((), url, url, 4, 12) for _ in range(rounds)]


def large(rounds: int) -> list[Stopped]:
    """400 MB, 12 of it graph entries, over a link that carries 10 MB a second."""
    with limited_link("80mbit") as link, s3_server(link.server) as url:
        return [stop(link.wrapper, url, url, 12, 388) for _ in range(rounds)]


def main() -> int:
    """Stop containers, look, print; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    if arguments.child:
        store, endpoint_url, folder, graphs_mb, others_mb = arguments.child
        run_child(store, endpoint_url, Path(folder), int(graphs_mb), int(others_mb))
    results = {"16 MB": small(arguments.rounds), "400 MB, 80 Mbit/s": large(arguments.rounds)}
    header = ("staged", "n", "SIGTERM to gone, s", "killed", "stored, MB", "graph entries", "other files")
    rows = [
        (
            name,
            len(stops),
            spread([one.seconds for one in stops]),
            sum(one.was_killed for one in stops),
            spread([one.stored_bytes / _MB for one in stops], 1),
            spread([one.graphs for one in stops], 0),
            spread([one.others for one in stops], 0),
        )
        for name, stops in results.items()
    ]
    print(markdown(header, rows))
    problems = [problem for stops in results.values() for one in stops for problem in one.problems]
    print("\n".join(problems))
    is_complete = all((one.graphs, one.others) == (4, 12) for one in results["16 MB"])
    is_ordered = all(one.graphs and (one.graphs == 12 or not one.others) for one in results["400 MB, 80 Mbit/s"])
    return 0 if is_complete and is_ordered and not problems else 1


if __name__ == "__main__":
    sys.exit(main())
