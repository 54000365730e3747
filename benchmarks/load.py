"""An eager server and a compiled one under load, in turn: how long does a user wait, and how many can be served?

    python benchmarks/load.py --model /tmp/flux1 --sizes 1024x1024 --filled /tmp/unseen --store /tmp/load

Both are Cog's server. It takes one prediction at a time and answers another request with 409, so requests wait in a
queue in front of it, first come, first served. In an open loop they arrive at random (Poisson), as often as the eager
server could answer a part of its time; in a closed loop there are so many users, each of whom asks again when answered.
Both servers get the same arrivals. A request's time counts from its arrival. Writes a plot. Exits with 1 if a check
fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from boot import conclude
from cold_start_table import percentile
from fresh_boot import PROMPT, ROOT, SEED, boot_environment, end, new_log, prepare
from load_plot import Line, plot
from table import markdown

sys.path.append(str(ROOT / "demo"))

from cog_server import CogServer

KINDS = ("eager", "compiled")
_PERCENTS = (50, 90, 99)
_RETRY_S = 0.002
_PROBES = 5


@dataclass(frozen=True, slots=True)
class Load:
    """An open loop in which the eager server is busy for this part of the time, or a closed one with so many users."""

    part: float = 0.0
    users: int = 0

    @property
    def name(self) -> str:
        """For the table."""
        return f"closed, {self.users} users" if self.users else f"open, {self.part:.0%} of eager"


@dataclass(frozen=True, slots=True)
class Segment:
    """One server under one load: each request's seconds from its arrival and from its turn to its answer, and seconds
    of everything. `served` are the steps that served the requests."""

    kind: str
    load: str
    rate: float
    seconds: list[float]
    service_s: list[float]
    total_s: float
    served: list[str]

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return len(self.seconds) / self.total_s


@dataclass(frozen=True, slots=True)
class Client:
    """Sends one request at a time to a server, which has `timeout_s` for its answer, and as long to take it."""

    server: CogServer
    inputs: dict[str, Any]
    timeout_s: float = 120.0

    def ask(self) -> dict[str, Any]:
        """One prediction. After an answer, the server says 409 for some milliseconds more.

        Raises:
            RuntimeError: it failed, or the server stays busy.
            OSError: the server does not answer.
        """
        deadline = time.monotonic() + self.timeout_s
        while (found := self.try_to_ask()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server was busy for {self.timeout_s:g} s")
            time.sleep(_RETRY_S)
        if found["status"] != "succeeded":
            raise RuntimeError(f"the prediction {found['status']}: {found.get('error')}")
        return found

    def try_to_ask(self) -> dict[str, Any] | None:
        """One prediction; None if the server is busy.

        Raises:
            OSError: the server says something else, or does not answer.
        """
        body = json.dumps({"input": self.inputs}).encode()
        request = urllib.request.Request(f"{self.server.url}/predictions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
            return None

    def is_refused_when_busy(self) -> bool:
        """Whether a request is refused while another one is served."""
        self.ask()
        time.sleep(0.2)
        self.server.predict_later(**self.inputs)
        return self.try_to_ask() is None


def arrivals(load: Load, service_s: float, count: int) -> Iterator[float]:
    """Seconds from the begin to each arrival of an open loop: the same each time. The mean of a few random gaps is far
    from what it should be, so they are stretched to have it."""
    rng = random.Random(SEED)
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    stretch = count * service_s / load.part / sum(gaps)
    return accumulate(gap * stretch for gap in gaps)


def run_segment(kind: str, client: Client, load: Load, eager_s: float, count: int) -> Segment:
    """One server under one load. A queue for one server needs no thread: the next in line is asked for when the one
    before has its answer."""
    begun = time.monotonic()
    coming = list(arrivals(load, eager_s, count)) if load.part else [0.0] * load.users
    seconds, service_s, served = list[float](), list[float](), set[str]()
    for number in range(count):
        time.sleep(max(0.0, begun + coming[number] - time.monotonic()))
        turn = time.monotonic()
        answer = client.ask()
        now = time.monotonic()
        seconds.append(now - begun - coming[number])
        service_s.append(now - turn)
        served |= set((answer["metrics"]["compile_cache"].get("served") or {"": "eager"}).values())
        if load.users:
            coming.append(now - begun)  # this user asks again
    total_s = time.monotonic() - begun
    return Segment(kind, load.name, load.part / eager_s, seconds, service_s, total_s, sorted(served))


@contextmanager
def servers(args: Any, work: Path) -> Iterator[dict[str, Client]]:
    """Both, READY; ended with the context."""
    inputs = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": args.steps, "output_format": "jpg"}
    with ExitStack() as stack:
        started = {}
        for kind in KINDS:
            sizes = {"IMAGE_SIZES": args.sizes, "WARM_UP_SIZES": args.sizes}
            filled = args.filled or work
            environ = {**boot_environment(filled, kind, filled / "store", "regional"), **sizes}
            environ |= {"MODEL": args.model, "HF_HUB_OFFLINE": "1"}
            server = CogServer("predict.py:Predictor", new_log(work, kind), environ)
            server.start()
            stack.callback(end, server.process)
            started[kind] = Client(server, inputs)
        for client in started.values():
            client.server.wait_ready(args.timeout)
        wait_precompiled(started["compiled"], args.timeout)
        yield started


def wait_precompiled(client: Client, timeout_s: float) -> None:
    """Ask until precompiled code serves all.

    Raises:
        SystemExit: that takes too long.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        served = client.ask()["metrics"]["compile_cache"].get("served") or {}
        if served and set(served.values()) == {"precompiled"}:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"after {timeout_s:g} s, the compiled server is served by {served}")
        time.sleep(1)


