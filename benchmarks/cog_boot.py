"""One boot under Cog's own server, over HTTP, without Docker. Needs `demo/` on the path, for its CogServer."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import time
from pathlib import Path
from statistics import median

from cog_server import CogServer, files
from fresh_boot import PROMPT, SEED, Boot, Plan, Prediction, end
from picture import identify


def run_cog_boot(plan: Plan, kind: str, store: Path) -> Boot:
    """Boot, predict over HTTP, wait until what was compiled is published, and shut down.

    Raises:
        SystemExit: a failure, or more than `plan.timeout_s` until READY; names the log.
    """
    report = plan.work / "report.json"
    report.unlink(missing_ok=True)
    environ = {
        "COMPILE_CACHE_COLD_START": "block",
        **plan.environment(kind, store),
        "COMPILE_CACHE_REPORT": str(report),
    }
    server = CogServer("predict.py:Predictor", plan.log(kind), environ)
    started = time.perf_counter()
    server.start()
    try:
        server.wait_ready(plan.timeout_s)
        http_ready_s = time.perf_counter() - started
        first = predict(server, plan.steps[0])
        if kind == "cold":
            wait_published(report, plan.timeout_s)
        step_ms = measure_step_ms(server, plan.steps, plan.pairs)
        server.stop(signal.SIGTERM)  # the exit hook publishes what is left
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"the {kind} boot under Cog failed: {error}; see {server.log}") from error
    finally:
        end(server.process)
    return Boot(kind, json.loads(report.read_text()), first, step_ms, http_ready_s)


def predict(server: CogServer, num_inference_steps: int) -> Prediction:
    """One prediction, timed from the request until its picture has arrived.

    Raises:
        RuntimeError: it did not succeed.
    """
    started = time.perf_counter()
    answer = server.predict(prompt=PROMPT, seed=SEED, output_format="png", num_inference_steps=num_inference_steps)
    seconds = time.perf_counter() - started
    if answer["status"] != "succeeded":
        raise RuntimeError(f"the prediction {answer['status']}: {answer.get('error')}")
    (picture,) = files(answer)
    compiled = answer["metrics"]["compile_cache"]["compiled_now"]
    return Prediction(seconds, *identify(io.BytesIO(picture)), graphs_compiled=compiled)


def measure_step_ms(server: CogServer, steps: tuple[int, int], pairs: int) -> float:
    """Milliseconds a denoising step: the median of `pairs` differences."""
    few, many = steps
    differences_s = []
    for _ in range(pairs):
        few_s, many_s = predict(server, few).seconds, predict(server, many).seconds
        differences_s.append(many_s - few_s)
    return median(differences_s) / (many - few) * 1e3


def wait_published(report: Path, timeout_s: float) -> None:
    """Wait until the boot's report says that something is in the store; the exit hook sees to the rest.

    Raises:
        RuntimeError: publishing failed, or took too long.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        publish = json.loads(report.read_text())["publish"]
        if publish["failures"]:
            raise RuntimeError(f"not published: {publish['failures']}")
        if publish["packs"]:
            return
        time.sleep(0.2)
    raise RuntimeError(f"not published within {timeout_s:g} s")
