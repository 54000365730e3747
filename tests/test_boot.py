"""Boots, each in a process of its own: restored, faulty, or on a host that lacks something."""

from __future__ import annotations

import contextlib
import sys
import threading

import pytest
from boots import ONE_CLASS, TESTS, after, assert_fully_warm, boot_once, run_boot, settings, stored
from namespaces import mounted

import compile_cache


def test_cold_boot_compiles_and_publishes_everything(cold):
    folder, booted = cold
    assert set(booted.steps.values()) == {"precompiled"}
    assert booted.report["restore"]["outcome"] == "miss"
    assert booted.report["publish"]["failures"] == []
    assert booted.report["publish"]["files"] > 0
    assert any(name.endswith(".pack") for name in stored(folder / "store"))
    assert all(region["made"] > 0 and region["compile_s"] > 0 for region in booted.report["regions"])
    assert booted.report["counts"]["precompiled_made"] >= len(booted.report["regions"])
    assert booted.report["process_s"] >= booted.report["ready_s"] > 0


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="torch warns that guards run slower there")
def test_cold_boot_logs_nothing_of_other_libraries(cold):
    lines = cold[1].log.splitlines()
    assert any("background.begin" in line for line in lines)
    assert not [line for line in lines if ":compile_cache:" not in line]


def test_successor_with_other_code_does_not_use_the_precompiled_regions_nor_publish_them(cold, tmp_path):
    """Its code computes the same, so that only the checksum of the source tells."""
    environ = {**after(cold[0], tmp_path), "COMPILE_CACHE_MODEL_VERSION": "2"}
    (tmp_path / "code").mkdir()
    source = (TESTS / "toy_model.py").read_text()
    (tmp_path / "code" / "toy_model.py").write_text(source + "\n# another version\n")
    successor = boot_once(environ, "--code", str(tmp_path / "code"))
    assert successor.report["restore"]["outcome"] == "seeded"
    counts = successor.report["counts"]
    assert (counts["precompiled_loaded"], counts["precompiled_made"]) == (0, 2)
    again = boot_once(environ, "--code", str(tmp_path / "code"))
    assert_fully_warm(again)
    assert all(region["reason"] == "" for region in again.report["regions"])


def test_a_boot_that_is_entered_again_has_one_publisher(tmp_path):
    environ, names = settings(tmp_path), []
    with compile_cache.boot("org/model", environ=environ) as boot:
        pass
    for _ in "ab":
        with boot:
            names = [thread.name for thread in threading.enumerate()]
    assert names.count("compile-cache-publish") == 1
    assert boot.wait_published(60)
    boot.end_publishing()


def test_scope_off_is_eager_and_touches_no_store(cold, tmp_path):
    _, first = cold
    booted = boot_once(settings(tmp_path, scope="off"))
    assert booted.report["regions"] == []
    assert booted.report["counts"]["graphs"] == 0
    assert booted.output == pytest.approx(first.output, rel=1e-3)
    assert not (tmp_path / "store").exists()


def test_what_a_prediction_compiles_later_is_published_at_exit_and_restored_boots_compile_nothing(cold, tmp_path):
    _, first = cold
    environ = after(cold[0], tmp_path)
    booted = boot_once(environ, "--again", "8")
    assert booted.report["publish"]["files"] > 0
    again = boot_once(environ, "--again", "8")
    assert_fully_warm(again)
    assert again.output == booted.output == first.output
    assert again.report["publish"]["packs"] == 0, "the second boot found the later shape in the store"


def test_environment_that_torch_contradicts_discards_the_restore(cold, tmp_path):
    environ = after(cold[0], tmp_path)
    threads = int(environ["OMP_NUM_THREADS"]) + 1
    booted = boot_once(environ, "--thread-count", str(threads), "--restore-alone")
    assert booted.report["restore"]["outcome"] == "discarded"
    assert f"→ {threads}" in booted.report["restore"]["reason"]
    assert booted.report["restore"]["files"] == 0


def test_compiler_that_is_missing_leaves_those_regions_eager_that_need_one(tmp_path, cold):
    _, honest = cold
    booted = boot_once({**settings(tmp_path), "CXX": "/nowhere/g++"}, forked=False)
    assert booted.steps == {"WideBlock": "precompiled", "NormBlock": "eager"}
    assert "InvalidCxxCompiler" in next(r["reason"] for r in booted.report["regions"] if r["name"] == "NormBlock")
    assert booted.output == pytest.approx(honest.output, rel=1e-3)


def test_dynamo_that_is_switched_off_is_not_taken_for_compiled(tmp_path):
    booted = boot_once({**settings(tmp_path), "TORCHDYNAMO_DISABLE": "1"})
    assert set(booted.steps.values()) == {"eager"}
    assert not booted.report["fully_cached"]


def test_torch_compile_that_is_disabled_serves_eager_though_precompiled_regions_are_there(cold, tmp_path):
    _, first = cold
    booted = boot_once({**after(cold[0], tmp_path), "TORCH_COMPILE_DISABLE": "1"}, forked=False)
    assert set(booted.steps.values()) == {"eager"}
    assert booted.report["counts"]["precompiled_loaded"] == 0
    assert booted.output == pytest.approx(first.output, rel=1e-3)


def test_error_of_the_callers_passes_through_and_publishes_nothing(tmp_path):
    done = run_boot(settings(tmp_path) | ONE_CLASS, "--raise")
    assert done.returncode != 0
    assert "ValueError: the caller's own mistake" in done.stderr
    assert not (tmp_path / "store").exists()


def test_setting_that_is_wrong_fails_the_boot_and_names_the_variable(tmp_path):
    done = run_boot(settings(tmp_path, mode="fastest"))
    assert done.returncode != 0
    assert "COMPILE_CACHE_MODE='fastest'" in done.stderr


@pytest.mark.parametrize(
    ("options", "steps", "words"),
    [
        (None, {"precompiled"}, "Set COMPILE_CACHE_DIR to a writable folder"),
        ("ro", {"precompiled"}, "Read-only file system"),
        ("size=16k", {"precompiled", "eager"}, "No space left on device"),
    ],
    ids=["a file", "read-only", "full"],
)
def test_cache_directory_that_cannot_be_used_costs_the_cache_and_not_the_boot(cold, tmp_path, options, steps, words):
    environ = {**after(cold[0], tmp_path), "COMPILE_CACHE_DIR": str(tmp_path / "disk")}
    before = stored(tmp_path / "store")
    if options is None:
        (tmp_path / "disk").touch()
    with mounted(tmp_path / "disk", options) if options else contextlib.nullcontext():
        booted = boot_once(environ | ONE_CLASS)
    assert set(booted.steps.values()) <= steps
    assert any(words in line for line in [*booted.report["warnings"], booted.log])
    assert before.items() <= stored(tmp_path / "store").items()
