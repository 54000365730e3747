"""Thousands of predictions of servers that compile in the background, while servers and stores fail.

    python benchmarks/soak_predictions.py --predictions 2000 --seed 0
    python benchmarks/soak_predictions.py --cancels 200 --lives 4

A life is a real Cog server of the demo model, over a store that outlives it and mostly with a cache directory of its
own. It predicts pictures of three sizes, of which one is warmed up. It ends by SIGTERM, or by a SIGKILL of the server
or its worker at a random moment; its compiling process may be killed too; and the store may be out of reach for some
time. After some lives, two more look at what is left in the store.

With `--cancels`, lives have none of these faults. Before each prediction, another one is cancelled or loses its client
at a random moment, and SIGTERM comes during a prediction.

Exits with 1 if a picture is not the eager one within rounding, a request waits for a compiler, a server is stuck, a
process outlives its server, a pack does not verify, something published is gone, or the last life, with nothing wrong,
is not precompiled.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from containers import check_store
from fresh_boot import boot_environment, end
from servers import MARK, CogServer, command, compilers, kill, marked, parent, pixels, wait_gone, with_tini
from table import markdown

# Width and height. The first is warmed up.
SIZES = ((64, 64), (96, 64), (64, 96))
SEEDS = 3
READY_S = 180.0
ANSWER_S = 60.0
_LIVES = 10
_PREDICTIONS = (5, 40)
_LOADED = "stop in a prediction"
_ENDINGS = ("stop", "stop", "kill server", "kill server", "kill worker")
# Between predictions: a server that is never idle leaves nothing to the compiling process on two cores.
_MOST_PAUSE_S = 0.5
_PATIENT_PAUSE_S = 1.5
# About what a picture takes, so that a request is broken off anywhere in it.
_MOST_BREAK_S = 0.3
_GONE_S = 10.0
_COMPILED_S = 600.0
# Levels of 0 to 255. Compiled code adds in another order, and a value at the edge of two levels takes the other one.
_MOST_DIFFERENCE = 4
_MOST_LINES = 50


@dataclass(frozen=True, slots=True)
class Life:
    """What happens to a server: its predictions, its end, whether its cache directory is the one of the life before,
    and before which predictions its compiling process is killed and its store fails and recovers; a store that fails
    before prediction 0 fails in the boot. One that `is_patient` first waits until each size is precompiled: it and the
    lives after it serve precompiled code. With `breaks_off`, a request is broken off before each prediction."""

    predictions: int
    ending: str
    keeps_directory: bool = False
    is_patient: bool = False
    kills_compiler: int | None = None
    store_fails: int | None = None
    store_recovers: int = 0
    breaks_off: bool = False


def make_life(chance: random.Random, breaks_off: bool = False) -> Life:
    """Any that may be."""
    predictions = chance.randint(*_PREDICTIONS)
    if breaks_off:
        return Life(predictions, chance.choice(["stop", _LOADED]), is_patient=chance.random() < 0.5, breaks_off=True)
    fails = chance.randint(0, predictions - 1) if chance.random() < 0.4 else None
    is_patient = chance.random() < 0.25
    return Life(
        predictions,
        chance.choice(_ENDINGS),
        keeps_directory=chance.random() < 0.3,
        is_patient=is_patient,
        kills_compiler=chance.randrange(predictions) if chance.random() < 0.3 else None,
        store_fails=fails,
        store_recovers=(fails or 0) + chance.randint(1, 10),
    )


class Soak:
    """Lives over one store at a time. `promised` is what was published in it: the folder and logical key of each
    file."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder = folder
        self._chance = chance
        self.store = folder / "store"
        self.counts: Counter[str] = Counter()
        self.largest = 0
        self.promised: set[tuple[str, str]] = set()
        self.violations: list[str] = []
        with self._server(False, is_eager=True) as (server, _):
            server.wait_ready(READY_S)
            self._references = {(*size, n): pixels(draw(server, size, n)) for size in SIZES for n in range(SEEDS)}

    def begin_store(self) -> None:
        """Go on with an empty one."""
        shutil.rmtree(self.store, ignore_errors=True)
        self.store.mkdir()
        self.promised.clear()

    def run(self, life: Life) -> None:
        """One server, from its start to its end, and the check of the store."""
        self.counts["lives"] += 1
        if life.store_fails == 0:
            self._set_store(is_there=False)
        with self._server(life.keeps_directory) as (server, mark):
            if self._is_ready(server):
                if life.is_patient:
                    self._wait_precompiled(server, False, life.breaks_off)
                self._predict(server, mark, life)
        self._set_store(is_there=True)
        left = wait_gone(mark, _GONE_S)
        self.violations += [f"process {pid} outlives its server: {command(pid)!r}" for pid in left]
        for pid in left:
            kill(pid, signal.SIGKILL)
        self.violations += check_store(self.store, self.promised)

    @contextmanager
    def _server(self, keeps_directory: bool, is_eager: bool = False) -> Iterator[tuple[CogServer, str]]:
        """A server that is not READY yet, and the mark of its processes."""
        mark = f"{self._folder}-{self.counts['lives']}"
        if not keeps_directory:
            shutil.rmtree(self._folder / "directory", ignore_errors=True)
        sizes = [f"{width}x{height}" for width, height in SIZES]
        environ = boot_environment(self._folder, "eager" if is_eager else "cold", self.store)
        environ |= {"MODEL": "demo/flux-digits", "IMAGE_SIZES": ",".join(sizes), "WARM_UP_SIZES": sizes[0]}
        environ |= {"COMPILE_CACHE_COLD_START": "background", MARK: mark}
        server = with_tini("predict.py:Predictor", self._folder / f"{time.monotonic_ns()}.log", environ)
        server.start()
        try:
            yield server, mark
        finally:
            end(server.process)

    def _is_ready(self, server: CogServer) -> bool:
        try:
            server.wait_ready(READY_S)
        except (RuntimeError, OSError) as error:
            self.violations.append(f"a server is not READY: {error}")
            return False
        return True

    def _predict(self, server: CogServer, mark: str, life: Life) -> None:
        doomed = threading.Event()
        for number in range(life.predictions):
            if number == life.kills_compiler:
                self._kill_compilers(mark)
            if number == life.store_fails:
                self._set_store(is_there=False)
            if number == life.store_recovers:
                self._set_store(is_there=True)
            if number == life.predictions - 1 and life.ending.startswith("kill"):
                kill = threading.Timer(self._chance.uniform(0, 0.3), self._kill, [server, mark, life.ending, doomed])
                kill.start()
            if life.breaks_off:
                self._begin(server)()
            self.ask(server, self._chance.choice(SIZES), self._chance.randrange(SEEDS), doomed)
            self.counts["asked"] += 1
            time.sleep(self._chance.uniform(0, _MOST_PAUSE_S))
        self._end(server, mark, life.ending, doomed)

    def _end(self, server: CogServer, mark: str, ending: str, doomed: threading.Event) -> None:
        self.counts[ending] += 1
        if ending in ("stop", _LOADED):
            if ending == _LOADED:
                self._begin(server)
            try:
                server.stop(signal.SIGTERM, ANSWER_S)
            except subprocess.TimeoutExpired:
                self.violations.append("a server does not stop")
            return
        doomed.wait(ANSWER_S)
        if ending == "kill worker":  # the server lives on without one
            left = wait_gone(mark, _GONE_S, but=(server.pid, server.process.pid))
            self.violations += [f"process {pid} outlives its worker: {command(pid)!r}" for pid in left]

    def _begin(self, server: CogServer) -> Callable[[], None]:
        """Begin a prediction, and let a random time pass. What breaks it off."""
        way = self._chance.choice(["cancel", "hang up"])
        self.counts[way] += 1
        break_off = begin(server, self._chance.choice(SIZES), is_left=way == "hang up")
        time.sleep(self._chance.uniform(0, _MOST_BREAK_S))
        return break_off

    def _kill(self, server: CogServer, mark: str, ending: str, doomed: threading.Event) -> None:
        doomed.set()
        workers = [pid for pid in marked(mark) if parent(pid) == server.pid]
        for pid in [server.pid] if ending == "kill server" else workers:
            kill(pid, signal.SIGKILL)

    def _kill_compilers(self, mark: str) -> None:
        for pid in compilers(mark):
            self.counts["kill compiler"] += 1
            kill(pid, signal.SIGKILL)

    def ask(self, server: CogServer, size: tuple[int, int], seed: int, doomed: threading.Event | None = None) -> bool:
        """One prediction, compared with eager; whether precompiled code served all of it. It may fail only if the
        server is `doomed`."""
        try:
            answer = draw(server, size, seed)
        except (OSError, RuntimeError, ValueError) as error:
            if doomed is None or not doomed.is_set():
                self.violations.append(f"a prediction failed: {error!r}; see {server.log}")
            return False
        self.counts["predictions"] += 1
        apart = difference(pixels(answer), self._references[*size, seed])
        self.largest = max(self.largest, apart)
        if apart > _MOST_DIFFERENCE:
            self.violations.append(f"a picture is {apart} levels off: {size}, seed {seed}; see {server.log}")
        ours = answer["metrics"]["compile_cache"]
        steps = set((ours.get("served") or {}).values())
        self.counts["precompiled" if steps == {"precompiled"} else "eager or both"] += 1
        if ours["compiled_now"]:
            self.violations.append(f"a request waited for a compiler: {size}; see {server.log}")
        return steps == {"precompiled"} and not ours["compiling"]

    def _set_store(self, is_there: bool) -> None:
        """Put the store out of reach, with a file in its place, or back."""
        away = self.store.with_name("away")
        if is_there and away.exists():
            self.store.unlink()
            away.rename(self.store)
        elif not is_there and not away.exists():
            self.counts["store failed"] += 1
            self.store.rename(away)
            self.store.write_text("out of reach")

    def close(self) -> None:
        """Two lives with nothing wrong: one compiles what is missing; in the other, each kind is precompiled from its
        first prediction on."""
        for is_last in (False, True):
            self.counts["lives"] += 1
            with self._server(keeps_directory=False) as (server, mark):
                if self._is_ready(server):
                    self._wait_precompiled(server, is_there=is_last)
                    self._end(server, mark, "stop", threading.Event())
            self.violations += check_store(self.store, self.promised)

    def _wait_precompiled(self, server: CogServer, is_there: bool, breaks_off: bool = False) -> None:
        """Ask for each size until it is precompiled; once, if its code `is_there`. With `breaks_off`, a request is
        broken off between two."""
        deadline = time.monotonic() + (0 if is_there else _COMPILED_S)
        for size in SIZES:
            while not self.ask(server, size, 0):
                if time.monotonic() > deadline:
                    when = "at once" if is_there else "in time"
                    self.violations.append(f"{size} is not precompiled {when}; see {server.log}")
                    break
                if breaks_off:
                    self._begin(server)()
                time.sleep(_PATIENT_PAUSE_S if breaks_off else _MOST_PAUSE_S)


