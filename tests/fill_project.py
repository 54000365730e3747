"""One `compile-cache fill` in the folder of a project, as a program of forked_boots.py.

fill_project.py FOLDER [ARGUMENT...]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from compile_cache.cli import main as command


def main() -> None:
    folder, *arguments = sys.argv[1:]
    os.chdir(folder)
    sys.argv[1:] = ["fill", *arguments]
    command()
