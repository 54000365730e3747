"""The demo image model in a Cog server with an empty store: READY at once, compiled after it, then restored."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cog_server import CogServer, files
from PIL import Image
from validating_server import ValidatingServer

SKETCH = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 2, "output_format": "png"}
PLANNED = {**SKETCH, "width": 64, "height": 64}
UNPLANNED = {**SKETCH, "width": 96, "height": 64}
PATIENCE_S = 400.0
# Between predictions: the process that compiles has the lowest priority.
PAUSE_S = 0.5
# A pixel of 8 bits, where two sums of floats fall on different sides of a half.
ROUNDING = 1
COMPILED = {"precompiled"}


@dataclass(frozen=True)
class Served:
    """What one server answered, from its boot to its end: every prediction, those of the planned size in order, and
    those of the other size. `states` are the answers of the health check meanwhile."""

    report: dict[str, Any]
    planned: tuple[dict[str, Any], ...]
    unplanned: tuple[dict[str, Any], ...]
    states: frozenset[str]
    started_compiling: bool

    @property
    def predictions(self) -> tuple[dict[str, Any], ...]:
        return self.planned + self.unplanned


class Asking:
    """Asks a server for pictures, and for its health after each."""

    def __init__(self, server: CogServer) -> None:
        self.server = server
        self.states: set[str] = set()

    def predict(self, inputs: dict[str, Any]) -> dict[str, Any]:
        prediction = self.server.predict(**inputs)
        self.states |= self.server.states_until_ready()
        return prediction

    def predict_until_compiled(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """One after another, until every region of one was served precompiled."""
        deadline = time.monotonic() + PATIENCE_S
        predictions = [self.predict(inputs)]
        while steps(predictions[-1]) != COMPILED:
            assert time.monotonic() < deadline, self.server.log.read_text()[-4000:]
            time.sleep(PAUSE_S)
            predictions.append(self.predict(inputs))
        return predictions


def metrics(prediction: dict[str, Any]) -> dict[str, Any]:
    assert prediction["status"] == "succeeded", prediction
    return dict(prediction["metrics"]["compile_cache"])


def steps(prediction: dict[str, Any]) -> set[str]:
    return set(metrics(prediction)["served"].values())


def pixels(prediction: dict[str, Any]) -> np.ndarray:
    (picture,) = files(prediction)
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"), dtype=np.int16)


def serve(folder: Path, ask: Callable[[Asking], tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> Served:
    """Boot with the default settings and an empty cache directory, ask, wait until all is stored, and stop."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    environ = {
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "64x64,96x64",
        "WARM_UP_SIZES": "64x64",
        "HF_HUB_OFFLINE": "1",
        "COMPILE_CACHE_STORE": str(folder / "store"),
        "COMPILE_CACHE_DIR": str(folder / "cache"),
        "COMPILE_CACHE_REPORT": str(folder / "report.json"),
    }
    with ValidatingServer("predict.py:Predictor", folder / "server.log", environ) as server:
        server.wait_ready()
        report = json.loads((folder / "report.json").read_text())
        asking = Asking(server)
        planned, unplanned = ask(asking)
    started_compiling = any((folder / "cache").glob("*.logs/compiling.log"))
    return Served(report, tuple(planned), tuple(unplanned), frozenset(asking.states), started_compiling)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The boot that finds nothing, and its folder."""
    folder = tmp_path_factory.mktemp("background")
    return folder, serve(
        folder,
        lambda asking: (
            asking.predict_until_compiled(PLANNED),
            asking.predict_until_compiled(UNPLANNED),
        ),
    )


@pytest.fixture(scope="module")
def second(first):
    """The next boot from the same store, in a new container."""
    folder, _ = first
    return serve(folder, lambda asking: ([asking.predict(PLANNED)], [asking.predict(UNPLANNED)]))


def test_the_server_is_ready_before_anything_is_compiled(first):
    _, served = first
    counts = served.report["counts"]
    assert served.report["restore"]["outcome"] == "miss"
    assert {region["step"] for region in served.report["regions"]} == {"eager"}
    for name in ("graphs", "fxgraph_misses", "precompiled_made", "kernels_compiled"):
        assert counts[name] == 0
    assert not served.report["fully_precompiled"]


def test_the_first_prediction_is_eager_and_says_what_is_being_compiled(first):
    _, served = first
    assert steps(served.planned[0]) == {"eager"}
    assert metrics(served.planned[0])["compiling"] > 0


def test_every_region_is_precompiled_in_the_end(first):
    _, served = first
    assert steps(served.planned[-1]) == COMPILED
    assert set(metrics(served.planned[-1])["served"]) == {region["name"] for region in served.report["regions"]}


@pytest.mark.parametrize("size", ["planned", "unplanned"])
def test_no_picture_changes_by_more_than_rounding_at_the_swap(first, size):
    eager, *later = map(pixels, getattr(first[1], size))
    assert later
    assert eager.max() > eager.min()
    for picture in later:
        assert abs(picture - eager).max() <= ROUNDING


def test_a_size_that_was_not_warmed_up_is_eager_at_once_and_compiled_later(first):
    _, served = first
    assert steps(served.unplanned[0]) == {"eager"}
    assert metrics(served.unplanned[0])["compiling"] > 0
    assert steps(served.unplanned[-1]) == COMPILED


def test_no_request_compiles_anything_or_waits_for_a_compile(first, second):
    for prediction in first[1].predictions + second.predictions:
        assert metrics(prediction)["compiled_now"] == 0
        assert metrics(prediction)["waited_s"] == 0


def test_the_health_check_is_good_all_the_time(first, second):
    for served in (first[1], second):
        assert "READY" in served.states
        assert served.states <= {"READY", "BUSY"}  # BUSY: an answer's slot is not free yet


def test_the_next_boot_finds_all_that_was_compiled_after_ready(second):
    assert second.report["restore"]["outcome"] == "hit"
    assert second.report["fully_precompiled"], second.report
    assert second.report["counts"]["precompiled_loaded"] > 0
    assert second.report["counts"]["graphs"] == 0


def test_the_next_boot_serves_the_first_request_of_either_size_precompiled(second):
    assert [steps(prediction) for prediction in second.predictions] == [COMPILED, COMPILED]


def test_the_next_boot_starts_no_second_process(first, second):
    assert first[1].started_compiling
    assert not second.started_compiling
    assert [metrics(prediction)["compiling"] for prediction in second.predictions] == [0, 0]
