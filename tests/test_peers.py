"""What benchmarks/peers.py plans, keeps and says. The boots themselves take minutes and are not run here."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from cog_server import PROJECT
from fresh_boot import Model
from peer_keepers import make_keeper
from peer_records import COLD, NEXT, WARM, PeerBoot, Record, read_records
from peer_table import boots_row, given, left_by, paired, percentiles, requests_row, tables
from peer_ways import BY_NAME, EAGER, WAYS
from peers import Plan, Step, in_order, run, steps


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


def test_each_round_begins_with_an_eager_boot_and_each_cold_boot_is_followed_by_one_that_fills_the_store():
    planned = list(steps(WAYS, cold=2, warm=3, new=1))
    for number in (1, 2, 3):
        of_round = [step.way.name for step in planned if (step.kind, step.round) == (WARM, number)]
        assert of_round == [EAGER, *(way.name for way in WAYS if way.keeps)]
    cold = [place for place, step in enumerate(planned) if step.kind == COLD and step.way.keeps]
    assert {planned[place].killed_after for place in cold} == {"ready", "request"}
    assert all(planned[place + 1] == Step(planned[place].way, NEXT, planned[place].round, fills=True) for place in cold)
    assert {step.kind for step in planned if step.way.name == "compile"} == {COLD}


def plan_in(folder) -> Plan:
    return Plan(Model(Path("a-model"), False, {}, {}, {}), folder, requests=1, timeout_s=1.0)


def test_nothing_is_booted_again_and_nothing_without_time(tmp_path, capsys):
    wanted = [Step(BY_NAME[EAGER], WARM, 1), Step(BY_NAME["zip"], WARM, 1)]
    assert list(run(plan_in(tmp_path), wanted, WARM_BOOTS, limit_s=100)) == []
    assert capsys.readouterr().out == ""
    assert list(run(plan_in(tmp_path), wanted, [], limit_s=0)) == []
    assert "no further boot" in capsys.readouterr().out


def test_boot_whose_store_is_gone_is_preceded_by_one_that_makes_it(tmp_path):
    plan, way = plan_in(tmp_path), BY_NAME["zip"]
    after_killed, warm = Step(way, NEXT, 1, fills=True), Step(way, WARM, 1)
    order = in_order(plan, [after_killed, warm], set())
    assert [next(order)[0].way.name, *(next(order)[0].kind for _ in range(3))] == ["block", COLD, NEXT, NEXT]
    plan.filled(way).mkdir(parents=True)
    assert list(order) == [(warm, True)]
    plan.store(way).mkdir()
    assert [step for step, _ in in_order(plan, [after_killed, warm], set())][1:] == [after_killed, warm]


def test_way_whose_store_could_not_be_filled_has_no_warm_boots(tmp_path):
    order = in_order(plan_in(tmp_path), [Step(BY_NAME["zip"], WARM, 1), Step(BY_NAME[EAGER], WARM, 1)], {"zip"})
    assert [(step.way.name, is_recorded) for step, is_recorded in order] == [("block", False), (EAGER, True)]


def test_later_record_of_the_same_step_replaces_the_earlier_one(tmp_path):
    file = tmp_path / "peers.jsonl"
    again = recorded("zip", WARM, 1, None, error="it failed")
    file.write_text("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in [*WARM_BOOTS, again]))
    assert {record.step: record for record in read_records([file])} == {
        record.step: record for record in [*WARM_BOOTS, again]
    }
    assert read_records([tmp_path / "none"]) == []


def test_zip_brings_the_directory_back_and_is_made_again_only_for_new_names(tmp_path, monkeypatch):
    directory = tmp_path / "directory"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    (directory / "triton").mkdir(parents=True)
    (directory / "triton" / "kernel.cubin").write_bytes(b"code")
    first = make_keeper("zip", tmp_path / "store", False)
    first.save()  # restored nothing, so all names are new
    (directory / "triton" / "kernel.cubin").unlink()
    second = make_keeper("zip", tmp_path / "store", False)
    second.restore()
    assert (directory / "triton" / "kernel.cubin").read_bytes() == b"code"
    stored = (tmp_path / "store" / "cache.zip").stat()
    second.save()
    assert (tmp_path / "store" / "cache.zip").stat() == stored
    (directory / "other").write_bytes(b"")
    second.save()
    assert (tmp_path / "store" / "cache.zip").stat().st_ino != stored.st_ino


def test_container_never_writes_a_committed_file(tmp_path):
    make_keeper("committed", tmp_path, is_build_step=False).save()
    assert list(tmp_path.iterdir()) == []


def test_readme_says_what_each_way_was_given():
    assert given() in (PROJECT / "benchmarks" / "README.md").read_text()


def test_readme_has_the_tables_of_the_records():
    page = (PROJECT / "benchmarks" / "README.md").read_text()
    for part in tables(read_records([PROJECT / "benchmarks" / "peers-h200.jsonl"])).split("\n\n"):
        assert not part.startswith("|") or part in page
