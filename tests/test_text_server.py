"""The demo text model in a real Cog server: cold, then restored, streamed, cancelled, and asked many things."""

from __future__ import annotations

import contextlib
import json
import random
import sys
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from boots import settings
from cog_server import CogServer
from sums import answer, prompt, unseen_sums
from validating_server import ValidatingServer

from models.text.model import TextInputs, TextModel
from models.text.settings import TextSettings

CACHE_TOKENS, BUCKETS = 64, (16, 64)
SUMS = unseen_sums(25)
MIXED_REQUESTS = 15
RAMBLING = {"prompt": "ab", "temperature": 3.0, "seed": 4}


@dataclass(frozen=True)
class Served:
    """What one server answered, from its boot to its end. `events` are those of a streamed answer, with their times."""

    report: dict[str, Any]
    foreign_lines: list[str]
    first: dict[str, Any]
    answers: dict[str, dict[str, Any]]
    sums: tuple[str, ...] = ()
    mixed: tuple[dict[str, Any], ...] = ()
    events: tuple[tuple[str, dict[str, Any]], ...] = ()


def environment(folder: Path) -> dict[str, str]:
    return {
        **settings(folder, cold_start="block"),
        "MODEL": "demo/llama-adder",
        "CACHE_TOKENS": str(CACHE_TOKENS),
        "PROMPT_BUCKETS": ",".join(map(str, BUCKETS)),
        "HF_HUB_OFFLINE": "1",
    }