def inputs(size: tuple[int, int], seed: int) -> dict[str, Any]:
    """Of a request for a picture."""
    picture = {"prompt": "a handwritten three", "num_inference_steps": 2, "output_format": "png"}
    return {**picture, "width": size[0], "height": size[1], "seed": seed}


def draw(server: CogServer, size: tuple[int, int], seed: int) -> dict[str, Any]:
    """The answer to a request for a picture.

    Raises:
        RuntimeError: it failed.
        OSError: the server does not answer.
    """
    answer = server.predict(**inputs(size, seed))
    if answer["status"] != "succeeded":
        raise RuntimeError(f"the prediction {answer['status']}: {answer.get('error')}")
    return answer


def begin(server: CogServer, size: tuple[int, int], is_left: bool) -> Callable[[], None]:
    """Begin a prediction. What breaks it off: its client hangs up if `is_left`, or cancels it.

    Raises:
        RuntimeError: the server stays busy.
    """
    server.wait_ready(ANSWER_S)
    if is_left:
        connection = HTTPConnection(server.url.removeprefix("http://"))
        body = json.dumps({"input": inputs(size, 0)})
        connection.request("POST", "/predictions", body, {"Content-Type": "application/json"})
        return connection.close
    identity = server.predict_later(**inputs(size, 0))["id"]

    def cancel() -> None:
        with suppress(urllib.error.HTTPError):  # it has ended
            server.cancel(identity)

    return cancel


