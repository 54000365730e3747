"""Programs that a test has as text, each run in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_program(
    source: str, *arguments: object, folder: str | os.PathLike[str] | None = None, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """The finished process of `source`, in `folder`, whatever its exit code. A variable that is None is not set."""
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in {**os.environ, **variables}.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=300,
    )