def mixed_requests(count: int) -> list[dict[str, Any]]:
    """Prompts of all lengths, greedy and sampled with all that can be asked for."""
    rng = random.Random(0)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        length = rng.randint(1, 55)
        inputs: dict[str, Any] = {"prompt": "".join(rng.choices("0123456789+=é中", k=length))[: 55 // 3]}
        inputs["max_new_tokens"] = rng.randint(1, 8)
        if rng.random() < 0.5:
            inputs |= {"temperature": rng.uniform(0.1, 2), "top_p": rng.uniform(0.1, 1), "top_k": rng.randint(0, 60)}
            inputs |= {"repetition_penalty": rng.uniform(0.8, 1.5), "seed": rng.randint(0, 9)}
        if rng.random() < 0.2:
            inputs["stop_sequences"] = ["1", "22"]
        found.append(inputs)
    return found


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    with ValidatingServer("predict.py:TextPredictor", folder / "server.log", environment(folder)) as server:
        server.wait_ready(600)
        foreign_lines = server.foreign_lines()
        first = server.predict(prompt="23+45=")
        rambling = server.predict(**RAMBLING)
    return folder, Served(report(folder), foreign_lines, first, {"rambling": rambling})


@pytest.fixture(scope="module")
def restored(cold):
    folder, _ = cold
    with ValidatingServer("predict.py:TextPredictor", folder / "server.log", environment(folder)) as server:
        server.wait_ready()
        foreign_lines = server.foreign_lines()
        first = server.predict(prompt="23+45=")
        answers = {
            "rambling": server.predict(**RAMBLING),
            "too long": server.predict(prompt="1" * 70),
            "too much": server.predict(prompt="1+1=", max_new_tokens=100),
            "stopped": server.predict(prompt="23+45=", stop_sequences=["8"]),
            "unseeded": server.predict(prompt="ab", temperature=3.0),
        }
        events = tuple(server.stream(**RAMBLING))
        answers["cancelled"] = cancelled(server)
        answers["after it"] = server.predict(**RAMBLING)
        sums = tuple("".join(server.predict(prompt=prompt(a, b))["output"]) for a, b in SUMS)
        mixed = tuple(server.predict(**inputs) for inputs in mixed_requests(MIXED_REQUESTS))
    return Served(report(folder), foreign_lines, first, answers, sums, mixed, events)


def cancelled(server: CogServer) -> dict[str, Any]:
    """The last event of a long answer that is cancelled as soon as it has begun. On a busy machine an answer can be
    complete before its cancellation arrives, which is then refused; such an answer does not count."""
    for _ in range(50):
        for kind, data in server.stream(prompt="ab", temperature=3.0, seed=2):
            if kind == "start":
                with contextlib.suppress(urllib.error.HTTPError):
                    server.cancel(data["id"])
            last = data
        if last["status"] == "canceled":
            break
    return last


def text(prediction: dict[str, Any]) -> str:
    return "".join(prediction["output"])


def test_cold_boot_compiles_both_steps_within_tolerance_of_eager(cold):
    _, served = cold
    steps = {region["name"]: region["step"] for region in served.report["regions"]}
    assert steps == {"Prefill": "cold", "DecodeStep": "cold"}
    assert all(region["relative_error"] <= region["tolerance"] for region in served.report["regions"])


def test_restored_boot_traces_and_compiles_nothing(restored):
    counts = restored.report["counts"]
    assert restored.report["restore"]["outcome"] == "hit"
    assert restored.report["fully_precompiled"], restored.report
    assert counts["precompiled_loaded"] == len(BUCKETS) + 1
    for name in ("graphs", "fxgraph_misses", "aotautograd_misses", "kernels_compiled", "benchmarks"):
        assert counts[name] == 0


@pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="torch warns that guards run slower there")
def test_setup_logs_nothing_of_other_libraries(cold, restored):
    _, first = cold
    assert not first.foreign_lines
    assert not restored.foreign_lines


def test_answers_are_right(cold, restored):
    _, first = cold
    assert text(first.first) == text(restored.first) == "68"
    assert list(restored.sums) == [answer(a, b) for a, b in SUMS]


def test_compiled_answers_are_the_eager_ones(restored):
    model = TextModel.load("demo/llama-adder", None, TextSettings(cache_tokens=CACHE_TOKENS, prompt_buckets=BUCKETS))
    assert [text({"output": model.answer(TextInputs(prompt(a, b)))}) for a, b in SUMS] == list(restored.sums)


def test_cold_and_restored_boots_sample_the_same_text(cold, restored):
    _, first = cold
    assert text(first.answers["rambling"]) == text(restored.answers["rambling"])


def test_no_prediction_compiles_anything(cold, restored):
    _, first = cold
    everything = [first.first, restored.first, *restored.mixed, restored.answers["rambling"]]
    compiled = [prediction["metrics"]["compile_cache"]["compiled_now"] for prediction in everything]
    assert compiled == [0] * (MIXED_REQUESTS + 3)
    assert all(prediction["status"] == "succeeded" for prediction in restored.mixed)


def test_text_is_streamed_as_it_is_generated(restored):
    pieces = [data["chunk"] for kind, data in restored.events if kind == "output"]
    assert len(pieces) > 5
    assert "".join(pieces) == text(restored.answers["rambling"])
    assert restored.events[-1][0] == "completed"


def test_a_cancelled_answer_ends_early_and_leaves_nothing_behind(restored):
    assert restored.answers["cancelled"]["status"] == "canceled"
    assert text(restored.answers["after it"]) == text(restored.answers["rambling"])


def test_a_prediction_counts_its_tokens(restored):
    metrics = restored.first["metrics"]
    assert (metrics["token_input_count"], metrics["token_output_count"]) == (7, 3)


@pytest.mark.parametrize(("name", "reason"), [("too long", "64 (CACHE_TOKENS)"), ("too much", "max_new_tokens is 100")])
def test_what_does_not_fit_is_refused_and_the_limit_named(restored, name, reason):
    assert restored.answers[name]["status"] == "failed"
    assert reason in restored.answers[name]["error"]


def test_a_stop_sequence_ends_the_answer(restored):
    assert text(restored.answers["stopped"]) == "6"


def test_a_seed_that_was_not_given_is_told(restored):
    prediction = restored.answers["unseeded"]
    assert f"seed: {prediction['metrics']['seed']}" in prediction["logs"]
