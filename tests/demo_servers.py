"""The demo models in real Cog servers: a boot that finds nothing and compiles while it serves, then the next boot, in
a new container. And what each model promises of both: a test module names its `DEMO`, and has these fixtures."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from boots import settings
from progress import stage
from validating_server import ValidatingServer

PATIENCE_S = 400.0
PAUSE_S = 0.5
LOADING = ["starting the server", "importing torch and the model, loading the weights", "ready"]


@dataclass(frozen=True)
class Demo:
    """A predictor, its settings, what each boot is asked first, and the regions whose code READY does not wait for."""

    predictor: str
    environ: dict[str, str]
    requests: tuple[dict[str, Any], ...]
    late: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Served:
    """A server, its report at READY, the predictions of each request, what the health check said meanwhile, and the
    lines of other libraries until then."""

    server: ValidatingServer
    at_ready: dict[str, Any]
    answers: tuple[list[dict[str, Any]], ...]
    states: set[str]
    foreign_lines: list[str]

    @property
    def report(self) -> dict[str, Any]:
        """The report as it is now, or as the server has left it."""
        return dict(json.loads(self.server.log.with_suffix(".json").read_text()))

    @property
    def waited_for(self) -> list[dict[str, Any]]:
        """The regions whose code READY waited for."""
        return [region for region in self.at_ready["regions"] if region["step"] != "late"]

    @property
    def predictions(self) -> list[dict[str, Any]]:
        return [prediction for predictions in self.answers for prediction in predictions]


def environment(log: Path, demo: Demo) -> dict[str, str]:
    """The variables of a boot with an empty cache directory, which is made so. The store is beside the log."""
    shutil.rmtree(log.parent / "cache", ignore_errors=True)
    return settings(log.parent, report=str(log.with_suffix(".json"))) | demo.environ | {"HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def serving(log: Path, demo: Demo, until_compiled: bool = False) -> Iterator[Served]:
    """Boot with the default settings and an empty cache directory, and ask; `until_compiled`: each request until it is
    served precompiled."""
    environ = environment(log, demo)
    states: set[str] = set()
    with ValidatingServer(demo.predictor, log, environ) as server:
        server.wait_ready()
        at_ready = json.loads(log.with_suffix(".json").read_text())
        answers = tuple(_ask(server, request, states, until_compiled) for request in demo.requests)
        yield Served(server, at_ready, answers, states, server.foreign_lines())


def _ask(
    server: ValidatingServer, request: dict[str, Any], states: set[str], until_compiled: bool
) -> list[dict[str, Any]]:
    """Predict once; or one after another, until every region was served precompiled."""
    predictions: list[dict[str, Any]] = []
    deadline = time.monotonic() + PATIENCE_S
    while True:
        predictions.append(server.predict(**request))
        states |= server.states_until_ready()
        if not until_compiled or is_compiled(predictions[-1]):
            return predictions
        time.sleep(PAUSE_S)
        # More requests would take the CPU that compiles.
        while _is_waiting(server) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        assert time.monotonic() < deadline, server.log.read_text()[-4000:]


def _is_waiting(server: ValidatingServer) -> bool:
    """Whether the second process has orders that it has not answered."""
    orders = [line for line in server.log.read_text().splitlines() if "background." in line]
    return bool(orders) and ("background.done" not in orders[-1] or "waiting=0 " not in orders[-1])


def metrics(prediction: dict[str, Any]) -> dict[str, Any]:
    assert prediction["status"] == "succeeded", prediction
    return dict(prediction["metrics"]["compile_cache"])


def is_compiled(prediction: dict[str, Any]) -> bool:
    return set(metrics(prediction)["served"].values()) == {"precompiled"}


def stages(log: str) -> list[str]:
    """What the log says at each of its lines, without repetitions."""
    ends = itertools.accumulate(log.splitlines(keepends=True))
    return [said for said, _ in itertools.groupby(map(stage, ends))]


@pytest.fixture(scope="module")
def first(request, tmp_path_factory) -> Served:
    """The module's demo, served until all is compiled, and stopped."""
    with serving(tmp_path_factory.mktemp("demo") / "first.log", request.module.DEMO, until_compiled=True) as served:
        pass
    return served


