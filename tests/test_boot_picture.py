"""The README's picture of three boots."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from compile_cache.cli.report_page import read_report, seconds_text

DOCS = Path(__file__).resolve().parent.parent / "docs"


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


def test_the_picture_names_the_time_of_three_kinds_of_boots_and_has_colours_that_every_renderer_knows():
    shown = texts(DOCS / "boot.svg")
    for name, outcome in (("eager", "off"), ("cold", "miss"), ("restored", "hit")):
        report = read_report(DOCS / "boot" / f"{name}.json")
        assert report.restore.outcome == outcome
        assert not {"/"} & {report.store[:1], report.cache_dir[:1]}, "no folder of a machine"
        assert [text for text in shown if text.startswith(f"READY {seconds_text(report.ready_s)}")]
    picture = (DOCS / "boot.svg").read_text()
    assert "var(" not in picture
    assert "fill: #f5ab77" in picture
    assert "@media" not in picture
