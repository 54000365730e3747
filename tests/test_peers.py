"""What benchmarks/peers.py says of its boots, which take minutes and are not run here."""

from __future__ import annotations

import pytest
from cog_server import PROJECT
from fresh_boot import read_lines
from peers import BY_NAME, COLD, EAGER, WARM, paired, row, tables


def recorded(way: str, kind: str, number: int, ready_s: float, error: str = "", **measured) -> dict:
    boot = {"ready_s": ready_s, "first_s": None, "later_s": [], "settled_s": None, "machine": {}} | measured
    which = {"model": "a-model", "way": way, "kind": kind, "round": number, "stored_bytes": 0}
    return {**which, "boot": None if error else boot, "error": error}


WARM_BOOTS = [
    recorded(EAGER, WARM, 1, 4.0, first_s=0.2),
    recorded("zip", WARM, 1, 7.0, first_s=0.1, later_s=(0.1, 0.1)),
    recorded(EAGER, WARM, 2, 5.0, first_s=0.2),
    recorded("zip", WARM, 2, 6.5, first_s=0.3, later_s=(0.1, 0.3)),
]


@pytest.mark.parametrize("missing", [0, 3])
def test_round_that_was_cut_short_is_no_pair(missing):
    cut = [record for place, record in enumerate(WARM_BOOTS) if place != missing]
    assert len(paired("zip", cut)) == 1


def test_row_says_how_many_boots_it_has_and_how_requests_were_served():
    cells = row(BY_NAME["zip"], [recorded("zip", COLD, 1, 30.0), *WARM_BOOTS])
    assert cells[1:6] == ["1 / 2", "30.00", "–", "6.75 (6.50–7.00)", "2.25 (1.50–3.00)"]
    assert cells[7:] == ["– / 200 (100–300)", "100 / 294 (4)"]


def test_way_that_does_not_load_is_named_with_its_error():
    failed = recorded("mega", COLD, 1, 0.0, error="RuntimeError: it does not load")
    assert row(BY_NAME["mega"], [failed])[1:3] == ["0 / 0", "–"]
    assert "mega, cold 1: RuntimeError: it does not load" in tables([*WARM_BOOTS, failed])


def test_readme_has_the_tables_of_the_records():
    page = (PROJECT / "benchmarks" / "README.md").read_text()
    for part in tables(read_lines(PROJECT / "benchmarks" / "peers-h200.jsonl")).split("\n\n"):
        assert not part.startswith("|") or part in page
