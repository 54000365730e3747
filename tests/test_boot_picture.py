"""The drawing of a boot, and the README's picture of three."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from compile_cache.cli.report.drawing import draw_boot
from compile_cache.cli.report.lanes import lanes_of
from compile_cache.cli.report.reading import read_report
from compile_cache.lifecycle.report import BootReport
from compile_cache.timeline import Span

PROJECT = Path(__file__).resolve().parent.parent
DRAW_BOOT = PROJECT / "docs" / "draw_boot.py"

# The drawing

times_s = st.floats(0.0, 1e4, allow_nan=False)
any_spans = st.builds(
    Span, st.sampled_from(["setup", "regions", "publish", "new"]), st.text(max_size=30), times_s, times_s
)


@examples(max_examples=60)
@given(st.lists(any_spans, max_size=12), times_s, st.sampled_from([(1000.0, False), (340.0, True)]))
def test_every_drawing_is_xml_within_its_frame_and_no_texts_overlap(found, ready_s, shape):
    width, is_narrow = shape
    drawn = draw_boot(BootReport(ready_s=ready_s, spans=found), width, is_narrow)
    svg = ElementTree.fromstring(ElementTree.tostring(drawn, encoding="unicode"))
    for bar in svg.iter("rect"):
        assert 0.0 <= float(bar.get("x", "")) <= float(bar.get("x", "")) + float(bar.get("width", "")) <= width
    labels: dict[str, float] = {}
    for text in svg.iter("text"):
        if text.get("class") == "label":
            x, row = float(text.get("x", "")), text.get("y", "")
            assert x >= labels.get(row, 0.0)
            labels[row] = x + 5.5 * len(text.text or "")
            assert labels[row] <= width


def test_bars_that_overlap_are_in_rows_of_their_own():
    report = BootReport(ready_s=3.0, spans=[Span("regions", name, float(name), 1.5) for name in "012"])
    (lane,) = lanes_of(report)
    assert [[bar.name for bar in row] for row in lane.rows] == [["0", "2"], ["1"]]


# The README's picture


def test_the_picture_in_the_tree_is_what_the_script_draws_from_the_reports_beside_it():
    spec = importlib.util.spec_from_file_location("draw_boot", DRAW_BOOT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    reports = script.kept_reports()
    assert [report.restore.outcome for report in reports.values()] == ["off", "miss", "hit"]
    assert script.PICTURE.read_text() == script.draw(reports), f"run python {DRAW_BOOT}"


def test_the_picture_is_xml_light_and_dark_with_the_time_of_each_boot():
    text = (PROJECT / "docs" / "boot.svg").read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert "@media (prefers-color-scheme: dark)" in text
    for name in ("eager", "cold", "restored"):
        ready_s = read_report(PROJECT / "docs" / "boot" / f"{name}.json").ready_s
        assert f"READY {ready_s:.1f}"[:-1] in text


def test_the_reports_beside_the_picture_name_no_folder_of_a_machine():
    for path in (PROJECT / "docs" / "boot").glob("*.json"):
        report = read_report(path)
        assert not Path(report.store).is_absolute()
        assert not Path(report.cache_dir).is_absolute()
