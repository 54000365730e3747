"""What a report says of a region besides its step: how fast it is, that it is left eager, and what torch met in it."""

from __future__ import annotations

import blocks
import pytest
import torch
from precompiling import activated, boot, build, only_report, tensor, warm_up
from toy_model import ToyModel

from compile_cache.inductor.make import Answer
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings


def test_a_class_that_is_left_eager_is_not_compiled_and_the_report_says_why(tmp_path):
    with activated(tmp_path) as directory:
        model = build(ToyModel)
        compiler = boot(directory, model, settings=Settings(leave_eager=("NormBlock", "Missing")))
        warm_up(compiler, lambda: model(torch.ones(4, 16)))
    reports = {report.name: report for report in compiler.reports}
    assert (reports["WideBlock"].step, reports["NormBlock"].step) == ("cold", "eager")
    assert reports["NormBlock"].instances == 2
    assert reports["NormBlock"].reason == "left eager by COMPILE_CACHE_LEAVE_EAGER"
    (warning,) = compiler.left_eager_warnings()
    assert "Missing" in warning
    assert "NormBlock, WideBlock" in warning


def test_a_boot_is_fully_precompiled_whatever_is_left_eager():
    left = RegionReport("Left", 1, "eager", is_left_eager=True)
    good = RegionReport("Good", 1, "precompiled", loaded=1, relative_error=0.0, tolerance=1e-3)
    report = BootReport(regions=[good, left])
    report.counts.precompiled_loaded = 1
    assert report.fully_precompiled
    left.is_left_eager = False
    assert not report.fully_cached


def test_an_artifact_that_was_made_is_timed_and_one_that_was_found_is_not(tmp_path):
    with activated(tmp_path) as directory:
        module = build(blocks.Block)
        made = boot(directory, module)
        warm_up(made, lambda: module(tensor()))
        found = boot(directory, module)
        warm_up(found, lambda: module(tensor()))
    assert (only_report(made).made, only_report(found).loaded) == (1, 1)
    assert only_report(made).speedup > 0
    assert only_report(found).speedup is None


def test_timing_changes_no_input(tmp_path):
    with activated(tmp_path) as directory:
        module = build(blocks.Pair)
        x, y = tensor(16, 16), tensor(16, 16, seed=2)
        compiler = boot(directory, module)
        answer = warm_up(compiler, lambda: module(x, y))
        expected = tensor(16, 16).mm(y.T)
    assert only_report(compiler).speedup is not None
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(answer, expected.mm(y))


@pytest.mark.parametrize(
    ("compiled_ms", "eager_ms", "line"),
    [
        (1.0, 1.32, "region Block x1: cold, 0.00 s, 1.32 x eager's speed"),
        (1.0, 0.95, "region Block x1: cold, 0.00 s, 0.95 x eager's speed"),
        (
            1.5,
            1.0,
            "warning: Block is slower compiled: a compiled call takes 1.500 ms, an eager one 1.000 ms. "
            "COMPILE_CACHE_LEAVE_EAGER=Block leaves it eager.",
        ),
    ],
)
def test_the_report_says_how_fast_a_region_is(compiled_ms, eager_ms, line):
    region = RegionReport("Block", 1, "cold")
    region.note_made(Answer(compiled_ms=compiled_ms, eager_ms=eager_ms))
    assert line in BootReport(regions=[region]).lines()


def test_the_times_of_a_region_are_those_of_its_slowest_call():
    region = RegionReport("Block", 1)
    for compiled_ms, eager_ms in ((2.0, 4.0), (0.1, 0.2)):
        region.note_made(Answer(compiled_ms=compiled_ms, eager_ms=eager_ms))
    assert (region.compiled_ms, region.eager_ms) == (2.0, 4.0)
    assert BootReport(regions=[region]).metrics()["compile_cache.speedup"] == {"Block": 2.0}
