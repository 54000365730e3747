"""`compile-cache fill`: what it publishes, what a boot then finds, and what it says of what is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from boots import run_boot, settings, stored
from cog_server import PROJECT

from compile_cache.storage.pack.signing import generate_keys
from compile_cache.storage.stores.local import INDEX

# Of one predictor, a class for each thing that can be missing, and one that is as it should be.
PREDICT = """
import compile_cache
from compile_cache.settings import Settings
import os


class Predictor:
    def setup(self):
        print("a line of the predictor's own")
        model = os.environ.get("MODEL", "toy/model@" + "0" * 40)
        with compile_cache.boot(model) as begun:  # not kept: any predictor may do so
            from network import Network, torch

            network = Network().eval()
            begun.compile(network)
            begun.warm_up(lambda: predict(network, torch))


def predict(network, torch):
    with torch.inference_mode():
        network(torch.ones(4, 16))
        network(torch.ones(2, 16))
"""
NETWORK = """
import torch
from torch import nn


class Good(nn.Linear):
    def forward(self, x):
        return super().forward(x)


class Breaking(Good):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()  # here
        return torch.mm(x, self.weight)


class Dropping(Good):
    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), training=True)


class Idle(Good):
    pass


class Network(nn.Module):
    _no_split_modules = ["Good", "Breaking", "Dropping", "Idle"]

    def __init__(self):
        super().__init__()
        self.called = nn.Sequential(Good(16, 16), Breaking(16, 16), Dropping(16, 16))
        self.idle = Idle(16, 16)

    def forward(self, x):
        return self.called(x)
"""
BROKEN_LINE = 1 + NETWORK.splitlines().index("        torch._dynamo.graph_break()  # here")


def fill(
    folder: Path, *arguments: str, project: Path = PROJECT, forked: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The finished command, with a cache directory in `folder`; `variables` as they are. `forked`: see `run_boot`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMPILE_CACHE_")}
    environ |= {"COMPILE_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1", **variables}
    if forked:
        return run_boot(environ, "fill", *arguments, program="compile_cache.cli", folder=project)
    # Not the installed script: a kernel in C++ is looked up by its compile command, which has the paths of the Python
    # that runs, and a server's Python is this one.
    command = [sys.executable, "-m", "compile_cache.cli", "fill", *arguments]
    return subprocess.run(command, cwd=project, env=environ, capture_output=True, text=True, timeout=500)


EXPLAINED = "graph_breaks,recompiles"  # as the command says


def small_project(folder: Path, predict: str = PREDICT) -> Path:
    (folder / "cog.yaml").write_text('environment:\n  - FROM_COG_YAML=1\nrun: "predict.py:Predictor"\n')
    (folder / "predict.py").write_text(predict)
    (folder / "network.py").write_text(NETWORK)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder for an image, filled with the demo model of this project's cog.yaml: a fill requires no hit."""
    folder = tmp_path_factory.mktemp("demo")
    variables = {"WARM_UP_SIZES": "64x64", "COMPILE_CACHE_REQUIRE": "hit"}
    return folder, fill(folder, "--to", str(folder / "baked"), "--json", **variables)


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory):
    """A predictor of which three classes of four are not filled."""
    folder = tmp_path_factory.mktemp("incomplete")
    project = small_project(folder)
    return folder, fill(folder, "--to", str(folder / "store"), project=project, forked=False, TORCH_LOGS=EXPLAINED)


