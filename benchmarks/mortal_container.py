"""A container of soak_publish.py: a process that restores, compiles, publishes, stalls and dies as its turns say."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from containers import Artifact, Cache, WatchedStore, compile_missing, files_in, open_cache

from compile_cache.errors import StoreError
from compile_cache.lifecycle import publisher as publish
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.publisher import Publisher
from compile_cache.settings import Settings
from compile_cache.storage.directory import logical_key
from compile_cache.storage.stores.base import ObjectStore, open_url

# A publisher's pace, so that a round takes a second.
PACE = {"_POLL_S": 0.05, "_RETRY_S": 0.5, "_SPREAD_S": 0.2, "_MERGE_AFTER_S": 0.2}
PATIENCE_S = 60.0
# The second merge finds packs that others are deleting.
_MERGES = 2


@dataclass(frozen=True, slots=True)
class Moment:
    """The `number`th that is just before or just after such a call to the store."""

    calls: str
    number: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What one process does in a round. One that `merges` does so whatever others do, and whatever its publisher
    decides."""

    number: int
    round: int
    seed: int
    artifacts: tuple[Artifact, ...]
    boots: bool
    is_stopped: bool
    merges: bool
    death: Moment | None
    stall: Moment | None
    stall_s: float
    killed_after: float | None  # of the time that the round before took


@dataclass(frozen=True, slots=True)
class Event:
    """What a process says: `booted`, `incomplete` (that boot did without a pack), `publishing`, `finished` with its
    logical keys, `merged`, `failed` (the store's fault), `wrong` (a violation), `done`."""

    kind: str
    keys: frozenset[str] = frozenset()
    text: str = ""


class MortalStore(WatchedStore):
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
        method = method.partition("_")[0]
        kinds = ("any", method, f"{method} {name.rpartition('.')[2]}")
        self._pass(kinds)
        yield
        self._pass(kinds)

    def _pass(self, kinds: Sequence[str]) -> None:
        turn = self._turn
        if turn is None:
            return
        self._passed.update(kinds)
        now = [Moment(kind, self._passed[kind]) for kind in kinds]
        if turn.death in now:
            os.kill(os.getpid(), signal.SIGKILL)
        if turn.stall in now:
            time.sleep(turn.stall_s)


class Container:
    """What lives in one process: a cache, its directory, and a round's work."""

    def __init__(self, store: MortalStore, root: Path, connection: Connection) -> None:
        self._store = store
        self._root = root
        self._connection = connection
        self._boots = 0
        self._cache: Cache | None = None

    def do(self, turn: Turn) -> None:
        """One round: what goes wrong is told, and is the store's fault or a violation."""
        self._store.begin(turn)
        try:
            self._publish(turn)
        except StoreError as error:
            self._say("failed", text=f"{type(error).__name__}: {error}")
        except Exception:
            self._say("wrong", text=f"process {turn.number}: {traceback.format_exc()}")
        self._store.begin(None)
        self._say("done")

    def _say(self, kind: str, keys: frozenset[str] = frozenset(), text: str = "") -> None:
        self._connection.send(Event(kind, keys, text))

    def _boot(self) -> None:
        """Restore into a new directory."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._boots += 1
        self._cache = open_cache(self._store, self._root / str(self._boots))
        fetched = self._cache.restore()
        self._say("booted")
        for pack in fetched.refused:
            self._say("incomplete" if not pack.is_final else "wrong", text=f"{pack.name} is refused: {pack.reason}")

    def _publish(self, turn: Turn) -> None:
        if turn.boots or self._cache is None:
            self._boot()
        cache = self._cache
        assert cache is not None
        compile_missing(cache.directory.path, turn.artifacts, turn.seed)
        cache.hand_over()
        keys = frozenset(logical_key(path) for path in files_in(cache.directory.path))
        self._say("publishing")
        boot = BootReport()
        report = boot.publish
        running = Publisher(cache.publication, boot, Settings(exit_budget_s=PATIENCE_S))
        running.start()
        if not turn.is_stopped:
            if running.wait(PATIENCE_S) and not report.failures:
                self._say("finished", keys)
            # A merge that it has begun is stopped at some moment.
            time.sleep(random.Random(turn.seed).uniform(0.0, 0.5))
        running.flush()
        for failure in report.failures:
            self._say("failed", text=failure)
        if turn.is_stopped and running.wait(0.0) and not report.failures:
            self._say("finished", keys)
        if report.merged_packs:
            self._say("merged")
        for _ in range(_MERGES if turn.merges else 0):
            if cache.publication.merge(f"process {turn.number}").packs:
                self._say("merged")


def serve(url: str, root: Path, connection: Connection) -> None:
    """A process: turns come in, events go out, until the parent hangs up or is gone."""
    parent = os.getppid()
    for name, value in PACE.items():
        setattr(publish, name, value)
    container = Container(MortalStore(open_url(url)), root, connection)
    with suppress(EOFError, BrokenPipeError):
        while os.getppid() == parent:
            if connection.poll(1.0):
                turn = connection.recv()
                if turn is None:
                    break
                container.do(turn)
    os._exit(0)  # publishers have registered exit hooks, and have nothing left
