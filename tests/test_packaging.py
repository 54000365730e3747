"""What is installed, distributed and ignored; what `cog build` reads; and what GitHub is told."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import compile_cache
import predict
from compile_cache.settings import Settings
from models.image.settings import ImageSettings
from models.text.settings import TextSettings

PROJECT = Path(__file__).parent.parent


def lines(name: str) -> list[str]:
    return [line for line in (PROJECT / name).read_text().splitlines() if line and not line.startswith("#")]


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


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project without what git ignores, and without what only its own CI needs."""
    ignored = [Path(line.strip("/")).name for line in lines(".gitignore")]
    folder = tmp_path_factory.mktemp("packages") / "project"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns(".git", ".ci", *ignored))
    return folder


@pytest.fixture(scope="module")
def packages(tree):
    """The tree's files, and those of the source distribution and of the wheel that are built of it."""
    before = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    build = "from setuptools.build_meta import *; build_sdist('../built'); build_wheel('../built')"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (sdist,), (wheel,) = (list((tree.parent / "built").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    with tarfile.open(sdist) as archive:
        distributed = {name.partition("/")[2] for name in archive.getnames()}
    return before, distributed, set(zipfile.ZipFile(wheel).namelist())


def test_the_source_distribution_has_the_whole_project(packages):
    """So its tests and its demo run."""
    before, distributed, _ = packages
    assert not before - distributed


def test_the_wheel_has_the_library_alone_typed_and_licensed(packages):
    _, _, wheel = packages
    version = f"cog_compile_cache-{compile_cache.__version__}.dist-info"
    template = "compile_cache/cli/report_page.html.jinja"
    assert {"compile_cache/py.typed", template, f"{version}/licenses/LICENSE"} <= wheel
    assert {name.split("/")[0] for name in wheel} == {"compile_cache", version}


def test_the_license_is_the_unchanged_text_of_apache():
    text = (PROJECT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_changelog_ends_with_this_version():
    releases = re.findall(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == compile_cache.__version__


def test_every_python_that_is_promised_is_tested():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    promised = re.findall(r":: (3\.\d+)$", "\n".join(project["classifiers"]), re.MULTILINE)
    workflow = yaml.safe_load((PROJECT / ".github/workflows/tests.yml").read_text())
    assert workflow["jobs"]["tests"]["strategy"]["matrix"]["python"] == promised
    assert promised[0] == project["requires-python"].removeprefix(">=")


@pytest.mark.parametrize("name", ["tests.yml", "push.yml"])
def test_actions_are_pinned_to_a_commit(name):
    """A tag can be moved, and the push has secrets."""
    used = re.findall(r"uses: (\S+)", (PROJECT / ".github/workflows" / name).read_text())
    assert used
    assert not [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]


# The keys that cog-safe-push's configuration has, of those that may be used here; it refuses others.
SAFE_PUSH = {"model", "test_model", "test_hardware", "predict", "parallel", "ignore_schema_compatibility"}
SAFE_PUSH_PREDICT = {"compare_outputs", "predict_timeout", "test_cases", "fuzz"}
SAFE_PUSH_FUZZ = {"fixed_inputs", "disabled_inputs", "iterations", "prompt"}
SAFE_PUSH_ANSWER = {"exact_string", "match_url", "match_prompt", "jq_query", "error_contains"}


@pytest.mark.parametrize(("name", "predictor"), [("image", predict.Predictor), ("text", predict.TextPredictor)])
def test_safe_push_tests_inputs_that_the_predictor_has(name, predictor):
    inputs = set(inspect.signature(predictor.run).parameters) - {"self"}
    pushed = configuration(f".github/safe-push/{name}.yaml")
    checked = pushed["predict"]
    assert set(pushed) <= SAFE_PUSH
    assert set(checked) <= SAFE_PUSH_PREDICT
    assert set(checked["fuzz"]) <= SAFE_PUSH_FUZZ
    assert set(checked["fuzz"].get("disabled_inputs", ())) <= inputs
    for case in checked["test_cases"]:
        assert set(case["inputs"]) <= inputs
        assert set(case) - {"inputs"} <= SAFE_PUSH_ANSWER
        assert len(case) == 2, "one answer a case"


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


# What cog build reads.

CONFIGURATIONS = {"cog.yaml": ImageSettings, "cog.text.yaml": TextSettings}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_predictor_is_there(name):
    path, _, predictor = configuration(name)["run"].partition(":")
    classes = [node.name for node in ast.parse((PROJECT / path).read_text()).body if isinstance(node, ast.ClassDef)]
    assert predictor in classes


@pytest.mark.parametrize(("name", "settings"), CONFIGURATIONS.items())
def test_the_environment_has_settings_that_can_be(name, settings):
    environ = dict(variable.split("=", 1) for variable in configuration(name)["environment"])
    Settings.from_env(environ)
    assert (PROJECT / settings.from_env(environ).model).is_dir()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_torch_is_pinned_and_launches_no_overlapping_kernels(name):
    """And kernels stay such as a warm boot loads fast.

    torch cannot launch overlapping kernels statically: a warm boot then loads every candidate through Triton.
    """
    requirements = (PROJECT / configuration(name)["build"]["python_requirements"]).read_text()
    assert any(line.startswith("torch==") for line in requirements.splitlines())

    assert not any(variable.startswith("TORCHINDUCTOR_ENABLE_PDL") for variable in configuration(name)["environment"])


def test_both_images_are_built_alike():
    first, second = (configuration(name)["build"] for name in CONFIGURATIONS)
    assert first == second