def test_the_demo_model_is_filled_and_nothing_is_missing(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["is_complete"]
    assert not answer["missing"]
    (booted,) = answer["boots"]
    assert booted["model_name"] == "flux-digits"
    for region in booted["regions"]:
        assert region["made"] >= 1
        assert region["relative_error"] <= region["tolerance"]
        assert region["compiled_ms"] > 0
        assert region["eager_ms"] > 0
    (environment,) = answer["environments"].values()
    assert environment["gpu"] == ""
    packs = {pack["entry"]["name"]: pack["state"] for pack in answer["packs"]}
    assert packs == {name: "sound" for name in stored(folder / "baked") if name.endswith(".pack")}
    indexed = {entry["name"] for entry in json.loads((folder / "baked" / INDEX).read_text())["objects"]}
    assert packs.keys() < indexed == stored(folder / "baked").keys() - {INDEX}


def test_a_predictor_with_the_folder_as_its_layer_compiles_nothing(demo):
    folder, _ = demo
    environ = {
        **settings(folder, store="off", layers=str(folder / "baked"), require="hit"),
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "64x64,96x64,64x96",
        "WARM_UP_SIZES": "64x64",
        "HF_HUB_OFFLINE": "1",
    }
    done = run_boot(environ, "import predict; predict.Predictor().setup()", program="run_source", folder=PROJECT)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert report["restore"]["outcome"] == "hit"
    assert report["fully_precompiled"], report


def test_a_fill_with_something_missing_fails_and_says_what_and_why_and_what_to_do(incomplete):
    _, done = incomplete
    assert done.returncode == 1
    missing = [line for line in done.stderr.splitlines() if line.startswith("missing: ")]
    breaking, dropping, idle = sorted(missing)
    assert breaking.startswith("missing: region Breaking is not precompiled: ")
    assert "graph_break" in breaking
    assert "COMPILE_CACHE_LEAVE_EAGER=Breaking" in breaking
    assert dropping.startswith("missing: region Dropping is served eager: ")
    assert "its answer differs from eager by " in dropping
    assert "COMPILE_CACHE_LEAVE_EAGER=Dropping" in dropping
    assert idle.startswith("missing: region Idle: nothing called it in the warm-up")


def test_what_is_not_missing_is_stored_and_verified_and_the_last_line_names_the_machine(incomplete):
    folder, done = incomplete
    names = [name for name in stored(folder / "store") if name.endswith(".pack")]
    *lines, last = done.stdout.splitlines()
    assert next(line for line in lines if line.startswith(f"{len(names)} pack")).endswith(f": {len(names)} sound")
    assert last.startswith(f"not filled (3 problems): predict.py:Predictor, in {folder / 'store'}, for CPUs only")
    assert last.endswith("not for a GPU")


@pytest.mark.parametrize(
    ("stream", "pattern"),
    [
        ("stderr", rf"Graph break in user code at \S+/network.py:{BROKEN_LINE}"),
        ("stderr", "size mismatch at index 0. expected 4, actual 2"),
        ("stderr", "a line of the predictor's own"),
        ("stdout", "region Breaking .*with graph breaks"),
        ("stdout", "region Dropping .*its answer differs from eager by"),
    ],
)
def test_a_fill_shows_the_log_of_setup_torch_and_predictor_apart_from_its_answer(incomplete, stream, pattern):
    _, done = incomplete
    assert re.search(pattern, getattr(done, stream))
    assert bool(re.search(pattern, done.stdout)) == (stream == "stdout")


def test_a_second_fill_that_leaves_the_others_eager_loads_what_is_stored_and_is_complete(incomplete):
    folder, _ = incomplete
    variables = {"COMPILE_CACHE_STORE": str(folder / "store"), "COMPILE_CACHE_REPORT": str(folder / "report.json")}
    left = "Breaking,Dropping,Idle,Missing"
    done = fill(folder, project=folder, COMPILE_CACHE_LEAVE_EAGER=left, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("filled: ")
    assert "COMPILE_CACHE_LEAVE_EAGER names Missing, but this boot has no such region" in done.stderr
    assert "COMPILE_CACHE_LEAVE_EAGER names Breaking" not in done.stderr
    (good, *_) = json.loads((folder / "report.json").read_text())["regions"]
    assert (good["name"], good["step"], good["loaded"], good["made"]) == ("Good", "precompiled", 2, 0)


def test_a_store_that_cannot_be_written_is_a_problem(tmp_path, incomplete):
    folder, _ = incomplete
    (tmp_path / "store").write_text("no folder")
    variables = {"COMPILE_CACHE_LEAVE_EAGER": "Breaking,Dropping,Idle"}
    done = fill(tmp_path, "--to", str(tmp_path / "store"), project=folder, **variables)
    assert done.returncode == 1
    assert "filled: " not in done.stdout
    assert "error: " in done.stderr or "missing: " in done.stderr


def test_a_predictor_that_does_not_boot_is_a_problem(tmp_path):
    project = small_project(tmp_path, "class Predictor:\n    def setup(self):\n        pass\n")
    done = fill(tmp_path, "--json", project=project)
    assert done.returncode == 1
    boot, packs = json.loads(done.stdout)["missing"]
    assert boot.startswith("boot: setup() did not call compile_cache.boot()")
    assert packs.startswith("packs: nothing is stored")


MISTAKEN = "class Predictor:\n    def setup(self):\n        raise ValueError('my mistake')\n"


@pytest.mark.parametrize(
    ("predict", "variables", "said"),
    [
        (MISTAKEN, {}, "error: predict.py:Predictor could not be set up, so nothing was published: ValueError"),
        ("raise SystemError", {"COMPILE_CACHE_STORE": "off"}, "error: there is no store to fill"),
        ("raise SystemError", {"COMPILE_CACHE_SCOPE": "off"}, "error: nothing would be compiled"),
        ("raise SystemError", {"COMPILE_CACHE_TRUSTED_KEYS": generate_keys()[1]}, "error: nothing would be published"),
    ],
)
def test_a_fill_that_can_fill_nothing_ends_with_a_line_and_a_predictors_traceback(tmp_path, predict, variables, said):
    done = fill(tmp_path, project=small_project(tmp_path, predict), **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(said)
    assert ("in setup" in done.stderr) == (predict == MISTAKEN)
    assert "SystemError" not in done.stderr
