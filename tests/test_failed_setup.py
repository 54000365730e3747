"""Setups that fail in a real Cog server, and what the container's log then has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from boots import ONE_CLASS, TESTS, python_path, settings, stored
from cog_server import PROJECT, CogServer
from marked_processes import wait_for

import compile_cache
from compile_cache.lifecycle.boot import observed_boots

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
TOY = "toy_predictor.py:Predictor"
CONFIGURED = "import logging\nlogging.basicConfig(level=logging.WARNING, format='%(message)s')\n"


def fail(folder: Path, predict: str, **variables: str) -> tuple[dict[str, Any], list[str], int]:
    """`serve` a predictor with this code in `folder`."""
    (folder / "predict.py").write_text(predict)
    return serve("predict.py:Predictor", folder, settings(folder, **variables) | {"PYTHONPATH": python_path(PROJECT)})


def serve(predictor: str, folder: Path, environ: dict[str, str]) -> tuple[dict[str, Any], list[str], int]:
    """The health check of a server after its setup, the setup's lines in its log, and its exit code."""
    project = TESTS if predictor == TOY else folder
    with CogServer(predictor, folder / "server.log", environ, project) as running:
        wait_for(lambda: running.health().get("status", "STARTING") != "STARTING")
        health = running.health()
    lines = [json.loads(line) for line in running.log.read_text().splitlines()]
    messages = [line["fields"]["message"] for line in lines if line["target"] == "coglet::setup"]
    return health, messages, running.process.wait()


@pytest.mark.parametrize("configured", ["", CONFIGURED], ids=["the library's log", "a configured log"])
def test_the_error_and_its_traceback_are_in_the_log_once_for_two_boots(tmp_path, configured):
    health, lines, exit_code = fail(tmp_path, configured + PREDICT, scope="off")
    assert (health["status"], exit_code) == ("SETUP_FAILED", 0)
    (said,) = [number for number, line in enumerate(lines) if line.startswith("setup.failed")]
    assert lines[said] == "setup.failed The setup failed: ValueError: there are no weights"
    assert lines[said + 1].startswith("Traceback")
    assert sum(line.endswith("in load") for line in lines) == 1
    assert "in load" not in json.dumps(health)


def test_a_fill_prints_the_traceback_itself_and_an_error_after_ready_is_none_of_the_setup(tmp_path, caplog):
    environ = settings(tmp_path, scope="off")
    with pytest.raises(KeyError), observed_boots(), compile_cache.boot("org/model", environ=environ):
        raise KeyError("a mistake")
    with compile_cache.boot("org/model", environ=environ) as begun:
        pass
    with pytest.raises(KeyError), begun:
        raise KeyError("a mistake")
    assert "setup.failed" not in caplog.text


def test_an_error_before_the_context_is_not_in_the_log(tmp_path):
    _, lines, _ = fail(tmp_path, PREDICT.replace("with ", "load()\n        with "), scope="off")
    assert not lines


def test_a_server_that_requires_a_hit_fails_without_one_and_says_why_and_stores_nothing(tmp_path):
    environ = settings(tmp_path, require="hit", cold_start="background") | ONE_CLASS
    health, lines, exit_code = serve(TOY, tmp_path, environ)
    assert (health["status"], exit_code) == ("SETUP_FAILED", 0)
    (said,) = [line for line in lines if line.startswith("setup.failed")]
    assert "COMPILE_CACHE_REQUIRE=hit, but this boot is not restored" in said
    assert "restore: miss (no version of toy--model is stored" in said
    assert "region WideBlock: eager (no code is stored for its calls)" in said
    assert said.partition("The setup failed: ")[2] in health["setup"]["logs"]
    assert not any("Traceback" in line for line in lines)
    assert not stored(tmp_path / "store")
    assert json.loads((tmp_path / "report.json").read_text())["restore"]["outcome"] == "miss"
