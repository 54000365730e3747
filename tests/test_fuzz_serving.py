"""The fuzzer of serving: a small part of its campaign."""

from __future__ import annotations

import json

import fuzz_serving
import pytest
from boots import run_boot

# One module each, under one of the policies. `make soak` has both.
ROUNDS = 8
FEATURES = {
    "background": [
        *("none", "count", "attribute", "draw", "write", "alias", "views", "own view", "dictionary", "sentinel"),
        *("enumeration", "hook", "autocast", "break", "set flag", "set partial"),
    ],
    "block": [
        *("plain", "own hook", "set zero", "set dictionary", "set sentinel", "set global list"),
        "set forward of a part",
    ],
}
# What the second process cannot compile, or what its code never fits.
EAGER = ("attribute", "draw", "hook", "own hook", "autocast", "break", "set sentinel")


def boot(folder: str, number: int, count: int, own: list[str], environ: dict[str, str]) -> list[fuzz_serving.Tally]:
    """As the fuzzer boots a process, but forked from one that has imported torch."""
    done = run_boot(environ, *own, "--boot", str(number), program="fuzz_serving", folder=folder)
    assert done.returncode == 0, done.stderr
    return [fuzz_serving.Tally(**told) for told in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module", params=FEATURES)
def tallies(request) -> dict[str, fuzz_serving.Tally]:
    """What a policy's modules have met in two boots, by feature."""
    features = FEATURES[request.param]
    only = [part for name in features for part in ("--only", name)]
    command = ["--seed", "1", "--calls", str(ROUNDS), "--policy", request.param, *only]
    count = str(len(features))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzz_serving, "_boot", boot)
        (batch,) = fuzz_serving.run(fuzz_serving.parse([*command, "--modules", count, "--batch", count]))
    first, second = batch.boots
    for tally, other in zip(first, second, strict=True):
        tally.add(other)
    return dict(zip(features, first, strict=True))


def test_modules_with_a_feature_are_served_as_eager_would(tallies):
    assert {name: tally.wrong for name, tally in tallies.items() if tally.wrong} == {}
    assert {name: tally.calls for name, tally in tallies.items() if tally.calls < 2 * ROUNDS} == {}
    assert {name for name, tally in tallies.items() if not tally.compiled} <= {*EAGER}
