"""Remembers torch's questions to the C++ compiler and the processor, so that a warm boot asks none; and keeps the
compiler's temporary files together.

Before torch loads C++ code, it starts the compiler to learn its version. It also starts a Python for each set of vector
instructions, to see whether such code can be loaded. These are nine processes of two seconds each on torch 2.11. The
answers are files of the cache directory like all others: `toolchain/<question>.json`.

This needs private names of torch, but none that functions compiled ahead of time need. If one is gone, torch asks as
usual.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile_cache.files import replacing
from compile_cache.key import environment
from compile_cache.key.environment import digest
from compile_cache.storage.directory import compilers_folder

log = logging.getLogger("compile_cache")

TOOLCHAIN = "toolchain"


class _Answers:
    """The answers in one cache directory."""

    folder: Path | None = None
    temporary = ""

    def ask(self, question: list[str], ask: Callable[[], Any]) -> Any:
        """The stored answer, else the result of `ask`. Only a true answer is stored, because a failure may have a
        passing cause."""
        question = [*question, environment.instruction_flags()]
        path = self.folder / f"{digest(question)}.json" if self.folder else None
        if path is None:
            return ask()
        try:
            return json.loads(path.read_bytes())["answer"]
        except (OSError, ValueError, KeyError, TypeError):  # no readable answer is stored
            pass
        if answer := ask():
            try:
                with replacing(path) as file:
                    file.write(json.dumps({"question": question, "answer": answer}).encode())
            except OSError as error:  # the next boot asks again
                log.info("toolchain.not_remembered error=%r", error)
        return answer


_answers = _Answers()


def remember_toolchain(directory: Path) -> None:
    """Store the answers in this cache directory from now on, and use the stored answers. torch's compilers have their
    temporary files beside it. `TMPDIR` stays, because torch's precompiled headers are there, and the program's files.
    """
    _answers.folder, _answers.temporary = directory / TOOLCHAIN, str(compilers_folder(directory))
    try:
        compiler: Any = importlib.import_module("torch._inductor.cpp_builder")
        if not isinstance(compiler.subprocess, types.ModuleType):
            return
        replaced = {"run": _run, "check_output": _check_output}
        compiler.subprocess = types.SimpleNamespace(**{**vars(subprocess), **replaced})
        # torch 2.15 leaves its own mark, and only looks whether it exists. But a seeded version publishes the files
        # that it has read.
        isa: Any = importlib.import_module("torch._inductor.cpu_vec_isa").VecISA
        isa.check_build = _remembering(isa.check_build)
    except (ImportError, AttributeError) as error:
        log.info("toolchain.not_configured error=%s", error)


def _remembering(check_build: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    """Wrap torch's function that compiles code for a set of instructions and loads it in another process."""

    @functools.wraps(check_build)
    def remembering(isa: Any, code: str) -> bool:
        question = ["loads", str(isa), isa.build_arch_flags(), isa._arch_flags, code]
        return bool(_answers.ask(question, lambda: check_build(isa, code)))

    return remembering


def _run(*command: Any, **options: Any) -> Any:
    """Run a compiler, whose temporary files are then removed with the cache directory's, also if it is killed."""
    return subprocess.run(*command, **{"env": {**os.environ, "TMPDIR": _answers.temporary}, **options})


def _check_output(command: Any, **options: Any) -> Any:
    """The compiler's answer to one question, such as its version."""

    def ask() -> Any:
        return subprocess.check_output(command, **options)

    is_question = isinstance(command, list) and len(command) == 2 and str(command[1]).startswith("-")
    if not is_question or options.get("text"):
        return ask()
    question = ["answers", *map(str, command), str(options.get("stderr"))]
    answer = _answers.ask(question, lambda: ask().decode("utf-8", "surrogateescape"))
    return answer.encode("utf-8", "surrogateescape")
