"""What another process can import, and under which name."""

from __future__ import annotations

import sys
import types
from pkgutil import resolve_name

import blocks
import pytest

from compile_cache.importable import reference, why_not


def test_what_can_be_imported_is_found_again():
    for value in (blocks, blocks.combine, blocks.Block, blocks.Block.factor):
        assert resolve_name(reference(value)) is value


@pytest.mark.parametrize("value", [lambda: None, 5, type("Made", (), {"__module__": "blocks"})])
def test_what_has_no_name_cannot_be_imported(value):
    with pytest.raises(LookupError, match="cannot be imported"):
        reference(value)


def test_modules_that_this_process_made_are_missing_in_another(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_here", types.ModuleType("made_here"))
    assert (
        why_not("made_here")
        == why_not("made_here.inner")
        == ("the module made_here was made in this process and cannot be imported")
    )
    assert "belongs to the main program" in why_not("__main__")
    assert why_not("blocks") == why_not("torch.nn.functional") == ""
