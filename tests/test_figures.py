"""Figures of the pages: the README's picture of three boots, and what the benchmarks compute. The boots themselves take
minutes and are not run here."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from cog_server import PROJECT
from ready import pairs
from table import interval

from compile_cache.cli.report_page import read_report, seconds_text
from docs import draw_boot

DOCS = PROJECT / "docs"


def texts(picture: Path) -> list[str]:
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_in_the_tree_is_what_the_script_draws_from_the_reports_beside_it(tmp_path):
    """Texts alone are compared: other versions of matplotlib write other numbers."""
    draw_boot.draw(tmp_path / "boot.svg")
    assert texts(tmp_path / "boot.svg") == texts(DOCS / "boot.svg"), "run python docs/draw_boot.py"


def test_the_picture_names_the_time_of_three_kinds_of_boots_and_has_colours_that_every_renderer_knows():
    shown = texts(DOCS / "boot.svg")
    for name, outcome in (("eager", "off"), ("cold", "miss"), ("restored", "hit")):
        report = read_report(DOCS / "boot" / f"{name}.json")
        assert report.restore.outcome == outcome
        assert not {"/"} & {report.store[:1], report.cache_dir[:1]}, "no folder of a machine"
        assert [text for text in shown if text.startswith(f"READY {seconds_text(report.ready_s)}")]
    picture = (DOCS / "boot.svg").read_text()
    assert ["fill: #f5ab77" in picture, "var(" in picture, "@media" in picture] == [True, False, False]


# What the benchmarks compute.


def test_the_interval_holds_the_mean_with_90_percent_by_students_t():
    shown = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 2)  # 4.5 ± 1.895 · 2.449 / √8
    assert shown.startswith("mean 4.50, 90 % interval 2.86 to 6.14, median 4.50, n = 8 (1.00, 2.00,")
    assert interval([0.5], 2) == "0.50, n = 1"


def test_a_boot_without_its_counterpart_is_no_pair():
    ours, theirs = ([{"round": number, "value": number * scale} for number in (1, 2, 3)] for scale in (1.0, 10.0))
    assert pairs(ours, theirs[1:], lambda boot: boot["value"]) == [(2.0, 20.0), (3.0, 30.0)]