@pytest.fixture(scope="module")
def restored(request, first) -> Iterator[Served]:
    """The next boot, which goes on."""
    demo = request.module.DEMO
    with serving(first.server.log.with_name("restored.log"), demo, until_compiled=bool(demo.late)) as served:
        yield served


@pytest.fixture
def server(restored) -> ValidatingServer:
    return restored.server


class DemoTests:
    """What holds for both models."""

    def test_the_server_is_ready_before_anything_is_compiled(self, first):
        counts = first.at_ready["counts"]
        assert first.at_ready["restore"]["outcome"] == "miss"
        assert {region["step"] for region in first.at_ready["regions"]} == {"eager"}
        for name in ("graphs", "misses", "precompiled_made", "kernels_compiled"):
            assert counts[name] == 0
        assert not first.at_ready["fully_precompiled"]

    def test_the_first_answer_is_eager_and_says_what_is_being_compiled(self, first):
        told = metrics(first.predictions[0])
        assert set(told["served"].values()) == {"eager"}
        assert told["compiling"] > 0

    def test_every_region_is_precompiled_in_the_end_and_its_calls_of_one_answer_have_one_code(self, first, restored):
        names = {region["name"] for region in first.at_ready["regions"]}
        for predictions in first.answers:
            assert is_compiled(predictions[-1])
            assert set(metrics(predictions[-1])["served"]) == names
        for prediction in first.predictions + restored.predictions:
            assert set(metrics(prediction)["served"].values()) <= {"eager", "precompiled"}

    def test_every_region_is_compared_with_eager_in_either_boot(self, first, restored):
        for region in first.report["regions"] + restored.waited_for:
            assert region["step"] == "precompiled"
            assert 0 <= region["relative_error"] <= region["tolerance"]

    def test_no_request_compiles_anything_or_waits_for_a_compile(self, first, restored):
        for prediction in first.predictions + restored.predictions:
            assert metrics(prediction)["compiled_now"] == 0

    def test_the_health_check_is_good_all_the_time(self, first, restored):
        assert "READY" in first.states
        assert first.states | restored.states <= {"READY", "BUSY"}  # BUSY: an answer's slot is not free yet

    def test_the_next_boot_finds_all_that_was_compiled_after_ready(self, request, restored):
        counts = restored.at_ready["counts"]
        assert restored.at_ready["restore"]["outcome"] == "hit"
        assert restored.at_ready["fully_precompiled"], restored.at_ready
        assert counts["precompiled_loaded"] >= len(restored.waited_for) > 0
        assert {region["step"] for region in restored.waited_for} == {"precompiled"}
        assert len(restored.at_ready["regions"]) == len(restored.waited_for) + len(request.module.DEMO.late)
        for name in ("graphs", "misses", "precompiled_made"):
            assert counts[name] == 0
        assert (counts["kernels_compiled"], counts["benchmarks"]) == (0, 0)

    def test_the_next_boot_serves_the_first_requests_precompiled(self, request, restored):
        assert all(is_compiled(answers[-1]) and not metrics(answers[-1])["compiling"] for answers in restored.answers)
        served = [step for told in map(metrics, restored.predictions) for step in told["served"].items()]
        assert {name for name, step in served if step == "eager"} <= request.module.DEMO.late

    def test_compiled_and_restored_code_give_the_same_answers(self, first, restored):
        for before, after in zip(first.answers, restored.answers, strict=True):
            assert {str(prediction["output"]) for prediction in after} == {str(before[-1]["output"])}

    def test_the_log_tells_what_a_second_process_compiles_and_that_a_restored_boot_has_none(self, first, restored):
        found = stages(first.server.log.read_text())
        assert found[:3] == LOADING
        names = {region["name"] for region in first.at_ready["regions"]}
        assert set(found[3:]) == {f"a second process compiles {name}" for name in names}
        assert stages(restored.server.log.read_text()) == LOADING

    @pytest.mark.skipif(sys.version_info[:3] == (3, 13, 0), reason="torch warns that guards run slower there")
    def test_nothing_of_other_libraries_is_logged(self, first, restored):
        assert not first.foreign_lines
        assert not restored.foreign_lines
