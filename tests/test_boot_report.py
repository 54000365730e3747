"""The report: when a boot may call itself fully cached, and the forms it is read in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import blocks
import pytest
import torch
from boots import TESTS
from precompiling import boot, build, only_report, tensor, warm_up, warmed
from toy_model import ToyModel

from compile_cache.inductor.counters import read_counts
from compile_cache.inductor.make import Answer, compare_speed
from compile_cache.lifecycle.boot_report import BootReport, CompileCounts, PublishReport, RefusedPack, RestoreReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.settings import Settings


def warm_report() -> BootReport:
    """A boot that restored all it needed."""
    return BootReport(
        phases={"weights": 1.5, "warm_up": 2.0},
        ready_s=4.25,
        restore=RestoreReport("hit", packs=1, files=12, stored_bytes=3_000_000, seconds=0.5, waited_s=0.1),
        counts=CompileCounts(graphs=2, hits=4),
        regions=[
            RegionReport("Block", 12, "graphs", graphs=1, compare_s=0.25, relative_error=1e-7, tolerance=1e-5),
            RegionReport("Head", 1, "graphs", graphs=1, compare_s=0.5, relative_error=1e-8, tolerance=1e-5),
        ],
    )


def test_a_boot_with_hits_is_fully_cached_and_not_precompiled_whatever_it_made_for_the_next_boot():
    report = warm_report()
    assert (report.fully_cached, report.fully_precompiled) == (True, False)
    report.counts.precompiled_made = 2
    assert report.fully_cached


def change(report: BootReport, path: str, value: object) -> BootReport:
    """Sets an attribute, such as `regions.1.settled`."""
    *parents, name = path.split(".")
    found: Any = report
    for parent in parents:
        found = found[int(parent)] if parent.isdigit() else getattr(found, parent)
    setattr(found, name, value)
    return report


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("regions.1.relative_error", None),
        ("regions", []),
        *(("regions.1.settled", step) for step in ("unused", "eager")),
        ("counts", CompileCounts(graphs=2)),
        *((f"counts.{name}", 1) for name in ("misses", "benchmarks", "kernels_compiled")),
    ],
)
def test_one_region_unchecked_or_below_cached_no_hit_or_anything_made_anew_is_not_fully_cached(path, value):
    assert not BootReport().fully_cached
    assert not change(warm_report(), path, value).fully_cached


def precompiled_report() -> BootReport:
    """A boot that restored all it needed, and traced nothing."""
    report = warm_report()
    report.counts = CompileCounts(precompiled_loaded=3)
    for region in report.regions:
        region.settled, region.graphs, region.loaded = "precompiled", 0, 1
    return report


def test_a_boot_of_precompiled_regions_alone_is_fully_cached_and_fully_precompiled():
    report = precompiled_report()
    assert report.fully_cached
    assert report.fully_precompiled
    assert json.loads(report.to_json())["fully_precompiled"]
    report.regions[1].settled = "late"
    assert report.fully_precompiled


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *(("regions.1.settled", step) for step in ("unused", "eager", "graphs")),
        ("counts.precompiled_loaded", 0),
        ("counts.misses", 1),
    ],
)
def test_one_region_not_precompiled_nothing_loaded_or_a_miss_is_not_fully_precompiled(path, value):
    assert not change(precompiled_report(), path, value).fully_precompiled


def test_a_precompiled_boot_lacks_nothing_whatever_is_late_or_left_eager_by_the_user():
    report = precompiled_report()
    report.regions[1].settled = "late"
    left = RegionReport("Tail", 2, "eager", is_left_eager=True)
    report.regions.append(left)
    assert report.missing() == []
    assert BootReport(restore=RestoreReport("hit"), regions=[left]).missing() == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("restore", RestoreReport("miss", "nothing is stored"), "restore: miss (nothing is stored), 0 files"),
        ("restore", RestoreReport("seeded", seeded_from="1"), "restore: seeded from version 1"),
        ("regions.1.settled", "graphs", "region Head: graphs (its reason)"),
        ("regions.0.waiting", 1, "region Block: eager (no code is stored for its calls)"),
        ("regions", [], "precompiled: 3 loaded"),
        ("counts.benchmarks", 7, "7 benchmarks"),
    ],
)
def test_what_a_boot_lacks_is_named_with_the_reason(path, value, said):
    report = precompiled_report()
    report.regions[1].reason = "its reason"
    (line,) = change(report, path, value).missing()
    assert said in line


def test_hits_and_misses_add_up_both_caches_and_count_bypasses_as_misses(monkeypatch):
    inductor = {f"fxgraph_cache_{how}": 10**place for place, how in enumerate(("hit", "miss", "bypass"))}
    aotautograd = {f"autograd_cache_{how}": 2 * 10**place for place, how in enumerate(("hit", "miss", "bypass"))}
    counters = {"inductor": inductor, "aot_autograd": aotautograd}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    counts = read_counts()
    assert (counts.hits, counts.misses) == (3, 330)


def test_compile_seconds_are_the_sum_over_regions_without_what_was_made_for_the_next_boot():
    report = warm_report()
    report.regions[0].compile_s = 100.0
    assert report.compare_s == 0.75


def test_json_has_every_field_and_the_derived_figures():
    report = warm_report()
    report.restore.refused.append(RefusedPack("abc.pack", "it is damaged"))
    report.publish = PublishReport(packs=1, failures=["the store said no"])
    told = asdict(report) | {"compare_s": 0.75, "fully_cached": True, "fully_precompiled": False}
    told["regions"] = [{**region, "step": "graphs"} for region in told["regions"]]
    assert json.loads(report.to_json()) == told


def test_json_is_json_even_where_a_region_differs_infinitely_from_eager():
    """Python writes `Infinity`, which is not JSON (RFC 8259, section 6) and which other readers refuse."""
    report = warm_report()
    report.regions[0].relative_error = float("inf")
    json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_report_is_written_whole_into_folders_made_for_it_and_replaced(tmp_path):
    path = tmp_path / "a" / "b" / "report.json"
    for report in (BootReport(path=str(path)), replace(warm_report(), path=str(path))):
        report.save()
        assert path.read_text() == report.to_json()
        assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def saved_by_a_process(path: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """A process that writes a line, saves its long report twice, and writes another line."""
    program = (
        "import sys; from compile_cache.lifecycle.boot_report import BootReport; print('before', flush=True);"
        "report = BootReport(path=sys.argv[1], model_name='x' * 100_000); report.save(); report.save(); print('after')"
    )
    return subprocess.run([sys.executable, "-c", program, path], cwd=TESTS.parent, text=True, check=True, **streams)


def assert_has_both(text: str) -> None:
    assert (text.split()[0], text.split()[-1], text.count('"model_name": "x')) == ("before", "after", 2)


def test_a_report_goes_through_stdout_and_replaces_neither_a_link_to_it_nor_its_file(tmp_path):
    link, log = tmp_path / "link", tmp_path / "log"
    link.symlink_to("/dev/stdout")
    assert_has_both(saved_by_a_process(str(link), stdout=subprocess.PIPE).stdout)
    for path in (link, log):
        with log.open("w") as file:
            saved_by_a_process(str(path), stdout=file)
        assert_has_both(log.read_text())
    assert str(link.readlink()) == "/dev/stdout"


def test_a_report_goes_through_a_link_to_a_file_and_through_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "mounted" / "report.json")
    os.mkfifo(tmp_path / "pipe")
    with (
        (tmp_path / "read").open("w") as read,
        subprocess.Popen(["cat", tmp_path / "pipe"], stdout=read),
        (tmp_path / "pipe").open("w"),  # once this is open, there is a reader
    ):
        for name in ("link", "pipe"):
            BootReport(path=str(tmp_path / name), model_name="x" * 100_000).save()
    for name in ("mounted/report.json", "read"):
        assert json.loads((tmp_path / name).read_text())["model_name"] == "x" * 100_000
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("name", ["pipe", "/dev/full", "file/report.json"])
def test_a_report_that_cannot_be_written_is_an_event_of_its_own_once(tmp_path, name, caplog):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    report = BootReport(path=str(tmp_path / name))
    for _ in range(3):
        report.save()
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"report.failed error=the report is not written to {tmp_path / name}: ")


def test_lines_tell_the_restore_the_regions_the_lookups_and_the_time():
    assert warm_report().lines() == [
        "restore: hit, 12 files, 3.0 MB in 0.50 s, waited 0.10 s",
        "region Block x12: graphs, 0.25 s, differs from eager by 1.0e-07",
        "region Head x1: graphs, 0.50 s, differs from eager by 1.0e-08",
        "precompiled: 0 loaded, 0 made; lookups: 4 hits, 0 misses; anew: 0 kernels, 0 benchmarks",
        "ready after 4.25 s (weights 1.50 s, warm_up 2.00 s, of which comparing 0.75 s)",
    ]


def test_lines_name_reasons_refused_packs_warnings_and_what_was_loaded_and_made():
    report = warm_report()
    report.counts = CompileCounts(precompiled_loaded=3, precompiled_made=1)
    refused = [RefusedPack("abc.pack", "it is damaged"), RefusedPack("def.pack", "no answer", is_final=False)]
    report.restore = RestoreReport("failed", "no answer", refused=refused)
    report.regions[0].settled, report.regions[0].reason = "eager", "nothing is stored"
    report.warnings = ["could not write"]
    lines = report.lines()
    assert lines[0].startswith("restore: failed (no answer), ")
    assert {"refused pack abc.pack: it is damaged", "unread pack def.pack: no answer"} <= {*lines}
    assert "precompiled: 3 loaded, 1 made; lookups: 0 hits, 0 misses; anew: 0 kernels, 0 benchmarks" in lines
    assert any(line.startswith("region Block x12: eager (nothing is stored)") for line in lines)
    assert "warning: could not write" in lines


def test_metrics_are_flat_rounded_and_prefixed():
    assert warm_report().metrics() == {
        "compile_cache.ready_s": 4.25,
        "compile_cache.restore_s": 0.5,
        "compile_cache.compare_s": 0.75,
        "compile_cache.restore": "hit",
        "compile_cache.regions": {"Block": "graphs", "Head": "graphs"},
        "compile_cache.precompiled": 0,
        "compile_cache.hits": 4,
        "compile_cache.misses": 0,
    }


# What it says of a region besides its step: how fast it is, that it is left eager, and what torch met in it.


def test_a_class_that_is_left_eager_is_not_compiled_and_the_report_says_why(directory):
    model = build(ToyModel)
    compiler = boot(directory, model, settings=Settings(leave_eager=("NormBlock", "Missing"), graphs=("Gone",)))
    warm_up(compiler, lambda: model(torch.ones(4, 16)))
    reports = {report.name: report for report in compiler.reports}
    assert (reports["WideBlock"].step, reports["NormBlock"].step) == ("precompiled", "eager")
    assert reports["NormBlock"].instances == 2
    assert reports["NormBlock"].reason == "left eager by COMPILE_CACHE_LEAVE_EAGER"
    left, asked = compiler.unknown_class_warnings()
    assert ("LEAVE_EAGER names Missing" in left, "GRAPHS names Gone" in asked) == (True, True)
    assert "NormBlock, WideBlock" in left


def test_a_boot_is_fully_precompiled_whatever_is_left_eager():
    left = RegionReport("Left", 1, "eager", is_left_eager=True)
    good = RegionReport("Good", 1, "precompiled", loaded=1, relative_error=0.0, tolerance=1e-3)
    report = BootReport(regions=[good, left])
    report.counts.precompiled_loaded = 1
    assert report.fully_precompiled
    left.is_left_eager = False
    assert not report.fully_cached


def test_an_artifact_that_was_made_is_timed_and_one_that_was_found_is_not(directory):
    module = build(blocks.Block)
    made = warmed(directory, module)
    found = warmed(directory, module)
    assert (only_report(made).made, only_report(found).loaded) == (1, 1)
    assert only_report(made).speedup > 0
    assert only_report(found).speedup is None


def test_timing_changes_no_input(directory):
    module = build(blocks.Pair)
    inputs: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        inputs[:] = tensor(16, 16), tensor(16, 16, seed=2)
        return module(*inputs)

    compiler = boot(directory, module)
    answer = warm_up(compiler, call)
    x, y = inputs
    expected = tensor(16, 16).mm(y.T)
    assert only_report(compiler).speedup is not None
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(answer, expected.mm(y))


@pytest.mark.parametrize(("compiled_ms", "eager_ms", "speed"), [(1.0, 1.32, 1.32), (1.0, 0.95, 0.95), (1.5, 1.0, 0.67)])
def test_the_report_says_how_fast_a_region_is(compiled_ms, eager_ms, speed):
    region = RegionReport("Block", 1, "precompiled")
    region.note_made(Answer(compiled_ms=compiled_ms, eager_ms=eager_ms))
    assert f"region Block x1: precompiled, 0.00 s, {speed} x eager's speed" in BootReport(regions=[region]).lines()


def test_the_times_of_a_region_are_those_of_its_slowest_call():
    region = RegionReport("Block", 1)
    for compiled_ms, eager_ms in ((2.0, 4.0), (0.1, 0.2)):
        region.note_made(Answer(compiled_ms=compiled_ms, eager_ms=eager_ms))
    assert (region.compiled_ms, region.eager_ms) == (2.0, 4.0)
    assert BootReport(regions=[region]).metrics()["compile_cache.speedup"] == {"Block": 2.0}


def test_the_time_of_compiled_code_is_not_taken_for_eagers():
    call = torch.nn.Identity(), (torch.ones(1),), {}
    compiled_ms, eager_ms = compare_speed(lambda *_: time.sleep(0.1), lambda: call)
    assert compiled_ms >= 100 > eager_ms
