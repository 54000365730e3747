"""The demo models in a Cog server with an empty store: READY at once, compiled after it, then restored."""

from __future__ import annotations

import io
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boots import settings
from cog_server import CogServer, files
from PIL import Image
from validating_server import ValidatingServer

SKETCH = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 2, "output_format": "png"}
PATIENCE_S = 400.0
PAUSE_S = 0.5
# A pixel of 8 bits, where two sums of floats fall on different sides of a half.
ROUNDING = 1


@dataclass(frozen=True)
class Demo:
    """A predictor, its settings, and requests. The warm-up of the image model makes no call of the second request's
    size; each request of the text model has a bucket of its own."""

    predictor: str
    environ: dict[str, str]
    requests: tuple[dict[str, Any], ...]
    regions_loaded: int


DEMOS = {
    "image": Demo(
        "predict.py:Predictor",
        {"MODEL": "demo/flux-digits", "IMAGE_SIZES": "64x64,96x64", "WARM_UP_SIZES": "64x64"},
        ({**SKETCH, "width": 64, "height": 64}, {**SKETCH, "width": 96, "height": 64}),
        1,
    ),
    "text": Demo(
        "predict.py:TextPredictor",
        {"MODEL": "demo/llama-adder", "CACHE_TOKENS": "64", "PROMPT_BUCKETS": "16,64"},
        ({"prompt": "23+45=", "temperature": 0.0}, {"prompt": "1+" * 20 + "1=", "temperature": 0.0}),
        3,  # one for each bucket, and the step
    ),
}


@dataclass(frozen=True)
class Served:
    """What one server answered, from its boot to its end: the predictions of each request, and what the health check
    said meanwhile."""

    report: dict[str, Any]
    answers: tuple[list[dict[str, Any]], ...]
    states: frozenset[str]
    started_compiling: bool

    @property
    def predictions(self) -> list[dict[str, Any]]:
        return [prediction for predictions in self.answers for prediction in predictions]


def metrics(prediction: dict[str, Any]) -> dict[str, Any]:
    assert prediction["status"] == "succeeded", prediction
    return dict(prediction["metrics"]["compile_cache"])


def is_compiled(prediction: dict[str, Any]) -> bool:
    return set(metrics(prediction)["served"].values()) == {"precompiled"}


def ask(server: CogServer, request: dict[str, Any], states: set[str], until_compiled: bool) -> list[dict[str, Any]]:
    """Predict once; or one after another, until every region was served precompiled."""
    predictions: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    while not predictions or (until_compiled and not is_compiled(predictions[-1])):
        predictions.append(server.predict(**request))
        states |= server.states_until_ready()
        time.sleep(PAUSE_S)
        # More requests would take the CPU that compiles.
        while until_compiled and is_waiting(server):
            assert time.monotonic() < deadline, server.log.read_text()[-4000:]
            time.sleep(PAUSE_S)
    return predictions


def is_waiting(server: CogServer) -> bool:
    """Whether the second process has not answered its first order, or has others."""
    answers = [line for line in server.log.read_text().splitlines() if "background.done" in line]
    return not answers or "waiting=0 " not in answers[-1]


def serve(folder: Path, demo: Demo, until_compiled: bool) -> Served:
    """Boot with the default settings and an empty cache directory, ask, wait until all is stored, and stop."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environ = {**settings(folder), **demo.environ, "HF_HUB_OFFLINE": "1"}
    states: set[str] = set()
    with ValidatingServer(demo.predictor, folder / "server.log", environ) as server:
        server.wait_ready()
        report = json.loads((folder / "report.json").read_text())
        answers = tuple(ask(server, request, states, until_compiled) for request in demo.requests)
    started_compiling = any((folder / "cache").glob("*.logs/compiling.log"))
    return Served(report, answers, frozenset(states), started_compiling)


@pytest.fixture(scope="module", params=DEMOS)
def demo(request) -> Demo:
    return DEMOS[request.param]


@pytest.fixture(scope="module")
def folder(demo, tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("background")


@pytest.fixture(scope="module")
def first(demo, folder) -> Served:
    """The boot that finds nothing."""
    return serve(folder, demo, until_compiled=True)


@pytest.fixture(scope="module")
def second(demo, folder, first) -> Served:
    """The next boot from the same store, in a new container."""
    return serve(folder, demo, until_compiled=False)


def contents(demo: Demo, prediction: dict[str, Any]) -> np.ndarray:
    """The pixels of a picture, or the characters of a text."""
    if demo is DEMOS["text"]:
        return np.array([ord(character) for character in "".join(prediction["output"])])
    (picture,) = files(prediction)
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=np.int16)


def test_the_server_is_ready_before_anything_is_compiled(first):
    counts = first.report["counts"]
    assert first.report["restore"]["outcome"] == "miss"
    assert {region["step"] for region in first.report["regions"]} == {"eager"}
    for name in ("graphs", "fxgraph_misses", "precompiled_made", "kernels_compiled"):
        assert counts[name] == 0
    assert not first.report["fully_precompiled"]


def test_the_first_answer_is_eager_and_says_what_is_being_compiled(first):
    told = metrics(first.predictions[0])
    assert set(told["served"].values()) == {"eager"}
    assert told["compiling"] > 0


def test_every_region_is_precompiled_in_the_end_and_its_calls_of_one_answer_have_one_code(first, second):
    names = {region["name"] for region in first.report["regions"]}
    for predictions in first.answers:
        assert is_compiled(predictions[-1])
        assert set(metrics(predictions[-1])["served"]) == names
    for prediction in first.predictions + second.predictions:
        assert set(metrics(prediction)["served"].values()) <= {"eager", "precompiled"}


def test_no_answer_changes_by_more_than_rounding_at_the_swap_and_in_the_next_boot(demo, first, second):
    tolerance = 0 if demo is DEMOS["text"] else ROUNDING
    for predictions, after in zip(first.answers, second.answers, strict=True):
        eager, *later = (contents(demo, prediction) for prediction in predictions + after)
        assert eager.max() > eager.min()
        for answer in later:
            assert abs(answer - eager).max() <= tolerance


def test_a_size_that_was_not_warmed_up_is_eager_at_once_and_a_bucket_that_was_is_not(demo, first):
    """Once code has arrived, the text model makes its own requests of all buckets, which compare it."""
    told = metrics(first.answers[1][0])
    is_new = demo is DEMOS["image"]
    assert set(told["served"].values()) == ({"eager"} if is_new else {"precompiled"})
    assert bool(told["compiling"]) == is_new


def test_no_request_compiles_anything_or_waits_for_a_compile(first, second):
    for prediction in first.predictions + second.predictions:
        assert metrics(prediction)["compiled_now"] == 0
        assert metrics(prediction)["waited_s"] == 0


def test_the_health_check_is_good_all_the_time(first, second):
    assert "READY" in first.states
    assert first.states | second.states <= {"READY", "BUSY"}  # BUSY: an answer's slot is not free yet


def test_the_next_boot_finds_all_that_was_compiled_after_ready(demo, second):
    assert second.report["restore"]["outcome"] == "hit"
    assert second.report["fully_precompiled"], second.report
    assert second.report["counts"]["precompiled_loaded"] >= demo.regions_loaded
    assert second.report["counts"]["graphs"] == 0


def test_the_next_boot_serves_the_first_requests_precompiled_and_starts_no_second_process(first, second):
    assert all(map(is_compiled, second.predictions))
    assert first.started_compiling
    assert not second.started_compiling
    assert [metrics(prediction)["compiling"] for prediction in second.predictions] == [0, 0]
