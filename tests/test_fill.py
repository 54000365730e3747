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
from validating_server import ValidatingServer

from compile_cache.cli.terminal import size_text
from compile_cache.lifecycle.boot import observed_boots
from compile_cache.storage.stores.local import INDEX, parse_index

# Not the installed script: a kernel in C++ is looked up by its compile command, which has the paths of the Python that
# runs, and a server's Python is this one.
COMMAND = (sys.executable, "-m", "compile_cache.cli")

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


class Good(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        return torch.addmm(x, x, self.weight)


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
        self.good, self.breaking, self.dropping, self.idle = Good(), Breaking(), Dropping(), Idle()

    def forward(self, x):
        return self.dropping(self.breaking(self.good(x)))
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
    return subprocess.run(
        [*COMMAND, "fill", *arguments], cwd=project, env=environ, capture_output=True, text=True, timeout=500
    )


def small_project(folder: Path, predict: str = PREDICT) -> Path:
    (folder / "cog.yaml").write_text('environment:\n  - FROM_COG_YAML=1\nrun: "predict.py:Predictor"\n')
    (folder / "predict.py").write_text(predict)
    (folder / "network.py").write_text(NETWORK)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder for an image, filled with the demo model of this project's cog.yaml."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, fill(folder, "--to", str(folder / "baked"), "--json", forked=False, WARM_UP_SIZES="64x64")


@pytest.fixture(scope="module")
def incomplete(tmp_path_factory):
    """A predictor of which three classes of four are not filled."""
    folder = tmp_path_factory.mktemp("incomplete")
    project = small_project(folder)
    return folder, fill(folder, "--explain", "--store", str(folder / "store"), project=project, forked=False)


def test_the_demo_model_is_filled_and_nothing_is_missing(demo):
    folder, done = demo
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["is_complete"]
    assert not answer["problems"]
    (booted,) = answer["boots"]
    assert booted["model_name"] == "flux-digits"
    for region in booted["regions"]:
        assert region["made"] >= 1
        assert region["relative_error"] <= region["tolerance"]
        assert region["compiled_ms"] > 0
        assert region["eager_ms"] > 0
    assert answer["size_bytes"] == sum(
        len(content) for name, content in stored(folder / "baked").items() if name.endswith(".pack")
    )


def test_the_folder_lists_its_packs_for_a_web_server(demo):
    folder, _ = demo
    objects = {entry.name for entry in parse_index((folder / "baked" / INDEX).read_bytes())}
    assert objects == stored(folder / "baked").keys() - {INDEX}
    assert any(name.endswith(".pack") for name in objects)


def test_a_server_with_the_folder_as_its_layer_compiles_nothing(demo):
    folder, _ = demo
    environ = {
        **settings(folder, store="off", layers=str(folder / "baked")),
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "64x64,96x64,64x96",
        "WARM_UP_SIZES": "64x64",
        "HF_HUB_OFFLINE": "1",
    }
    with ValidatingServer("predict.py:Predictor", folder / "server.log", environ) as server:
        server.wait_ready()
    report = json.loads((folder / "report.json").read_text())
    assert report["restore"]["outcome"] == "hit"
    assert report["fully_precompiled"], report


def test_a_fill_on_a_cpu_says_that_it_is_of_no_use_to_a_gpu(demo, incomplete):
    (environment,) = json.loads(demo[1].stdout)["environments"]
    assert environment["gpu"] == ""
    assert "for CPUs only" in incomplete[1].stdout.splitlines()[-1]
    assert "not for a GPU" in incomplete[1].stdout.splitlines()[-1]


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


def test_what_is_not_missing_is_stored_and_counted(incomplete):
    folder, done = incomplete
    packs = {name: content for name, content in stored(folder / "store").items() if name.endswith(".pack")}
    last = done.stdout.splitlines()[-1]
    found = re.match(r"not filled \(3 problems\): (\d+) artifacts, (\d+\.\d kB) in (\S+), ", last)
    assert found, last
    assert int(found[1]) > 0
    assert found[3] == str(folder / "store")
    assert found[2] == size_text(sum(map(len, packs.values())))


def test_explain_shows_torchs_own_lines_about_graph_breaks_and_recompiles(incomplete):
    folder, done = incomplete
    assert f"Graph break in user code at {folder / 'network.py'}:{BROKEN_LINE}" in done.stderr
    assert "size mismatch at index 0. expected 4, actual 2" in done.stderr


def test_a_fill_says_why_a_region_is_not_compiled_ahead_of_time(incomplete):
    _, done = incomplete
    regions = [line for line in done.stdout.splitlines() if line.startswith("region ")]
    assert any("Breaking" in line and "with graph breaks" in line for line in regions)
    assert any("Dropping" in line and "its answer differs from eager by" in line for line in regions)


def test_what_a_predictor_prints_is_not_part_of_the_answer(incomplete):
    _, done = incomplete
    assert "a line of the predictor's own" in done.stderr
    assert "a line of the predictor's own" not in done.stdout


def test_a_fill_that_leaves_the_others_eager_is_complete(tmp_path, incomplete):
    folder, _ = incomplete
    left = "Breaking,Dropping,Idle,Missing"
    done = fill(tmp_path, project=folder, COMPILE_CACHE_STORE=str(tmp_path / "store"), COMPILE_CACHE_LEAVE_EAGER=left)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("filled: ")
    assert "COMPILE_CACHE_LEAVE_EAGER names Missing, but this boot has no such region" in done.stderr
    assert "COMPILE_CACHE_LEAVE_EAGER names Breaking" not in done.stderr


def test_a_second_fill_loads_what_is_stored_and_is_complete(tmp_path, incomplete):
    folder, _ = incomplete
    variables = {"COMPILE_CACHE_LEAVE_EAGER": "Breaking,Dropping,Idle"}
    done = fill(folder, "--store", str(folder / "store"), "--json", project=folder, **variables)
    answer = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    (good, *_) = answer["boots"][0]["regions"]
    assert (good["name"], good["step"], good["loaded"], good["made"]) == ("Good", "precompiled", 2, 0)


def test_a_store_that_cannot_be_written_is_a_problem(tmp_path, incomplete):
    folder, _ = incomplete
    (tmp_path / "store").write_text("no folder")
    variables = {"COMPILE_CACHE_LEAVE_EAGER": "Breaking,Dropping,Idle"}
    done = fill(tmp_path, "--store", str(tmp_path / "store"), project=folder, **variables)
    assert done.returncode == 1
    assert "filled: " not in done.stdout
    assert "error: " in done.stderr or "missing: " in done.stderr


def test_a_model_that_the_predictor_does_not_read_is_a_problem(tmp_path):
    project = small_project(tmp_path, "class Predictor:\n    def setup(self):\n        pass\n")
    done = fill(tmp_path, "--json", project=project)
    assert done.returncode == 1
    assert [problem["what"] for problem in json.loads(done.stdout)["problems"]] == ["boot"]


def test_a_setup_that_fails_ends_the_command_with_its_traceback_and_a_line(tmp_path):
    project = small_project(
        tmp_path, "class Predictor:\n    def setup(self):\n        raise ValueError('my mistake')\n"
    )
    done = fill(tmp_path, project=project)
    assert done.returncode == 1
    assert "in setup" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: predict.py:Predictor could not be set up")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"COMPILE_CACHE_STORE": "off"}, "there is no store to fill"),
        ({"COMPILE_CACHE_SCOPE": "off"}, "nothing would be compiled"),
    ],
)
def test_a_fill_that_could_not_fill_anything_does_not_begin(tmp_path, variables, said):
    done = fill(tmp_path, project=small_project(tmp_path, "raise SystemError"), **variables)
    assert done.returncode == 1
    assert said in done.stderr
    assert "SystemError" not in done.stderr


def test_a_boot_is_observed_only_while_somebody_looks(tmp_path):
    import compile_cache

    environ = {"COMPILE_CACHE_DIR": str(tmp_path), "COMPILE_CACHE_STORE": "off", "COMPILE_CACHE_SCOPE": "off"}
    with observed_boots() as boots:
        begun = compile_cache.boot("toy/model", environ=environ)
    compile_cache.boot("toy/model", environ=environ)
    assert boots == [begun]
