"""Remembers which vector instructions code may use, so that a warm boot on a CPU compiles and starts no test of them.

Before torch loads C++ code, it compiles a test for each set of vector instructions, and loads it in a Python of its
own: two seconds each. The answers are files of the cache directory like all others: `toolchain/<question>.json`.

torch's function is wrapped, because its option `cpp.vec_isa_ok` answers for some of the sets only. torch 2.15 keeps a
mark of its own, but only looks whether it exists, and a seeded version publishes the files that it has read.

torch also asks the compiler its version, which takes milliseconds.

This needs private names of torch, but none that functions compiled ahead of time need. If one is gone, torch asks as
usual.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from pathlib import Path
from typing import Any

from compile_cache.files import replacing
from compile_cache.key import environment
from compile_cache.key.environment import digest

log = logging.getLogger("compile_cache")

TOOLCHAIN = "toolchain"
# The folder of the answers: the cache directory's that was opened last.
_folder: Path | None = None


def remember_toolchain(directory: Path) -> None:
    """Store the answers in this cache directory from now on, and use the stored answers."""
    global _folder
    _folder = directory / TOOLCHAIN
    try:
        isa: Any = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
        if getattr(isa.check_build, "__wrapped__", None) is None:
            isa.check_build = _remembering(isa.check_build)
    except (ImportError, AttributeError) as error:
        log.info("toolchain.not_configured error=%s", error)


def _remembering(check_build: Any) -> Any:
    """Wrap torch's test of a set of instructions. A stored answer is `true`: a failure may have a passing cause."""

    @functools.wraps(check_build)
    def remembering(isa: Any, code: str) -> bool:
        question = [str(isa), isa.build_arch_flags(), isa._arch_flags, code, environment.instruction_flags()]
        path = _folder / f"{digest(question)}.json" if _folder else None
        if path is not None and _is_known(path):
            return True
        loads = bool(check_build(isa, code))
        if loads and path is not None:
            try:
                with replacing(path) as file:
                    file.write(json.dumps({"question": question, "answer": True}).encode())
            except OSError as error:  # the next boot asks again
                log.info("toolchain.not_remembered error=%r", error)
        return loads

    return remembering


def _is_known(path: Path) -> bool:
    try:
        return json.loads(path.read_bytes())["answer"] is True
    except (OSError, ValueError, KeyError, TypeError):  # there is no readable answer
        return False
