"""The compiling process, as far as the server's state goes: it makes each state that it is sent, and says what it is
in before, meanwhile and afterwards.

A request is a pickled pair on its input: a function of this module, by name, and the function's arguments.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import passes
import torch
from blocks import Block
from boots import TESTS, python_path
from precompiling import build, tensor

from compile_cache.errors import NotHandedOver
from compile_cache.inductor.stored_functions import Artifacts, versions
from compile_cache.inductor.toolchain import configure_torch
from compile_cache.inductor.torch_state import (
    ServerState,
    changed_options,
    describe_switches,
    options_digest,
    precisions,
    switches,
)
from compile_cache.settings import Settings


def facts(on_gpu: bool = False) -> dict[str, Any]:
    """Everything that the state of a process decides."""
    return {
        "switches": describe_switches(switches(on_gpu)),
        "precisions": precisions(),
        "options": sorted(repr(each) for each in changed_options() if not callable(each[2])),
        "digest": options_digest(),
        "versions": versions(),
    }


def make_state(state: ServerState) -> dict[str, Any]:
    """What this process is in before, within and after the state, or why it cannot be made."""
    configure_torch()
    answer: dict[str, Any] = {"before": facts(state.on_gpu)}
    try:
        with state.applied():
            answer["within"] = facts(state.on_gpu)
            answer["device"] = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    except NotHandedOver as error:
        answer["refused"] = str(error)
    return {**answer, "after": facts(state.on_gpu), "registered": passes.REGISTERED}


def make_artifact(state: ServerState, directory: Path) -> str:
    """Compile a block in the state; the path of the artifact."""
    with state.applied():
        return Artifacts(Settings(), directory).make((build(Block), (tensor(),), {})).path


def environment() -> dict[str, str]:
    """This process's, for one that can import the library and the tests' modules."""
    return {**os.environ, "PYTHONPATH": python_path(TESTS.parent, TESTS)}


class StateProcess:
    """A second process that serves the functions of this module."""

    def __enter__(self) -> StateProcess:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0

    def ask(self, function: str, *arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        pickle.dump((function, arguments), self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)


if __name__ == "__main__":
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        pickle.dump(globals()[name](*arguments), sys.stdout.buffer)
        sys.stdout.buffer.flush()
