"""The fuzzer of serving: a small part of its campaign, and proof that it would see what it looks for."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fuzz_serving
import pytest
import torch
from random_modules import make_modules, source_of

ROOT = Path(__file__).resolve().parents[1]
# One module each, by policy.
FEATURES = {
    "background": (
        *(
            "none",
            "count",
            "attribute",
            "draw",
            "write",
            "alias",
            "views",
            "own view",
            "dictionary",
            "plain",
            "sentinel",
        ),
        *("enumeration", "hook", "autocast", "break", "set flag", "set partial"),
    ),
    "block": (
        *("attribute", "plain", "own hook", "break"),
        *("set zero", "set dictionary", "set sentinel", "set global list", "set forward of a part"),
    ),
}
# What the second process cannot compile, or what its code never fits.
EAGER = ("attribute", "draw", "hook", "own hook", "autocast", "break", "set sentinel")


@pytest.fixture(scope="module")
def campaign() -> Callable[[str], dict[str, dict[str, int]]]:
    """The rows of the fuzzer's table by feature, for a policy."""

    @functools.cache
    def run(policy: str) -> dict[str, dict[str, int]]:
        count = str(len(FEATURES[policy]))
        command = [sys.executable, ROOT / "benchmarks" / "fuzz_serving.py", "--seed", "1", "--calls", "12"]
        command += ["--policy", policy, "--modules", count, "--batch", count]
        command += [part for name in FEATURES[policy] for part in ("--only", name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode in (0, 1), done.stderr
        table = [line for line in done.stdout.splitlines() if line.startswith("|")]
        header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
        return {name: dict(zip(header[1:], map(int, row), strict=True)) for name, *row in rows}

    return run


@pytest.mark.parametrize(
    ("policy", "feature"), [(policy, name) for policy, names in FEATURES.items() for name in names]
)
def test_modules_with_a_feature_are_served_as_eager_would(campaign, policy, feature):
    row = campaign(policy)[feature]
    assert row["wrong"] == 0
    assert row["calls"] >= 24
    assert row["served by compiled code"] or feature in EAGER


def test_a_module_is_the_same_for_the_same_seed():
    assert make_modules(3, range(20)) == make_modules(3, range(20)) != make_modules(4, range(20))
    compile(source_of(make_modules(3, range(20))), "fuzzed.py", "exec")


@pytest.mark.parametrize(
    "other",
    [
        [torch.ones(3) * 1.01, 1, "a"],
        [torch.ones(3).double(), 1, "a"],
        [torch.ones(3, 1), 1, "a"],
        [torch.ones(3), True, "a"],
        [torch.ones(3), 1, "b"],
        [torch.ones(3), 1],
        [torch.full((3,), torch.nan), 1, "a"],
    ],
    ids=str,
)
def test_answers_that_differ_in_anything_are_not_alike(other):
    answer = [torch.ones(3), 1, "a"]
    assert fuzz_serving.is_alike(answer, [torch.ones(3) * 1.0001, 1, "a"])
    assert not fuzz_serving.is_alike(other, answer)
