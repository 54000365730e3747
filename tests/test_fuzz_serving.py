"""The fuzzer of serving: a small part of its campaign."""

from __future__ import annotations

import json

import fuzz_serving
from boots import run_boot

# One module each, in the background. `make soak` has all features, and both policies.
ROUNDS = 4
FEATURES = ("none", "alias", "views", "own view", "enumeration", "set partial", "shared memory", "weak key")


def boot(folder: str, number: int, count: int, own: list[str], environ: dict[str, str]) -> list[fuzz_serving.Tally]:
    """As the fuzzer boots a process, but forked from one that has imported torch."""
    done = run_boot(environ, *own, "--boot", str(number), program="fuzz_serving", folder=folder)
    assert done.returncode == 0, done.stderr
    return [fuzz_serving.Tally(**told) for told in json.loads(done.stdout.splitlines()[-1])]


def test_modules_with_a_feature_are_served_as_eager_would_in_two_boots(monkeypatch):
    monkeypatch.setattr(fuzz_serving, "_boot", boot)
    only, count = [part for name in FEATURES for part in ("--only", name)], str(len(FEATURES))
    command = ["--seed", "1", "--calls", str(ROUNDS), "--policy", "background", "--modules", count, "--batch", count]
    (batch,) = fuzz_serving.run(fuzz_serving.parse([*command, *only]))
    for number, name in enumerate(FEATURES):
        first, second = (tallies[number] for tallies in batch.boots)
        assert first.wrong + second.wrong == [], name
        assert first.calls + second.calls >= 2 * ROUNDS, name
        # These write where tensors overlap, or differ by instance.
        is_eager = name in ("own view", "weak key")
        assert bool(first.compiled + second.compiled) != is_eager, name
