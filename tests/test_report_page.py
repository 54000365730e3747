"""`compile-cache report`: the page and the trace of real boots, and what becomes of bad input."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from boots import after, boot_once
from commands import Run, run_command
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from compile_cache.cli.report_page import timeline_of
from compile_cache.errors import RefusedPack
from compile_cache.lifecycle.boot_report import BootReport, RestoreReport
from compile_cache.serving.region_report import RegionReport
from compile_cache.timeline import Span, Timeline, note


class Page:
    """A page that was read: its elements, and the text of its body. It is written so that it is XML, too."""

    def __init__(self, path: Path) -> None:
        root = ElementTree.fromstring(path.read_text())
        (body,) = root.iter("body")
        self.text = "\n".join(body.itertext())
        self.tags = [(element.tag, element.attrib) for element in root.iter()]
        self.sections = [attributes["id"] for tag, attributes in self.tags if tag == "section"]

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


@pytest.fixture
def run(tmp_path) -> Run:
    """Runs `report`; the page is `page.html`."""
    return functools.partial(run_command, "report", "-o", tmp_path / "page.html")


@pytest.fixture
def page(tmp_path) -> Callable[[], Page]:
    return lambda: Page(tmp_path / "page.html")


@pytest.fixture(scope="module")
def booted(cold, tmp_path_factory) -> tuple[Path, Mapping[str, Any]]:
    """A folder with the reports of a cold boot and of one that it restored, and the latter."""
    folder = tmp_path_factory.mktemp("restored")
    restored = boot_once(after(cold[0], folder, report=str(folder / "reports" / "restored.json")))
    (folder / "reports" / "cold.json").write_text((cold[0] / "report.json").read_text())
    return folder / "reports", restored.report


def spans(report: Mapping[str, Any], lane: str) -> dict[str, dict[str, Any]]:
    return {span["name"]: span for span in report["spans"] if span["lane"] == lane}


def end_s(span: Mapping[str, Any]) -> float:
    return span["start_s"] + span["seconds"]


# The timeline of a real boot


def test_a_cold_boots_spans_say_which_thread_did_what(cold):
    report = cold[1].report
    setup, regions = spans(report, "setup"), spans(report, "regions")
    assert {name: span["seconds"] for name, span in setup.items()} == report["phases"]
    assert {"key", "fetch"} <= spans(report, "restore").keys()
    assert {f"{name}: compare" for name in cold[1].steps} <= regions.keys()
    assert {name.partition(" ")[0] for name in spans(report, "second process")} == cold[1].steps.keys()
    warm_up = setup["warm_up"]
    for span in regions.values():
        assert warm_up["start_s"] <= span["start_s"]
        assert end_s(span) <= end_s(warm_up)


def test_a_boot_publishes_after_ready(cold):
    report = json.loads((cold[0] / "report.json").read_text())
    published = spans(report, "publish")
    assert list(published) == ["pack", "put"]
    assert all(span["start_s"] >= report["ready_s"] for span in published.values())


def test_a_restored_boot_compares_and_compiles_nothing(booted):
    assert {name.rpartition(": ")[2] for name in spans(booted[1], "regions")} == {"compare"}


def test_timelines_of_all_boots_keep_the_first_256_spans_that_began_after_them():
    timelines = Timeline(), Timeline()
    note("setup", "before both", 0.0)
    for number in range(300):
        note("setup", str(number), 1e12, 1.0)
    names = [str(number) for number in range(256)]
    assert [[span.name for span in timeline.spans] for timeline in timelines] == [names] * 2


# The page


def test_the_page_of_real_boots_has_every_section(run, page, booted, tmp_path):
    reports, restored = booted
    found = run(*reports.iterdir(), reports / "cold.json")
    assert (found.code, found.err) == (0, "")
    assert found.out == f"wrote {tmp_path / 'page.html'}: 2 boots\n", "a report given twice is one boot"
    shown = page()
    assert shown.sections == ["newest", "boots", "history"]
    said = "Boots of toy--model", "All regions were loaded from the store.", "no version of toy--model is stored"
    for text in (*said, "WideBlock x2", "NormBlock x2", "precompiled"):
        assert text in shown.text
    assert f"READY after {restored['ready_s']:.2f} s" in "\n".join(shown.values("aria-label"))
    for lane in ("setup", "regions", "restore", "publish"):
        assert f"\n{lane}\n" in shown.text


def test_the_page_loads_nothing_runs_nothing_and_its_links_lead_somewhere(run, page, booted):
    run(*booted[0].iterdir())
    shown = page()
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in shown.tags}
    assert shown.values("src") == []
    assert {link.removeprefix("#") for link in shown.values("href")} <= set(shown.values("id"))
    assert len(set(shown.values("id"))) == len(shown.values("id"))
    assert "url(" not in "".join(shown.values("style"))


def test_whatever_a_report_says_is_text(run, page, tmp_path):
    attack = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\x1b[31m</style>"
    report = BootReport(attack, attack, attack, scope="regional", phases={attack: 1.0}, ready_s=1.0)
    report.restore = RestoreReport("miss", attack, problems=[attack], refused=[RefusedPack(attack, attack)])
    report.regions = [RegionReport(attack, 1, "eager", reason=attack, not_precompiled=[attack])]
    report.warnings, report.spans = [attack], [Span(attack, attack, 0.0, 1.0)]
    (tmp_path / "report.json").write_text(json.dumps(json.loads(report.to_json())))
    assert run(tmp_path / "report.json").code == 0
    shown = page()
    assert not {"script", "img"} & {tag for tag, _ in shown.tags}
    assert not [name for _, attributes in shown.tags for name in attributes if name.startswith("on")]
    assert "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&lt;\\x1b[31m</style>" in shown.text


def test_a_second_process_is_drawn_long_after_ready_and_work_that_is_not_drawn_is_counted(run, page, tmp_path):
    spans = [Span("second process", "Block 4x16", 2.0, 20.0), Span("publish", "put", 900.0, 1.0)]
    BootReport(ready_s=4.0, spans=spans, path=str(tmp_path / "report.json")).save()
    run(tmp_path / "report.json")
    assert "Block 4x16\n\N{NO-BREAK SPACE}20.0 s" in page().text
    assert "Later work that is not drawn: 1 span." in page().text


@pytest.mark.parametrize(
    ("regions", "said"),
    [
        ([], "Nothing was given to compile."),
        ([RegionReport("Block", 1, "eager", waiting=2)], "2 kinds of calls were served eager: a second process"),
        ([RegionReport("Block", 1, "precompiled", made=1)], "Not everything came from the cache: 1 function compiled"),
        ([RegionReport("Block", 1, "eager")], "Not everything came from the cache: the regions say why."),
    ],
)
def test_the_page_says_in_a_sentence_how_a_boot_went(run, page, tmp_path, regions, said):
    BootReport(scope="regional", ready_s=1.0, regions=regions, path=str(tmp_path / "report.json")).save()
    run(tmp_path / "report.json")
    assert said in page().text


times_s = st.floats(0.0, 1e15, exclude_max=True)
lanes = st.sampled_from(["setup", "regions", "publish", "second process", "new"])


@examples(max_examples=60)
@given(st.lists(st.builds(Span, lanes, st.text(max_size=30), times_s, times_s), max_size=12), times_s)
def test_bars_and_their_labels_stay_in_the_timeline_and_do_not_overlap(spans, ready_s):
    drawn = timeline_of(BootReport(ready_s=ready_s, spans=spans))
    assert 0.0 <= drawn["ready"] <= 100.0
    assert 1 <= len(drawn["ticks"]) <= 8
    for row in (row for rows in drawn["lanes"].values() for row in rows):
        free_from = 0.0
        for bar in row:
            assert bar.left >= free_from - 0.21, "a bar is at least 0.2 percent wide, to be seen"
            free_from = bar.left + bar.width
            assert free_from <= 100.001
        ends = [*(bar.left for bar in row[1:]), 100.0]
        assert all(0 <= bar.room <= end - bar.left + 0.21 for bar, end in zip(row, ends, strict=True))


# Bad input


ENOUGH = '{"restore": {}, "regions": [], "phases": {}, "ready_s": %s}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("no JSON", "JSON is malformed"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "it lacks ready_s"),
        ('{"ready_s": NaN}', "JSON is malformed"),
        ('{"ready_s": 1e999}', "Number out of range"),
        (ENOUGH % '1, "restore": {"files": "two"}', "got `str` - at `$.restore.files`"),
        (ENOUGH % '1, "phases": {"weights": "long"}', "`float`, got `str`"),
        (ENOUGH % '1, "warnings": null', "got `null` - at `$.warnings`"),
        (ENOUGH % '1, "regions": [{}]', "missing required field `name`"),
        ('{"phases": ' + "[" * 100_000, "Expected `object`, got `array`"),
    ],
)
def test_what_is_no_report_is_an_error_that_names_file_reason_and_remedy(run, tmp_path, content, reason):
    path = tmp_path / "b.json"
    path.write_text(content)
    found = run(path)
    assert found.code == 1
    assert found.err.startswith(f"error: {path} is no boot report")
    assert reason in found.err
    assert "Give a file that a boot has written" in found.err
    assert len(found.err.splitlines()) == 1
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_cannot_be_read_and_a_folder_are_errors(run, tmp_path):
    nowhere, pipe = tmp_path / "nowhere", tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(nowhere).err == f"error: cannot read {nowhere}: No such file or directory\n"
    for path in (tmp_path, pipe):
        assert "it is not a regular file" in run(path).err


@pytest.mark.parametrize("name", ["other.json", ".", "folder.html"])
def test_the_page_replaces_no_report_and_no_folder(run, tmp_path, name):
    (tmp_path / "folder.html").mkdir()
    reports = [tmp_path / "boot.json", tmp_path / "other.json"]
    for path in reports:
        path.write_text(BootReport(ready_s=1.0).to_json())
    written = reports[0].read_text()
    found = run(reports[0], "--output", tmp_path / name)
    assert (found.code, found.out) == (1, "")
    assert "ends with .html" in found.err
    assert [path.read_text() for path in reports] == [written] * 2
    assert (tmp_path / "folder.html").is_dir()
