"""Short soaks: publishers that are killed while they merge, and a small fleet."""

from __future__ import annotations

import json
import subprocess
import sys

from cog_server import PROJECT
from soak_publish import Soak


def test_nothing_that_was_published_is_lost_when_publishers_are_killed_while_they_merge():
    command = [sys.executable, PROJECT / "benchmarks" / "soak_publish.py"]
    command += ["--rounds", "2", "--processes", "6", "--seed", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rounds = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(rounds) == 2
    assert all(sum(done["told"].get(what, 0) for done in rounds) for what in ("finished", "killed", "merged"))


def test_a_fleet_leaves_few_packs_and_loses_nothing(tmp_path):
    done = Soak(str(tmp_path / "store"), 12, 2, tmp_path, is_calm=True).run_round(0)
    assert done.violations == []
    assert (done.told["booted"], done.told["finished"], done.told["ended"]) == (12, 12, 12)
