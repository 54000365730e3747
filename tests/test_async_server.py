"""An asynchronous predictor: `fill` stores its code, and in a real Cog server it has one thread for the model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from boots import ONE_CLASS, TESTS, after, python_path, run_boot, settings
from cog_server import PROJECT, CogServer


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report at READY of a server that requires a hit, and three predictions. `fill` has filled its store."""
    first, folder = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("async")
    own = ONE_CLASS | {"PYTHONPATH": python_path(PROJECT, TESTS)}
    command = ("fill", "--predictor", "async_predictor.py:Predictor")
    filled = run_boot(settings(first) | ONE_CLASS, *command, program="compile_cache.cli", folder=TESTS)
    assert filled.returncode == 0, filled.stderr
    environ = after(first, folder, require="hit", cold_start="background") | own
    with CogServer("async_predictor.py:Predictor", folder / "server.log", environ, TESTS) as running:
        running.wait_ready()
        report = json.loads((folder / "report.json").read_text())
        return report, [running.predict() for _ in range(3)]


def test_a_server_that_requires_a_hit_and_has_one_is_ready(served):
    report, _ = served
    assert report["restore"]["outcome"] == "hit"
    assert report["fully_precompiled"], report
    assert report["counts"]["precompiled_loaded"] >= 1


def test_its_predictions_are_served_precompiled_and_alike_on_the_thread_of_its_setup(served):
    _, predictions = served
    assert len({prediction["output"] for prediction in predictions}) == 1
    for prediction in predictions:
        assert prediction["metrics"]["is_setups_thread"]
        assert prediction["metrics"]["compile_cache"]["served"] == {"WideBlock": "precompiled"}
        assert prediction["metrics"]["compile_cache"]["compiled_now"] == 0
