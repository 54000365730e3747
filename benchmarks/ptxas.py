"""Counts the runs of ptxas, NVIDIA's assembler, which Triton starts once for each kernel that it compiles.

Triton takes the program from a variable, and so do Inductor's compile workers, which inherit it: a script stands there
that adds a line to a log and becomes the real one. Asking for its version, as Triton does for its keys, does not count.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

# The second one is for GPUs of compute capability 10 and above (triton/backends/nvidia/compiler.py: get_ptxas).
_VARIABLES = {"TRITON_PTXAS_PATH": "ptxas", "TRITON_PTXAS_BLACKWELL_PATH": "ptxas-blackwell"}
_LOG_VARIABLE = "PTXAS_LOG"
_SCRIPT = """\
#!/bin/sh
case " $* " in
*" --version "*) ;;
*) echo "$*" >> "${{{variable}:-/dev/null}}" ;;
esac
exec {program} "$@"
"""


def install_counters(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Write the scripts into `folder`; the variables that make Triton use them, none where there is no Triton.

    The variables begin with TRITON_, so they are part of the environment's key: set them in all boots, or in none.
    """
    variables = {}
    for variable, name in _VARIABLES.items():
        program = environ.get(variable) or _bundled(name)
        if program is not None:
            script = folder / f"counted-{name}"
            script.write_text(_SCRIPT.format(variable=_LOG_VARIABLE, program=shlex.quote(program)))
            script.chmod(0o755)
            variables[variable] = str(script)
    return variables


def log_to(path: Path) -> dict[str, str]:
    """The variable that tells the scripts where to log."""
    return {_LOG_VARIABLE: str(path)}


def count_runs(log: Path) -> int:
    """How often ptxas ran."""
    return len(log.read_text().splitlines()) if log.exists() else 0


def _bundled(name: str) -> str | None:
    """The path of the program that comes with Triton. Does not import Triton."""
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    program = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name
    return str(program) if os.access(program, os.X_OK) else None
