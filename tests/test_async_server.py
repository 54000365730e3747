"""An asynchronous predictor in a real Cog server: it is restored, and has one thread for the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from boots import ONE_CLASS, TESTS, python_path, settings
from cog_server import PROJECT, CogServer


def serve(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The report at READY of a server that compiles before it, and three predictions."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environ = settings(folder, cold_start="block") | ONE_CLASS | {"PYTHONPATH": python_path(PROJECT, TESTS)}
    with CogServer("async_predictor.py:Predictor", folder / "server.log", environ, TESTS) as running:
        running.wait_ready()
        report = json.loads((folder / "report.json").read_text())
        return report, [running.predict() for _ in range(3)]


@pytest.fixture(scope="module")
def boots(tmp_path_factory) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """A first boot, and the next one in an empty cache directory."""
    folder = tmp_path_factory.mktemp("async")
    return [serve(folder) for _ in range(2)]


def test_the_second_boot_of_an_asynchronous_predictor_is_restored(boots):
    (first, _), (second, _) = boots
    assert (first["restore"]["outcome"], second["restore"]["outcome"]) == ("miss", "hit")
    assert second["fully_precompiled"], second
    assert second["counts"]["precompiled_loaded"] >= 1


def test_its_predictions_are_served_precompiled_and_alike_on_the_thread_of_its_setup(boots):
    predictions = [prediction for _, predictions in boots for prediction in predictions]
    assert len({prediction["output"] for prediction in predictions}) == 1
    for prediction in predictions:
        assert prediction["metrics"]["is_setups_thread"]
        assert prediction["metrics"]["compile_cache"]["served"] == {"WideBlock": "precompiled"}
        assert prediction["metrics"]["compile_cache"]["compiled_now"] == 0
