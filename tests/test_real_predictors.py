"""The patches of benchmarks/real_predictors.py, and its table."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from real_predictors import BOOTS, Boot, Result, check, row

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PATCHES = sorted(BENCHMARKS.glob("patches/*.patch"))
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_has_only_changed_lines(patch: Path) -> None:
    """It has as many lines as it says, and none of the context."""
    lines = patch.read_text().splitlines()
    assert lines[0].startswith("--- a/")
    assert lines[1].startswith("+++ b/")
    promised = {"-": 0, "+": 0}
    for line in lines[2:]:
        if found := _HUNK.fullmatch(line):
            for sign, number in zip("-+", found.groups(), strict=True):
                promised[sign] += int(number or 1)
        elif not line.startswith("\\"):  # no newline at the end of the file
            promised[line[0]] -= 1
    assert promised == {"-": 0, "+": 0}


def test_results_make_a_table() -> None:
    """A line of the file of results is a row, and a late boot fails."""
    boots = {kind: Boot(5.0, served=("Block: precompiled",)) for kind in BOOTS} | {"third": Boot(9.0)}
    result = Result.of(json.loads(json.dumps(asdict(Result("siglip", 6, 1, boots)))))
    assert row(result)[:6] == ["classifier by labels", "lucataco/cog-SigLip", "+6 −1", "5.00", "+0.00", "+0.00"]
    late = [claim for claim, holds in check([result]).items() if not holds]
    assert [claim.partition(":")[0] for claim in late] == ["siglip"]
    assert "READY" in late[0]
