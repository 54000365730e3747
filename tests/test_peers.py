"""What benchmarks/peers.py says of its boots, which take minutes and are not run here."""

from __future__ import annotations

import pytest
from cog_server import PROJECT
from peer_records import COLD, NEXT, WARM, PeerBoot, Record, read_records
from peer_table import boots_row, given, left_by, paired, percentiles, requests_row, tables
from peer_ways import BY_NAME, EAGER


def booted(ready_s: float, **measured) -> PeerBoot:
    return PeerBoot(
        **{"phases": {}, "hits": 0, "misses": 0, "precompiled": 0, "kernels_made": 0, "machine": {}} | measured,
        ready_s=ready_s,
    )


def recorded(way: str, kind: str, number: int, boot: PeerBoot | None, **said) -> Record:
    return Record("a-model", way, kind, number, boot, **said)


WARM_BOOTS = [
    recorded(EAGER, WARM, 1, booted(4.0, first_s=0.2)),
    recorded("zip", WARM, 1, booted(7.0, first_s=0.1, later_s=(0.1, 0.1), new_s=9.0, new_graphs=2, new_again_s=0.1)),
    recorded(EAGER, WARM, 2, booted(5.0, first_s=0.2)),
    recorded("zip", WARM, 2, booted(6.5, first_s=0.3, later_s=(0.1, 0.3))),
]


def test_difference_from_eager_is_taken_within_a_round():
    assert paired("zip", WARM_BOOTS) == [3.0, 1.5]


@pytest.mark.parametrize("missing", [0, 3])
def test_round_that_was_cut_short_is_no_pair(missing):
    cut = [record for place, record in enumerate(WARM_BOOTS) if place != missing]
    assert len(paired("zip", cut)) == 1


def test_row_says_how_many_boots_it_has_and_what_the_new_size_cost():
    records = [recorded("zip", COLD, 1, booted(30.0)), *WARM_BOOTS]
    row = boots_row(BY_NAME["zip"], records)
    assert row[1:6] == ["1 / 2", "30.00", "–", "6.75 (6.50–7.00)", "2.25 (1.50–3.00)"]
    row = requests_row(BY_NAME["zip"], records)
    assert row[1:] == ["– / 200 (100–300)", "100 / 294 (4)", "9.00", "yes", "100"]


def test_way_that_does_not_load_is_a_row_with_its_error():
    failed = recorded("mega", COLD, 1, None, error="RuntimeError: it does not load")
    assert boots_row(BY_NAME["mega"], [failed])[1:3] == ["0 / 0", "RuntimeError: it does not load"]
    assert boots_row(BY_NAME["mega"], [failed, recorded("mega", COLD, 2, booted(9.0))])[-1] == "–", "nothing was filled"
    assert "mega, cold 1: RuntimeError: it does not load" in tables([*WARM_BOOTS, failed])


def test_percentiles_need_two_values_and_say_how_many_there_were():
    assert percentiles([0.1]) == "–"
    assert percentiles([0.1] * 99 + [1.1]) == "100 / 110 (100)"


@pytest.mark.parametrize(
    ("found_bytes", "found", "word"),
    [
        (0, {}, "nothing"),
        (0, {"misses": 3}, "nothing"),
        (9, {"hits": 2}, "all"),
        (9, {"precompiled": 2}, "all"),
        (9, {"hits": 2, "kernels_made": 4}, "a part"),
        (9, {"hits": 2, "misses": 1}, "a part"),
        (9, {}, "a part"),  # kernels of its eager code
        (9, {"misses": 3}, "a part"),
    ],
)
def test_loss_is_what_the_boot_after_the_killed_one_found(found_bytes, found, word):
    records = [
        recorded("block", COLD, 1, booted(9.0), killed_after="ready"),
        recorded("block", NEXT, 1, booted(8.0, **found), found_bytes=found_bytes),
    ]
    assert list(left_by(records, "ready")) == [f"{word}, 8.00 s"]
    assert boots_row(BY_NAME["block"], records)[6:8] == [f"{word}, 8.00 s", "–"]


def test_readme_says_what_each_way_was_given():
    assert given() in (PROJECT / "benchmarks" / "README.md").read_text()


def test_readme_has_the_tables_of_the_records():
    page = (PROJECT / "benchmarks" / "README.md").read_text()
    for part in tables(read_records([PROJECT / "benchmarks" / "peers-h200.jsonl"])).split("\n\n"):
        assert not part.startswith("|") or part in page
