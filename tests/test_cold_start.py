"""What `COMPILE_CACHE_COLD_START=auto` means in a process: told by its parent and its working directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from boots import python_path
from cog_server import PROJECT

# What a worker of Cog's server does, as far as this is about it.
WORKER = """\
import json, os
from compile_cache.lifecycle.host import resolve_cold_start
from compile_cache.settings import Settings
settings = resolve_cold_start(Settings.from_env(os.environ))
print(json.dumps([settings.cold_start, settings.unseen, settings.setup_budget_s]))
"""
# A boot whose half minute for one answer is over.
BOOT = """\
from compile_cache.lifecycle import boot
boot._ONE_ANSWER_S = 0.0
import boot_once
boot_once.main()
"""
# A parent that has the arguments of Cog's server, and starts a worker.
SERVER = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {!r}]).returncode)"
COG = ("-m", "cog.server.http")
KEPT = (*COG, "--await-explicit-shutdown", "true")
OTHER = ("-m", "http.server")
BACKGROUND, BLOCK = ["background", "background", 240.0], ["block", "background", 240.0]
ONE_ANSWER = ["block", "eager", None]


def started(
    worker: str, folder: Path, arguments: Sequence[str] = COG, wrapper: Sequence[str] = (), **variables: str
) -> Any:
    """What a worker prints whose parent has these arguments, and works in `folder`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COMPILE_CACHE_")}
    environ |= {f"COMPILE_CACHE_{name}": value for name, value in variables.items()}
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", SERVER.format(worker), *arguments],
        cwd=folder,
        env={**environ, "PYTHONPATH": python_path(PROJECT, Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def in_mount(tmp_path) -> tuple[Path, tuple[str, ...]]:
    """A folder, and the wrapper under which it is a mount, as `cog run` mounts the project over the image's folder."""
    folder = tmp_path / "src"
    folder.mkdir()
    unshare = ("unshare", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount anything")
    mount = f'mount --bind "{tmp_path}" "{folder}" && cd "{folder}" && exec "$@"'
    return folder, (*unshare, "sh", "-c", mount, "sh")


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ((), {}, BLOCK),
        (OTHER, {}, BLOCK),
        (COG, {}, BACKGROUND),
        (KEPT, {}, BACKGROUND),
        *((arguments, {"COLD_START": made[0]}, made) for arguments in ((), KEPT) for made in (BACKGROUND, BLOCK)),
        *((COG, {"UNSEEN": value}, ["background", value, 240.0]) for value in ("background", "eager")),
        ((), {"UNSEEN": "eager"}, ["block", "eager", 240.0]),
        (COG, {"SETUP_BUDGET_S": "0"}, ["background", "background", 0.0]),
        *((OTHER, {"REQUIRE": "hit", "COLD_START": value}, BACKGROUND) for value in ("auto", "block")),
    ],
)
def test_a_lasting_worker_compiles_in_the_background_and_a_given_value_wins(tmp_path, arguments, variables, expected):
    assert started(WORKER, tmp_path, arguments, **variables) == expected


@pytest.mark.parametrize(("given", "expected"), [(COG, ONE_ANSWER), (KEPT, BACKGROUND)], ids=["cog run", "cog serve"])
def test_a_server_in_a_mounted_project_lasts_only_if_it_says_so(in_mount, given, expected):
    """The server of `cog run` ends after one prediction."""
    assert started(WORKER, in_mount[0], given, in_mount[1]) == expected


@pytest.mark.parametrize(("given", "expected"), [(COG, "off"), (KEPT, "hit")], ids=["cog run", "cog serve"])
def test_no_hit_is_required_of_a_server_of_one_prediction(in_mount, given, expected):
    worker = WORKER.replace("[settings.cold_start, settings.unseen, settings.setup_budget_s]", "settings.require")
    assert started(worker, in_mount[0], given, in_mount[1], REQUIRE="hit") == expected


def test_a_server_of_one_prediction_leaves_to_later_runs_what_takes_long(in_mount, tmp_path):
    places = {name: str(tmp_path / name.lower()) for name in ("STORE", "DIR")}
    told = started(BOOT, in_mount[0], COG, in_mount[1], **places)
    assert told["compiled_now"] == 0
    assert {region["step"] for region in told["report"]["regions"]} == {"eager"}
