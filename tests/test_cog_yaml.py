"""What `cog build` reads: the configurations, and the predictors that they name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from compile_cache.settings import Settings
from models.image.settings import ImageSettings
from models.text.settings import TextSettings

PROJECT = Path(__file__).parent.parent
CONFIGURATIONS = {"cog.yaml": ImageSettings, "cog.text.yaml": TextSettings}


def read(name: str) -> dict:
    return yaml.safe_load((PROJECT / name).read_text())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_predictor_is_there(name):
    path, _, predictor = read(name)["run"].partition(":")
    classes = [node.name for node in ast.parse((PROJECT / path).read_text()).body if isinstance(node, ast.ClassDef)]
    assert predictor in classes


@pytest.mark.parametrize(("name", "settings"), CONFIGURATIONS.items())
def test_the_environment_has_settings_that_can_be(name, settings):
    environ = dict(variable.split("=", 1) for variable in read(name)["environment"])
    Settings.from_env(environ)
    model = settings.from_env(environ)
    assert (PROJECT / model.model).is_dir()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_torch_is_pinned_and_launches_no_overlapping_kernels(name):
    """And kernels stay such as a warm boot loads fast.

    torch cannot launch overlapping kernels statically: a warm boot then loads every candidate through Triton.
    """
    requirements = (PROJECT / read(name)["build"]["python_requirements"]).read_text()
    assert any(line.startswith("torch==") for line in requirements.splitlines())

    assert not any(variable.startswith("TORCHINDUCTOR_ENABLE_PDL") for variable in read(name)["environment"])


def test_both_images_are_built_alike():
    first, second = (read(name)["build"] for name in CONFIGURATIONS)
    assert first == second
