"""What is installed, and what git ignores."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parent.parent


def lines(name: str) -> list[str]:
    return [line for line in (PROJECT / name).read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("left", [".cog/", "output.*"])
def test_git_ignores_what_cog_leaves_in_the_folder(left):
    assert f"/{left}" in lines(".gitignore")


def configuration(name: str) -> dict:
    return yaml.safe_load((PROJECT / name).read_text())


@pytest.mark.parametrize("name", ["cog.yaml", "cog.text.yaml"])
def test_cog_is_pinned_where_it_reads_its_own_version(name):
    """It overrides the version in requirements.txt with the newest release."""
    assert configuration(name)["build"]["sdk_version"].count(".") == 2
    assert not [line for line in lines("requirements.txt") if line.startswith("cog")]


def test_all_tools_agree_about_the_least_python():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    least = project["project"]["requires-python"].removeprefix(">=")
    tools = project["tool"]
    assert tools["mypy"]["python_version"] == least
    assert tools["ruff"]["target-version"] == "py" + least.replace(".", "")
    for name in ("Makefile", "README.md"):
        assert f"Python {least} or newer" in (PROJECT / name).read_text()


def test_nobody_is_told_to_install_the_library_from_an_index():
    """It is registered in none."""
    texts = [*PROJECT.glob("*.md"), *PROJECT.glob("docs/*.md"), *PROJECT.glob("*/**/*.py")]
    for path in texts:
        if "tests" not in path.parts and not any(part.startswith(".venv") for part in path.parts):
            text = path.read_text()
            assert "pip install cog-compile-cache" not in text.replace('"', "").replace("'", ""), path


@pytest.fixture
def checkout(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(PROJECT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/ready-torch==2.13.0").touch()
    return tmp_path


@pytest.mark.parametrize(("torch", "installs"), [("torch==2.13.0", False), ("torch==2.15.0", True)])
def test_make_installs_another_torch_when_asked(checkout, torch, installs):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # Without the variables of the `make` that runs this.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "test", f"TORCH={torch}"]
    done = subprocess.run(command, cwd=checkout, env=environ, capture_output=True, text=True, check=True)
    assert ("pip install" in done.stdout) == installs
    assert "-m pytest" in done.stdout


def test_another_packages_warning_is_no_error():
    """torch warns that guards are slower on Python 3.13.0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("guards run slower", RuntimeWarning, "guards.py", 1, module="torch._dynamo.guards")
    assert len(caught) == 1


@pytest.mark.parametrize("module", ["compile_cache.regions.region", "models.weights", "predict", "test_packaging"])
def test_a_warning_of_the_projects_own_code_is_an_error(module):
    with pytest.raises(RuntimeWarning):
        warnings.warn_explicit("unexpected", RuntimeWarning, "a.py", 1, module=module)
