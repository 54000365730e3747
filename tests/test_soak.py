"""Short soaks: publishers that are killed while they merge, a small fleet, and proof that a soak would see
what it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from containers import compile_missing, graph, open_cache, packs_in
from soak_publish import Round, Soak, make_turn, violations

from compile_cache.storage.stores.local import LocalStore

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def store(tmp_path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def publish(store: LocalStore, root: Path, name: str) -> set[str]:
    """What one container compiles, in one pack; its logical keys."""
    cache = open_cache(store, root)
    compile_missing(cache.directory.path, graph(name, 4096), seed=0)
    cache.publish()
    return {artifact.key for artifact in graph(name, 4096)}


def checked(store: LocalStore, folder: Path, promised: set[str]) -> Round:
    soak = Soak(store.location, 1, 0, folder)
    soak.promised |= promised
    done = Round(0)
    soak.check(done)
    return done


def test_nothing_that_was_published_is_lost_when_publishers_are_killed_while_they_merge():
    command = [sys.executable, ROOT / "benchmarks" / "soak_publish.py"]
    command += ["--rounds", "2", "--processes", "6", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rounds = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(rounds) == 2
    assert all(sum(done["told"].get(what, 0) for done in rounds) for what in ("finished", "killed", "merged"))


def test_a_fleet_leaves_few_packs_and_loses_nothing(tmp_path):
    done = Soak(str(tmp_path / "store"), 20, 2, tmp_path, is_calm=True).run_round(0)
    assert done.violations == []
    assert (done.told["booted"], done.told["finished"], done.told["ended"]) == (20, 20, 20)


def test_a_key_that_is_gone_is_a_violation_and_named(store, tmp_path):
    keys = publish(store, tmp_path / "a", "a")
    assert checked(store, tmp_path, keys).violations == []
    assert checked(store, tmp_path, {*keys, "gone"}).violations == ["gone was published, and cannot be restored"]


def test_a_pack_that_was_damaged_is_a_violation_and_named(store, tmp_path):
    publish(store, tmp_path / "a", "a")
    (entry,) = packs_in(store)
    store.put(entry.name, store.read(entry.name)[:-1] + b"\x00")
    found = checked(store, tmp_path, set()).violations
    assert any(line.startswith(f"{entry.name} is refused") for line in found)
    assert any(line.startswith(f"{entry.name} does not verify") for line in found)


def test_a_wrong_content_is_a_violation_though_its_pack_verifies(store, tmp_path):
    cache = open_cache(store, tmp_path / "a")
    (cache.directory.path / "wrong.py").write_bytes(b"nothing that was compiled for it")
    cache.publish()
    assert checked(store, tmp_path, set()).violations == ["wrong.py is wrong"]


def test_fewer_publishes_that_finish_than_half_are_a_violation():
    assert violations([Round(0, Counter(publishing=4, finished=2))], 7) == []
    found = violations([Round(0, Counter(publishing=5, finished=2))], 7)
    assert found == ["seed 7: of 5 publishes only 2 finished"]
    assert violations([Round(0)], 7) != []


def test_a_process_does_the_same_for_the_same_seed():
    """When it is killed in a round is not the same: that is up to the machine."""
    assert make_turn(3, 1, 4) == make_turn(3, 1, 4)
    assert make_turn(3, 1, 4) != make_turn(4, 1, 4)


def test_a_process_dies_at_the_moment_that_its_turn_names(store, tmp_path):
    program = f"""
import dataclasses
from pathlib import Path
from soak_publish import Moment, MortalStore, make_turn
from compile_cache.storage.stores.local import LocalStore
store = MortalStore(LocalStore(Path({str(tmp_path / "store")!r})))
store.begin(dataclasses.replace(make_turn(0, 0, 0), death=Moment("put pack", 3), stall=None))
for name in ("a.pack", "b.txt", "c.pack", "d.pack"):
    store.put(name, b"")
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT / "benchmarks", check=False)
    assert run.returncode == -9
    assert {entry.name for entry in store.list("")} == {"a.pack", "b.txt"}
