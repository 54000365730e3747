"""The README's picture of three boots."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from compile_cache.cli.report_page import read_report, seconds_text

DOCS = Path(__file__).resolve().parent.parent / "docs"
BOOTS = ("eager", "cold", "restored")


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_boot", DOCS / "draw_boot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(picture: Path) -> list[str]:
    root = ElementTree.fromstring(picture.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_picture_in_the_tree_is_what_the_script_draws_from_the_reports_beside_it(script, tmp_path):
    """Texts alone are compared: other versions of matplotlib write other numbers."""
    for name in ("first.svg", "second.svg"):
        script.draw(tmp_path / name)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
    assert texts(tmp_path / "first.svg") == texts(DOCS / "boot.svg"), "run python docs/draw_boot.py"


def test_the_picture_names_each_boots_time_and_has_colours_that_every_renderer_knows():
    shown = texts(DOCS / "boot.svg")
    for name in BOOTS:
        ready = f"READY {seconds_text(read_report(DOCS / 'boot' / f'{name}.json').ready_s)}"
        assert [text for text in shown if text.startswith(ready)]
    picture = (DOCS / "boot.svg").read_text()
    assert "var(" not in picture
    assert "fill: #f5ab77" in picture
    assert "@media" not in picture


def test_the_reports_beside_the_picture_are_of_three_kinds_and_name_no_folder_of_a_machine():
    reports = [read_report(DOCS / "boot" / f"{name}.json") for name in BOOTS]
    assert [report.restore.outcome for report in reports] == ["off", "miss", "hit"]
    for report in reports:
        assert not Path(report.store).is_absolute()
        assert not Path(report.cache_dir).is_absolute()
