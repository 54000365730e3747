"""What benchmarks/peers.py plans, keeps and says. The boots themselves take minutes and are not run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from cog_server import PROJECT
from fresh_boot import Model, read_lines
from one_peer import make_keeper
from peers import BY_NAME, COLD, EAGER, WARM, WAYS, Plan, paired, row, run, steps, tables


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


def test_difference_from_eager_is_taken_within_a_round():
    assert paired("zip", WARM_BOOTS) == [3.0, 1.5]


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


def test_each_round_begins_with_an_eager_boot_and_each_way_fills_its_store_first():
    planned = list(steps(WAYS, cold=2, warm=3))
    for number in (1, 2, 3):
        of_round = [way.name for way, *which in planned if which == [WARM, number]]
        assert of_round == [EAGER, *(way.name for way in WAYS if way.keeps)]
    assert [kind for way, kind, _ in planned if way.name == "zip"] == [COLD, WARM, COLD, WARM, WARM]
    assert {kind for way, kind, _ in planned if way.name == "compile"} == {COLD}


def plan_in(folder) -> Plan:
    return Plan(Model(Path("a-model"), False, {}, {}), folder, requests=1, timeout_s=1.0)


def test_nothing_is_booted_again_and_nothing_without_time(tmp_path, capsys):
    wanted = [(BY_NAME[EAGER], WARM, 1), (BY_NAME["zip"], WARM, 1)]
    assert list(run(plan_in(tmp_path), wanted, WARM_BOOTS, limit_s=100)) == []
    assert capsys.readouterr().out == ""
    assert list(run(plan_in(tmp_path), wanted, [], limit_s=-1)) == []
    assert "no further boot" in capsys.readouterr().out


def test_warm_boot_whose_store_is_gone_comes_after_one_that_fills_it(tmp_path, monkeypatch):
    booted, fills = [], True

    def boot(plan: Plan, way, kind: str, number: int) -> dict:
        booted.append((way.name, kind))
        if kind == COLD and fills:
            plan.filled(way).mkdir(parents=True)
        return recorded(way.name, kind, number, 0.0, error="not booted here")

    monkeypatch.setattr(Plan, "run", boot)
    wanted = [(BY_NAME["zip"], WARM, 1), (BY_NAME["zip"], WARM, 2)]
    assert len(list(run(plan_in(tmp_path), wanted, [], limit_s=100))) == 2
    assert booted == [(EAGER, WARM), ("zip", COLD), ("zip", WARM), ("zip", WARM)]
    fills = False
    assert list(run(plan_in(tmp_path / "other"), wanted, [], limit_s=100)) == [], "a store that cannot be filled"


def test_zip_brings_the_directory_back_and_is_made_again_only_for_new_names(tmp_path, monkeypatch):
    directory, store = tmp_path / "directory", tmp_path / "store"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
    store.mkdir()
    (directory / "triton").mkdir(parents=True)
    (directory / "triton" / "kernel.cubin").write_bytes(b"code")
    first = make_keeper("zip", store, False)
    first.save()  # restored nothing, so all names are new
    (directory / "triton" / "kernel.cubin").unlink()
    second = make_keeper("zip", store, False)
    second.restore()
    assert (directory / "triton" / "kernel.cubin").read_bytes() == b"code"
    stored = (store / "cache.zip").stat()
    second.save()
    assert (store / "cache.zip").stat() == stored
    (directory / "other").write_bytes(b"")
    second.save()
    assert (store / "cache.zip").stat().st_ino != stored.st_ino


def test_container_never_writes_a_committed_file(tmp_path):
    make_keeper("committed", tmp_path, is_build_step=False).save()
    assert list(tmp_path.iterdir()) == []


def test_readme_has_the_tables_of_the_records():
    page = (PROJECT / "benchmarks" / "README.md").read_text()
    for part in tables(read_lines(PROJECT / "benchmarks" / "peers-h200.jsonl")).split("\n\n"):
        assert not part.startswith("|") or part in page
