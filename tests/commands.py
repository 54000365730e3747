"""The command `compile-cache`, run in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from compile_cache.cli.app import app


@dataclass(frozen=True)
class Output:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


Run = Callable[..., Output]


def run_command(*arguments: str | Path, answer: str | None = None) -> Output:
    """Run a command; `answer` is its standard input. Raises the command's own error. Variables that the command sets
    for its process, as `fill` does, end with it."""
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Output(result.exit_code, result.stdout, result.stderr)
