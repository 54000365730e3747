"""A boot that is much worse than its key's first one says so."""

import json

import pytest

from compile_cache.lifecycle.history import HISTORY, compare_with_first, remember_first
from compile_cache.lifecycle.report import BootReport, RestoreReport
from compile_cache.regions.counters import CompileCounts
from compile_cache.regions.ladder import RegionReport


def boot_of(ready_s, import_s=0.0, outcome="hit", loaded=1):
    """A report of a boot with one region."""
    report = BootReport(ready_s=ready_s, phases={"import": import_s}, restore=RestoreReport(outcome))
    report.regions = [RegionReport("Block", 1, waiting=int(not loaded))]
    report.counts = CompileCounts(precompiled_loaded=loaded)
    return report


def test_a_boot_three_times_as_slow_and_ten_seconds_more_is_named(tmp_path):
    remember_first(tmp_path, boot_of(4.0))
    assert compare_with_first(tmp_path, boot_of(21.9)) == ""
    assert "22.1 s until READY without imports, against 4.0 s" in compare_with_first(tmp_path, boot_of(22.1))


def test_a_host_with_slow_imports_is_not_blamed(tmp_path):
    remember_first(tmp_path, boot_of(4.0))
    assert compare_with_first(tmp_path, boot_of(60.0, import_s=50.0)) == ""


def test_the_first_boot_of_a_key_stays_the_first(tmp_path):
    remember_first(tmp_path, boot_of(4.0))
    remember_first(tmp_path, boot_of(100.0))
    assert json.loads((tmp_path / HISTORY).read_text()) == {"own_s": 4.0}


def test_a_restore_that_serves_nothing_is_named(tmp_path):
    assert "NOTHING OF WHAT WAS RESTORED SERVES" in compare_with_first(tmp_path, boot_of(4.0, loaded=0))
    assert compare_with_first(tmp_path, boot_of(4.0, outcome="miss", loaded=0)) == ""


HUGE = f'{{"own_s": 1{"0" * 400}}}'


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"own_s": "x"}', '{"own_s": NaN}', '{"own_s": -1}', '{"own_s": 1e308}', HUGE, "[" * 9000],
)
def test_a_damaged_history_is_ignored(tmp_path, content):
    (tmp_path / HISTORY).parent.mkdir()
    (tmp_path / HISTORY).write_text(content)
    assert compare_with_first(tmp_path, boot_of(1000.0)) == ""
