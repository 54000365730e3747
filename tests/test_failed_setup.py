"""Setups that fail in a real Cog server, and what the container's log then has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from boots import python_path, settings
from cog_server import PROJECT, CogServer
from marked_processes import wait_for

PREDICT = """
import compile_cache
from cog import BaseRunner


class Predictor(BaseRunner):
    def setup(self) -> None:
        with compile_cache.boot("outer"), compile_cache.boot("inner"):
            load()

    def run(self) -> str:
        return ""


def load() -> None:
    raise ValueError("there are no weights")
"""
CONFIGURED = "import logging\nlogging.basicConfig(level=logging.WARNING, format='%(message)s')\n"


def fail(folder: Path, predict: str, **variables: str) -> tuple[dict[str, Any], list[str], int]:
    """The health check of a server whose setup fails, the setup's lines in its log, and its exit code."""
    (folder / "predict.py").write_text(predict)
    environ = settings(folder, **variables) | {"PYTHONPATH": python_path(PROJECT)}
    with CogServer("predict.py:Predictor", folder / "server.log", environ, folder) as running:
        wait_for(lambda: running.health().get("status") not in (None, "STARTING"))
        health = running.health()
    exit_code = running.process.wait()
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    return health, [line["fields"]["message"] for line in lines if line["target"] == "coglet::setup"], exit_code


@pytest.mark.parametrize("configured", ["", CONFIGURED], ids=["the library's log", "a configured log"])
def test_the_error_and_its_traceback_are_in_the_log_once_for_two_boots(tmp_path, configured):
    health, lines, exit_code = fail(tmp_path, configured + PREDICT, scope="off")
    assert (health["status"], exit_code) == ("SETUP_FAILED", 0)
    (said,) = [number for number, line in enumerate(lines) if line.startswith("setup.failed")]
    assert lines[said] == "setup.failed The setup failed: ValueError: there are no weights"
    assert lines[said + 1].startswith("Traceback")
    assert sum(line.endswith("in load") for line in lines) == 1
    assert "in load" not in json.dumps(health)


def test_an_error_before_the_context_is_not_in_the_log(tmp_path):
    _, lines, _ = fail(tmp_path, PREDICT.replace("with ", "load()\n        with "), scope="off")
    assert not lines
