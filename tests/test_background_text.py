"""The demo text model, compiled after READY: between two answers, and never in the middle of one."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from validating_server import ValidatingServer

CACHE_TOKENS, BUCKETS = 64, (16, 64)
# One for each bucket.
PROMPTS = ("23+45=", "1+" * 20 + "1=")
STEPS = {"Prefill", "DecodeStep"}
PATIENCE_S = 400.0
# Between rounds: the process that compiles has the lowest priority.
PAUSE_S = 0.5


@dataclass(frozen=True)
class Served:
    """What one server answered, from its boot to its end: rounds of predictions, one for each prompt."""

    report: dict[str, Any]
    rounds: tuple[tuple[dict[str, Any], ...], ...]
    states: frozenset[str]
    started_compiling: bool

    @property
    def predictions(self) -> list[dict[str, Any]]:
        return [prediction for predictions in self.rounds for prediction in predictions]


def metrics(prediction: dict[str, Any]) -> dict[str, Any]:
    assert prediction["status"] == "succeeded", prediction
    return dict(prediction["metrics"]["compile_cache"])


def served(prediction: dict[str, Any]) -> dict[str, str]:
    return dict(metrics(prediction)["served"])


def is_compiled(predictions: tuple[dict[str, Any], ...]) -> bool:
    return all(set(served(prediction).values()) == {"precompiled"} for prediction in predictions)


def serve(folder: Path, is_enough: Callable[[tuple[dict[str, Any], ...]], bool]) -> Served:
    """Boot with the default settings and an empty cache directory, ask every prompt until it `is_enough`, and stop."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environ = {
        "MODEL": "demo/llama-adder",
        "CACHE_TOKENS": str(CACHE_TOKENS),
        "PROMPT_BUCKETS": ",".join(map(str, BUCKETS)),
        "HF_HUB_OFFLINE": "1",
        "COMPILE_CACHE_STORE": str(folder / "store"),
        "COMPILE_CACHE_DIR": str(folder / "cache"),
        "COMPILE_CACHE_REPORT": str(folder / "report.json"),
    }
    rounds: list[tuple[dict[str, Any], ...]] = []
    states: set[str] = set()
    with ValidatingServer("predict.py:TextPredictor", folder / "server.log", environ) as server:
        server.wait_ready()
        report = json.loads((folder / "report.json").read_text())
        deadline = time.monotonic() + PATIENCE_S
        while not rounds or not is_enough(rounds[-1]):
            assert time.monotonic() < deadline, server.log.read_text()[-4000:]
            time.sleep(PAUSE_S if rounds else 0)
            rounds.append(tuple(server.predict(prompt=prompt, temperature=0.0) for prompt in PROMPTS))
            states |= server.states_until_ready()
    started_compiling = any((folder / "cache").glob("*.logs/compiling.log"))
    return Served(report, tuple(rounds), frozenset(states), started_compiling)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The boot that finds nothing, and its folder."""
    folder = tmp_path_factory.mktemp("background-text")
    return folder, serve(folder, is_compiled)


@pytest.fixture(scope="module")
def second(first):
    """The next boot from the same store, in a new container."""
    return serve(first[0], lambda predictions: True)


def test_the_server_is_ready_before_anything_is_compiled(first):
    _, boot = first
    assert boot.report["restore"]["outcome"] == "miss"
    assert {region["name"]: region["step"] for region in boot.report["regions"]} == dict.fromkeys(STEPS, "eager")
    assert boot.report["counts"]["graphs"] == 0
    assert boot.report["counts"]["precompiled_made"] == 0


def test_the_first_answer_is_eager_and_says_what_is_being_compiled(first):
    _, boot = first
    assert served(boot.predictions[0]) == dict.fromkeys(STEPS, "eager")
    assert metrics(boot.predictions[0])["compiling"] > 0


def test_all_tokens_of_an_answer_are_made_by_the_same_code(first, second):
    for prediction in first[1].predictions + second.predictions:
        assert served(prediction)["Prefill"] in ("eager", "precompiled")
        assert served(prediction)["DecodeStep"] in ("eager", "precompiled")


def test_both_steps_are_precompiled_in_the_end(first):
    assert [served(prediction) for prediction in first[1].rounds[-1]] == [
        dict.fromkeys(STEPS, "precompiled") for _ in PROMPTS
    ]


def test_answers_are_the_same_before_and_after_the_swap_and_in_the_next_boot(first, second):
    texts = [["".join(one["output"]) for one in predictions] for predictions in first[1].rounds + second.rounds]
    assert any(texts[0])
    assert texts == [texts[0]] * len(texts)


def test_no_request_compiles_anything_or_waits_for_a_compile(first, second):
    for prediction in first[1].predictions + second.predictions:
        assert metrics(prediction)["compiled_now"] == 0
        assert metrics(prediction)["waited_s"] == 0


def test_the_health_check_is_good_all_the_time(first, second):
    assert first[1].states | second.states <= {"READY", "BUSY"}  # BUSY: an answer's slot is not free yet


def test_the_next_boot_finds_a_function_for_each_bucket_and_the_step(second):
    assert second.report["restore"]["outcome"] == "hit"
    assert second.report["fully_precompiled"], second.report
    assert second.report["counts"]["precompiled_loaded"] == len(BUCKETS) + 1
    assert second.report["counts"]["graphs"] == 0


def test_the_next_boot_serves_its_first_answers_precompiled_and_starts_no_second_process(first, second):
    assert is_compiled(second.rounds[0])
    assert first[1].started_compiling
    assert not second.started_compiling
