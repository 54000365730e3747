"""What `import compile_cache` costs, against `import torch`: it must be small, since it comes first in every boot.

Each import is in a fresh process, the two in turns. Exits with 1 if it costs more than a quarter of torch, or loads
torch or a package that only the restore needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from table import markdown, spread

_ROOT = Path(__file__).resolve().parents[1]
_ROUNDS = 9
_BAR = 0.25
_NOT_LOADED = ("torch", "boto3", "zstandard")
_CHILD = """
import json, sys, time
started = time.perf_counter()
import {module}
print(json.dumps([time.perf_counter() - started, sorted(sys.modules)]))
"""


def import_once(module: str) -> tuple[float, list[str]]:
    """Seconds of the import alone, and all modules that are loaded after it."""
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    output = subprocess.run(
        [sys.executable, "-c", _CHILD.format(module=module)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    ).stdout
    seconds, loaded = json.loads(output)
    return seconds, loaded


def main() -> None:
    """Import in turns, compare, check."""
    import_once("torch")  # not measured: it fills the page cache
    _, loaded = import_once("compile_cache")
    times_s: dict[str, list[float]] = {"compile_cache": [], "torch": []}
    for _ in range(_ROUNDS):
        for module, seconds in times_s.items():
            seconds.append(import_once(module)[0])
    ratio = median(times_s["compile_cache"]) / median(times_s["torch"])
    too_much = [module for module in _NOT_LOADED if module in loaded]

    header = ("n", "import compile_cache, ms", "import torch, ms", "ratio", "bar", "loads torch, boto3 or zstandard")
    milliseconds = [spread((value * 1e3 for value in values), 1) for values in times_s.values()]
    print(markdown(header, [(_ROUNDS, *milliseconds, f"{ratio:.4f}", _BAR, ", ".join(too_much) or "no")]))
    if ratio > _BAR or too_much:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
