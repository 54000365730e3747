"""What another process can import, and under which name."""

from __future__ import annotations

import importlib
import sys
import types

import blocks
import pytest
from precompiling import activated, built, copied, only_report

from compile_cache.importable import find, reference, why_not


def test_what_can_be_imported_is_found_again():
    for value in (blocks, blocks.combine, blocks.Block, blocks.Block.factor):
        assert find(reference(value)) is value


@pytest.mark.parametrize("value", [lambda: None, 5, type("Made", (), {"__module__": "blocks"})])
def test_what_has_no_name_cannot_be_imported(value):
    with pytest.raises(LookupError, match="cannot be imported"):
        reference(value)


def test_modules_that_this_process_made_are_missing_in_another(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    reason = "the module made_here was made in this process and cannot be imported"
    assert why_not("made_here") == why_not("made_here.inner") == reason
    assert "belongs to the main program" in why_not("__main__")
    assert why_not("blocks") == why_not("torch.nn.functional") == ""


HUB_CODE = """
import blocks

LIMIT = object()

def scaled(x):
    return x * 3

class Block(blocks.Product):
    def forward(self, x):
        return scaled(super().forward(x)) if LIMIT is not None else x
"""


def test_code_from_the_hub_is_in_folders_named_after_commits(tmp_path, monkeypatch):
    """As `transformers_modules.org.repo-1.0a67c4.modeling`."""
    folder = tmp_path / "hub_code" / "repo-1" / "0a67c4"
    folder.mkdir(parents=True)
    (folder / "modeling.py").write_text(HUB_CODE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("hub_code.repo-1.0a67c4.modeling")
    for value in (module, module.Block, module.scaled):
        assert find(reference(value)) is value
    with activated(tmp_path / "first") as directory:
        built(directory, module.Block)
        with copied(directory, tmp_path / "second") as restored:
            _, compiler = built(restored, module.Block)
            assert (only_report(compiler).step, only_report(compiler).loaded) == ("precompiled", 1)
