"""A boot that compiles in a second process: what it serves before, meanwhile and after, and what the next boot has."""

from __future__ import annotations

from pathlib import Path

import pytest
from background_boots import Told, play

TOLERANCE = 1e-3
# torch's own default, which conftest.py replaces for other tests: precompiled headers are part of a C++ kernel's name.
HEADERS = {"TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="module")
def cold(folder) -> Told:
    """A cold boot, in a process that has not imported torch before."""
    return play(folder, "first", forked=False, **HEADERS)


@pytest.fixture(scope="module")
def warm(cold, folder, tmp_path_factory) -> Told:
    """The next boot, in another folder, and prompts of lengths that were asked for, and of some that were not."""
    arguments = ("again", "5", "6", "11", "13")
    return play(tmp_path_factory.mktemp("warm"), *arguments, after=folder, forked=False, **HEADERS)


def assert_nothing_compiled(report: dict) -> None:
    counts = report["counts"]
    names = ("graphs", "misses", "benchmarks")
    assert {name: counts[name] for name in names} == dict.fromkeys(names, 0)


def test_before_ready_no_compiler_is_imported_and_nothing_compiled(cold):
    assert cold["imported"] == []
    assert_nothing_compiled(cold["ready"])
    assert cold["ready"]["counts"]["precompiled_made"] == 0
    assert [region["step"] for region in cold["ready"]["regions"]] == ["eager", "eager"]
    assert not cold["ready"]["fully_cached"]


def test_the_server_itself_compiles_nothing_and_answers_as_eager(cold):
    assert_nothing_compiled(cold["end"])
    told = [cold["after"], *(one for one, _, _ in cold["meanwhile"])]
    assert [one["compiled_now"] for one in told] == [0] * len(told)
    assert cold["after"]["served"] == {"Wide": "precompiled", "Norm": "precompiled"}
    assert all(difference < TOLERANCE for difference in (cold["difference"], *(far for _, far, _ in cold["meanwhile"])))
    assert cold.processes == 1


def test_the_server_loads_the_kernels_of_the_second_process_and_builds_none(cold, folder):
    (second,) = folder.glob("cache/[a-j]")
    server = second.with_name(second.name.translate(str.maketrans("abcdefghij", "0123456789")))
    kernels = {path.relative_to(server) for path in server.rglob("*.so")}
    assert kernels
    assert kernels <= {path.relative_to(second) for path in second.rglob("*.so")}


def test_weights_buffers_and_inputs_stay_where_they_are_bit_by_bit(cold):
    assert all(unchanged for _, _, unchanged in cold["meanwhile"])
    assert cold["unchanged"]
    assert cold["unchanged_at_the_end"]
    assert cold["x_unchanged"]


def test_a_call_of_a_new_kind_is_served_eager_at_once_and_precompiled_later(cold):
    at_once, later, difference = cold["lengths"][0]
    assert at_once["served"] == {"Wide": "eager"}
    assert at_once["compiling"] == 1
    assert later["served"] == {"Wide": "precompiled"}
    assert difference < TOLERANCE


def test_from_the_third_length_on_one_graph_serves_all_lengths(cold):
    third, *others = cold["lengths"][1:]
    assert [told["served"]["Wide"] for told in third[:2]] == ["eager", "precompiled"]
    assert [at_once["served"]["Wide"] for at_once, _, _ in others] == ["precompiled"] * 3
    assert all(difference < TOLERANCE for _, _, difference in others)
    assert cold.done == ["Wide 4x16", "Norm 4x16", "Wide 5x16", "Wide 6x16"]


def test_the_next_boot_is_a_hit_and_starts_no_second_process(warm):
    ready = warm["ready"]
    assert ready["restore"]["outcome"] == "hit"
    assert ready["fully_precompiled"]
    assert_nothing_compiled(ready)
    assert ready["counts"]["precompiled_loaded"] >= 2
    assert ready["counts"]["kernels_compiled"] == 0
    assert warm.processes == 0
    assert warm["waiting"] == 0


def test_the_next_boot_serves_every_length_at_once(warm):
    assert [told["served"] for told, _ in warm["steps"]] == [{"Wide": "precompiled"}] * 4
    assert all(difference < TOLERANCE for _, difference in warm["steps"])
    assert_nothing_compiled(warm["report"])


def test_a_model_that_is_given_after_ready_is_compiled_too(tmp_path):
    told = play(tmp_path, "after_ready")
    assert told["at_once"]["served"] == {"Wide": "eager"}
    assert told["is_done"]
    assert told["later"]["served"] == {"Wide": "precompiled"}