def difference(one: Any, other: Any) -> int:
    """The largest of any pixel; 255 if the sizes differ."""
    return int(abs(one - other).max()) if one.shape == other.shape else 255


def main() -> int:
    """Run all lives; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=int, default=2000)
    parser.add_argument("--cancels", type=int, help="as many are broken off, and nothing else goes wrong")
    parser.add_argument("--lives", type=int, default=_LIVES, help="for each store, before the last two")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=7200.0, help="begin no life after so many seconds")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    folder = Path(tempfile.mkdtemp(prefix="soak-predictions-"))
    chance = random.Random(args.seed)
    soak = Soak(folder, chance)

    def is_over() -> bool:
        done = soak.counts["cancel"] + soak.counts["hang up"] if args.cancels else soak.counts["asked"]
        return done >= (args.cancels or args.predictions) or time.monotonic() > deadline or bool(soak.violations)

    while not is_over():
        soak.begin_store()
        for _ in range(args.lives):
            if not is_over():
                soak.run(make_life(chance, bool(args.cancels)))
        soak.close()
        print(dict(soak.counts), flush=True)
    columns = ("predictions", "precompiled", "eager or both", "cancel", "hang up", "lives", "stop", _LOADED)
    columns += ("kill server", "kill worker", "kill compiler", "store failed")
    row = [*(soak.counts[name] for name in columns), soak.largest, len(soak.violations)]
    print(f"\n{markdown((*columns, 'largest difference', 'violations'), [row])}")
    print("\n".join(soak.violations[:_MOST_LINES]))
    if soak.violations:
        print(f"kept for a look: {folder}")
    else:
        with suppress(OSError):
            shutil.rmtree(folder)
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
