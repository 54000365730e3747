"""Weights that Cog manages: the version that they give a model, and waiting until they are there."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest
from boots import settings
from machines import write_files

import compile_cache
from compile_cache.errors import WeightsError
from compile_cache.key.model_version import model_version

MODEL = "weights/flux"
DAMAGED = [b"", b"{", b"[]", b"{}", b'{"weights": [{"target": "/src/weights"}]}', b'{"weights": {"target": 1}}']
DAMAGED += [b'{"weights": [{"target": "a\\u0000b", "setDigest": "sha256:0"}]}']

TARGETS = ((MODEL, "inner"), ("weights", "outer"))


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch) -> Path:
    """A project's folder with a model, and the working directory."""
    write_files(tmp_path, {f"{MODEL}/config.json": b"{}", f"{MODEL}/model.safetensors": b"numbers"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def manage(project: Path, target: str = "weights", digest: str = "sha256:1") -> None:
    """What `cog build` puts into an image."""
    entries = [
        {"name": "other", "target": str(project / "other"), "setDigest": "sha256:0"},
        {"name": "mine", "target": str(project / target), "setDigest": digest},
    ]
    write_files(project, {".cog/weights.json": json.dumps({"weights": entries}).encode()})


def version(model: str = MODEL) -> str:
    return model_version(model, [])


def boot(project: Path, **variables: str) -> compile_cache.BootReport:
    """The report of a boot that only waits."""
    with compile_cache.boot(MODEL, environ=settings(project, scope="off", **variables)) as begun:
        pass
    return begun.report


def mark(project: Path, marker: str, text: str = "") -> None:
    write_files(project, {f"weights/.cog/{marker}": text.encode()})


@pytest.mark.parametrize("target", ["weights", MODEL])
def test_the_digest_of_the_set_stands_for_all_files_of_the_model_and_none_is_read(project, target):
    unmanaged = version()
    manage(project, target)
    managed = version()
    (project / MODEL).rename(project / "elsewhere")
    assert version() == managed != unmanaged
    manage(project, target, "sha256:2")
    assert version() != managed


def test_two_models_of_one_set_have_two_versions(project):
    manage(project)
    assert version() != version("weights/sdxl")


@pytest.mark.parametrize("is_outer_first", [True, False])
def test_of_targets_in_one_another_the_innermost_counts(project, is_outer_first):
    manage(project, MODEL, "sha256:inner")
    expected = version()
    inner, outer = ({"target": str(project / target), "setDigest": f"sha256:{name}"} for target, name in TARGETS)
    entries = [outer, inner] if is_outer_first else [inner, outer]
    write_files(project, {".cog/weights.json": json.dumps({"weights": entries}).encode()})
    mark(project, "failed", "of the outer one")
    assert version() == expected
    assert "managed_weights" in boot(project).phases


def test_the_projects_own_folder_is_not_waited_for(project):
    """It has Cog's folder for other files."""
    manage(project, ".")
    boot(project, weights_timeout_s="0")


def test_a_model_outside_the_sets_has_the_version_of_its_files(project):
    unmanaged = version()
    manage(project, "weights/fl")
    assert version() == unmanaged


def test_a_boot_has_the_version_of_the_set(project):
    manage(project)
    with compile_cache.boot(MODEL, environ=settings(project, publish="false")) as begun:
        pass
    assert begun.report.model_version == version()


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_counts_as_absent_and_the_boot_names_it(project, content):
    unmanaged = version()
    write_files(project, {".cog/weights.json": content})
    mark(project, "failed")
    assert version() == unmanaged
    (warning,) = boot(project).warnings
    assert f"{project}/.cog/weights.json cannot be used" in warning


def test_a_setup_waits_for_weights_that_are_not_ready_and_says_so(project, caplog):
    manage(project)
    mark(project, "downloading")
    threading.Timer(0.5, mark, [project, "ready"]).start()
    with caplog.at_level(logging.INFO, "compile_cache"):
        assert boot(project).phases["managed_weights"] >= 0.3
    assert f"weights.waiting target={project}/weights The setup waits for at most 600 s." in caplog.text


@pytest.mark.parametrize("marker", ["ready", None], ids=["ready", "no markers"])
def test_it_does_not_wait_for_those_that_are_ready_or_have_no_markers(project, caplog, marker):
    manage(project)
    if marker:
        mark(project, marker)
        mark(project, "failed", "an attempt before")
    with caplog.at_level(logging.INFO, "compile_cache"):
        boot(project, weights_timeout_s="0")
    assert "weights.waiting" not in caplog.text


def test_weights_that_nobody_manages_are_not_waited_for(project):
    mark(project, "failed")
    assert "managed_weights" not in boot(project).phases


def test_weights_that_failed_to_arrive_fail_the_setup_with_the_reason(project):
    manage(project)
    mark(project, "failed", "the registry said 403\n")
    with pytest.raises(WeightsError, match=f"did not arrive in {project}/weights: the registry said 403$"):
        boot(project)


def test_a_reason_that_cannot_be_read_is_left_out(project):
    manage(project)
    (project / "weights/.cog/failed").mkdir(parents=True)
    with pytest.raises(WeightsError, match=f"did not arrive in {project}/weights$"):
        boot(project)


def test_a_wait_that_takes_too_long_fails_the_setup_and_names_the_setting(project):
    manage(project)
    mark(project, "downloading")
    with pytest.raises(WeightsError, match=r"no .*/weights/\.cog/ready after 0.2 s.*COMPILE_CACHE_WEIGHTS_TIMEOUT_S"):
        boot(project, weights_timeout_s="0.2")