def measure(clients: dict[str, Client], args: Any, deadline_s: float) -> list[Segment]:
    """All loads, the servers in turn, as far as the time allows."""
    probes = [run_segment("eager", clients["eager"], Load(users=1), 1.0, _PROBES)]
    eager_s = median(probes[0].service_s)
    print(f"the eager server takes {eager_s * 1e3:.1f} ms a request", flush=True)
    loads = [*(Load(part=part) for part in args.parts), Load(users=args.users)]
    found: list[Segment] = []
    for number in range(args.rounds):
        for load in loads:
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                if time.monotonic() > deadline_s:
                    print("no further load: the time is over", flush=True)
                    return found
                found.append(run_segment(kind, clients[kind], load, eager_s, args.requests))
                print(f"{kind}, {load.name}: {found[-1].throughput:.2f} a second", flush=True)
    return found


def rows(found: Sequence[Segment]) -> Iterator[list[str]]:
    """A row for each load and server: rounds are put together."""
    for load in dict.fromkeys(one.load for one in found):
        for kind in KINDS:
            same = [one for one in found if (one.load, one.kind) == (load, kind)]
            if same:
                seconds = [value for one in same for value in one.seconds]
                rate = f"{same[0].rate:.2f}" if same[0].rate else "–"
                figures = [f"{percentile(seconds, percent) * 1e3:.0f}" for percent in _PERCENTS]
                throughput = len(seconds) / sum(one.total_s for one in same)
                service = median(value for one in same for value in one.service_s)
                yield [load, kind, rate, str(len(seconds)), *figures, f"{throughput:.2f}", f"{service * 1e3:.0f}"]


def lines(found: Sequence[Segment]) -> list[Line]:
    """What is plotted of the open loops: percentiles in ms over the arrivals a second."""
    drawn = []
    for kind in KINDS:
        for percent in (50, 99):
            points: dict[float, list[float]] = {}
            for one in found:
                if one.kind == kind and one.rate:
                    points.setdefault(one.rate, []).extend(one.seconds)
            values = [(rate, percentile(seconds, percent) * 1e3) for rate, seconds in sorted(points.items())]
            drawn.append(Line(f"{kind}, p{percent}", kind == "compiled", percent == 99, tuple(values)))
    return [line for line in drawn if line.points]


def check(found: Sequence[Segment], refused: dict[str, bool], segments: int) -> dict[str, bool]:
    """Every claim that has a yes or no."""
    compiled = [step for one in found if one.kind == "compiled" for step in one.served]
    return {
        "all loads were run on both servers": len(found) == segments,
        "a server that is busy refuses a request": all(refused.values()),
        "precompiled code served every request of the compiled server": set(compiled) == {"precompiled"},
    }


def parse_arguments() -> Any:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo/flux-digits", help="a pipeline's folder")
    parser.add_argument("--sizes", default="64x64", help="of pictures; all are warmed up, the first is drawn")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps")
    parser.add_argument("--store", type=Path, required=True, help="new folder for a store, cache directories and logs")
    parser.add_argument("--filled", type=Path, help="folder of another benchmark, with a store of this model")
    parser.add_argument(
        "--parts", type=float, nargs="+", default=(0.5, 0.7, 0.9), help="of the eager server's capacity"
    )
    parser.add_argument("--users", type=int, default=4, help="of the closed loop")
    parser.add_argument("--requests", type=int, default=50, help="for each load, server and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until both servers can be measured")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds of everything")
    parser.add_argument("--svg", type=Path, default=ROOT / "benchmarks" / "load.svg", help="the plot")
    parser.add_argument("--out", type=Path, help="file to which each segment is added as a JSON line")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    args.filled = args.filled and args.filled.resolve()
    return args


def main() -> None:
    """Start both, load them in turn, print, plot, check."""
    args = parse_arguments()
    deadline_s = time.monotonic() + args.limit_s
    args.timeout = min(args.timeout, args.limit_s)
    with servers(args, prepare(args.store)) as clients:
        refused = {kind: client.is_refused_when_busy() for kind, client in clients.items()}
        found = measure(clients, args, deadline_s)
    if args.out:
        with args.out.open("a") as file:
            file.writelines(json.dumps({**dataclasses.asdict(one), "model": args.model}) + "\n" for one in found)
    header = (
        "load",
        "server",
        "arrivals a second",
        "n",
        "p50, ms",
        "p90, ms",
        "p99, ms",
        "answers a second",
        "service, ms",
    )
    print(f"\n{markdown(header, rows(found))}\n")
    args.svg.write_text(plot(lines(found), "arrivals a second", "time to the answer, ms (logarithmic)"))
    conclude(check(found, refused, len(KINDS) * args.rounds * (len(args.parts) + 1)))


if __name__ == "__main__":
    main()
