"""Run a program that a test has as text, as a program of forked_boots.py.

run_source.py SOURCE [ARGUMENT...]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    source = sys.argv.pop(1)
    exec(compile(source, "<a test's program>", "exec"), sys.modules["__main__"].__dict__)
