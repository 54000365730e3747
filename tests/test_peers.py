"""The tables that benchmarks/peers.py makes of its boots, which take minutes and are not run here."""

from __future__ import annotations

from cog_server import PROJECT
from fresh_boot import read_lines
from peers import tables


def test_readme_has_the_tables_of_the_records():
    page = (PROJECT / "benchmarks" / "README.md").read_text()
    for part in tables(read_lines(PROJECT / "benchmarks" / "peers-h200.jsonl")).split("\n\n"):
        assert not part.startswith("|") or part in page
