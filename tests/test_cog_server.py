"""The toy model in a real Cog server: predictions, signals and kills."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path

from boots import ONE_CLASS, TESTS, after, assert_fully_warm, boot_once, settings, stored
from cog_server import CogServer
from marked_processes import wait_for
from namespaces import in_container
from web_servers import answer, answering

# Cog kills its worker 10 s after it has told it to stop.
COG_LIMIT_S = 10


def server(folder: Path, environ: dict[str, str], wrapper: tuple[str, ...] = ()) -> CogServer:
    """All is compiled before READY."""
    blocking = {**environ, "COMPILE_CACHE_COLD_START": "block"}
    return CogServer("toy_predictor.py:Predictor", folder / "server.log", blocking, TESTS, wrapper)


def packs(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in stored(folder / "store").items() if name.endswith(".pack")}


def assert_ends_in_time(running: CogServer, number: signal.Signals, margin_s: float = 2.0) -> None:
    """Not a measurement: a hang is ended by Cog's own limit, and that is what this rules out."""
    started = time.monotonic()
    running.stop(number)
    assert time.monotonic() - started < COG_LIMIT_S + margin_s


def test_a_warm_server_compiles_another_shape_once_and_term_lets_a_prediction_finish_and_flushes(tmp_path, cold):
    environ = after(cold[0], tmp_path)
    with server(tmp_path, {**environ, "TOY_PUBLISHES_SOON": "1"}) as running:
        running.wait_ready()
        report = json.loads(Path(environ["COMPILE_CACHE_REPORT"]).read_text())
        predictions = [running.predict(**inputs) for inputs in ({}, {"rows": 8})]
        wait_for(lambda: running.log.read_text().count("background.done") == 2)
        predictions.append(running.predict(rows=8))  # compares the code, which is then published at once
        # One pack, or one for each of the two classes.
        wait_for(lambda: len(packs(tmp_path)) - len(packs(cold[0])) in (1, 2))
        wait_for(lambda: running.health().get("status") == "READY")  # it is not, right after an answer
        before = packs(tmp_path)
        running.predict_later(rows=16, sleep_s=2.0)
        time.sleep(1.0)
        assert_ends_in_time(running, signal.SIGTERM, margin_s=15.0)
    assert report["fully_precompiled"], report
    assert [prediction["status"] for prediction in predictions] == ["succeeded"] * 3
    assert [prediction["metrics"]["compiled_now"] for prediction in predictions] == [0, 0, 0]
    assert before.items() < packs(tmp_path).items()
    assert_fully_warm(boot_once(environ))


def test_term_right_after_ready_leaves_everything_in_s3(tmp_path, s3_bucket):
    """In a PID namespace under tini, where nothing outlives the server, all is published before it is gone."""
    environ = settings(tmp_path, store=f"s3://{s3_bucket.name}/cache") | ONE_CLASS
    with server(tmp_path, environ, in_container()) as running:
        running.wait_ready()
        assert_ends_in_time(running, signal.SIGTERM)
    published = json.loads(Path(environ["COMPILE_CACHE_REPORT"]).read_text())["publish"]
    assert published["failures"] == []
    again = boot_once(environ)
    assert_fully_warm(again)
    assert again.report["restore"]["stored_bytes"] == published["stored_bytes"]


def test_what_is_lost_at_the_end_is_in_the_containers_log(tmp_path, aws_variables):
    with answering(answer("403 Forbidden"), None) as silent:  # once the restore has failed
        environ = settings(tmp_path, store="s3://bucket", exit_budget_s="0.5")
        environ |= ONE_CLASS | {"AWS_ENDPOINT_URL_S3": silent.url}
        with server(tmp_path, environ) as running:
            running.wait_ready()
            assert_ends_in_time(running, signal.SIGTERM)
    assert (tmp_path / "server.log").read_text().count("publish.failed") == 1
    report = json.loads(Path(environ["COMPILE_CACHE_REPORT"]).read_text())
    assert (report["restore"]["outcome"], report["publish"]["packs"]) == ("failed", 0)


def test_term_during_setup_changes_nothing_stored(tmp_path, cold):
    environ = after(cold[0], tmp_path)
    before = stored(tmp_path / "store")
    with server(tmp_path, environ) as running:
        wait_for(lambda: running.health().get("status") == "STARTING")
        assert_ends_in_time(running, signal.SIGTERM)
    assert stored(tmp_path / "store") == before
    wait_for(lambda: not owners(cold[0] / "cache"))
    assert_fully_warm(boot_once(environ))


def test_interrupt_from_a_terminal_ends_in_order(tmp_path, cold):
    """Ctrl-C reaches the server and its worker at once; the worker leaves it to the server, and its exit hook runs."""
    environ = settings(tmp_path, dir=str(cold[0] / "cache")) | ONE_CLASS
    with server(tmp_path, environ) as running:
        running.wait_ready()
        started = time.monotonic()
        os.killpg(running.process.pid, signal.SIGINT)
        running.process.wait(30)
        wait_for(lambda: not owners(cold[0] / "cache"))
        assert time.monotonic() - started < COG_LIMIT_S
    assert packs(tmp_path)
    assert_fully_warm(boot_once(environ))


def owners(cache: Path) -> list[str]:
    """The cache directories that some process owns."""
    owned = []
    for lock in cache.glob("*.lock"):
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owned.append(lock.stem)
    return owned
