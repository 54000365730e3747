"""A call that compiled code may serve has eager's answer and eager's effects, whatever happens on the way there."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from background_boots import Told
from background_boots import play as play_scene
from boots import run_boot, settings

play = functools.partial(play_scene, program="serving_faults")


FROZEN = ("Frozen", "FrozenData", "FrozenReplaced")
WITH_STATE = ("Streaming", "Counter", "Tally", "Noisy", "Methodical", *FROZEN)
# No code fits twice where a number in an attribute changes; compiled code draws other numbers than eager; and a copy of
# a call shares parameters.
NEVER_COMPILED = ("Tally", "Noisy", *FROZEN)
BEYOND = ("Valued", "Writing", "Keeping", "Recognising")
OUT_OF_FILES = ("Broken", "Autocast")


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Callable[..., tuple[Path, Told]]:
    """Plays the scene `right` for these classes over an empty store, once, and says in which folder."""

    @functools.cache
    def play_once(*names: str, cold_start: str = "background") -> tuple[Path, Told]:
        folder = tmp_path_factory.mktemp("boot")
        return folder, play(folder, "right", *names, cold_start=cold_start)

    return play_once


@pytest.fixture(scope="module")
def following(first) -> Callable[..., Told]:
    """Plays it again over the same store, once, in the background."""

    @functools.cache
    def play_once(*names: str, after: str = "background") -> Told:
        folder, _ = first(*names, cold_start=after)
        return play(folder / "next", "right", *names, after=folder)

    return play_once


@pytest.fixture(params=["background", "block"])
def booted(request, first) -> Told:
    """A boot of all classes of which one boot tells enough."""
    return first(*WITH_STATE, *BEYOND, "Recurrent", cold_start=request.param)[1]


@pytest.mark.parametrize("name", WITH_STATE)
def test_a_comparison_advances_neither_a_state_nor_a_generator(booted, name):
    pair = booted["pairs"][name]
    assert pair["wrong"] == []
    assert name in NEVER_COMPILED or "precompiled" in pair["steps"]


@pytest.mark.parametrize("name", FROZEN[:2])  # torch itself refuses the third in the second process
def test_a_call_that_writes_into_a_parameter_is_eager_and_says_so(booted, name):
    (region,) = (region for region in booted["report"]["regions"] if region["name"] == name)
    assert region["step"] == "eager"
    assert "its parameter calls" in region["reason"]


@pytest.mark.parametrize("folder", ["", "pinned"], ids=["newest", "pinned"])
def test_whole_encoders_are_precompiled_with_the_newest_transformers_and_the_pinned(tmp_path, folder):
    """A later boot has imported other models first."""
    path = str(Path(sys.prefix, folder)) if folder else ""
    for boot, after in (("first", None), ("second", "first")):
        told = play(tmp_path / boot, "encoders", path, after=after and tmp_path / after)
        assert told["steps"] == {"BertModel": "precompiled", "T5EncoderModel": "precompiled"}
        assert told.processes == (after is None)
    pinned = re.search(r"^transformers==(.*)$", Path("requirements.txt").read_text(), re.MULTILINE)
    assert bool(folder) is (pinned is not None and told["version"] == pinned[1])


def test_code_serves_no_instance_on_which_no_boot_has_compared_it(tmp_path):
    """In the first boot, the last of five instances is not called. It differs in what guards do not see."""
    assert play(tmp_path / "first", "partly", "4", cold_start="block")["published"]
    told = play(tmp_path / "second", "partly", "5", after=tmp_path / "first")
    assert told["wrong"] == []
    assert told["served"] == {"Apart": {"precompiled": 4, "eager": 1}}


@pytest.mark.parametrize("name", BEYOND)
def test_code_that_differs_in_anything_but_its_tensors_serves_no_call(booted, name):
    assert booted["pairs"][name]["wrong"] == []


@pytest.mark.parametrize(
    ("scene", "then"), [("unrepeated", ("right", "Wide")), ("brief", ("brief",))], ids=["warm-up", "short life"]
)
def test_what_is_not_called_again_or_ends_soon_is_not_compiled_again_in_the_next_boot(tmp_path, scene, then):
    assert play(tmp_path / "first", scene)["published"]
    told = play(tmp_path / "second", *then, after=tmp_path / "first")
    assert told["waiting"] == told.processes == 0


@pytest.mark.parametrize("name", OUT_OF_FILES)
@pytest.mark.parametrize("after", ["block", "background"])
def test_what_cannot_be_compiled_ahead_of_time_is_compiled_out_of_stored_files(following, after, name):
    told = following(*OUT_OF_FILES, after=after)
    counts = told["ready"]["counts"]
    assert told["pairs"][name]["wrong"] == []
    assert "eager" not in told["pairs"][name]["steps"][-3:]
    assert counts["hits"] + counts["precompiled_loaded"] > 0
    assert counts["misses"] == counts["precompiled_made"] == told["waiting"] == 0


# A class whose own file a release changes, one that calls a function which it changes, and one whose code `exec` runs
# in a file that stays, and which is compiled ahead of time.
CHANGED = """
import torch
from background_blocks import Wide

class Changed(Wide):
    def forward(self, x):
        x = torch.addmm(x, super().forward(x), self.scale, alpha=FACTOR)
        torch._dynamo.graph_break()
        return torch.mm(x, self.scale)
"""
CALLING = """
import torch
from background_blocks import Wide
from helper import combine

class Calling(Wide):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return combine(x, self.scale)
"""
HELPER = """
import torch

def combine(x, y):
    return torch.addmm(x, x, y, alpha=FACTOR)
"""
EXECUTING = """
from pathlib import Path
exec(Path(__file__).with_suffix(".txt").read_text(), globals())
"""
EXECUTED = """
import torch
from background_blocks import Wide

class Executed(Wide):
    def forward(self, x):
        return torch.addmm(x, super().forward(x), self.scale, alpha=FACTOR)
"""
FILES = {"changed.py": CHANGED, "calling.py": CALLING, "helper.py": HELPER}
FILES |= {"executed.py": EXECUTING, "executed.txt": EXECUTED}
STEPS = {"Changed": "graphs", "Calling": "graphs", "Executed": "precompiled"}


def boots_of(root: Path) -> Callable[..., Told]:
    """Plays boots in containers that share nothing but the store: each begins with the store of the one before."""
    before: list[Path] = []

    def boot(*scene: str) -> Told:
        folder = root / str(len(before))
        shutil.rmtree(root / "cache", ignore_errors=True)
        told = play(folder, *scene, after=before[-1] if before else None, dir=str(root / "cache"))
        before.append(folder)
        return told

    return boot


@pytest.mark.parametrize(("names", "is_version"), [([*STEPS], False), (["Changed"], True)], ids=["code", "version"])
def test_a_release_is_compiled_once_and_its_second_boot_finds_all(tmp_path, names, is_version):
    """Code with a graph break, whose graphs are taken out of stored files, and code without. The version of the model
    may be that of its code."""
    code, play_next = tmp_path / "code", boots_of(tmp_path)
    code.mkdir()

    def boot(factor: str) -> Told:
        for name, text in FILES.items():
            (code / name).write_text(text.replace("FACTOR", factor))
        return play_next("released", str(code), ",".join(names), *[str(code)] * is_version)

    assert boot("1.5")["published"]
    told, second = boot("0.5"), boot("0.5")
    for each in (told, second):
        assert {name: pair["wrong"] for name, pair in each["pairs"].items()} == {name: [] for name in names}
    assert {call.split()[0] for call in told.done} == {*names}
    assert (told.processes, second.processes) == (1, 0)
    served = {name: set(pair["steps"][-3:]) for name, pair in second["pairs"].items()}
    assert served == {name: {STEPS[name]} for name in names}, second["report"]["regions"]
    assert second["ready"]["counts"]["misses"] == 0


def test_graphs_that_torch_does_not_store_are_no_promise_to_the_next_boots(tmp_path):
    packs, boot = [], boots_of(tmp_path)
    for number in range(2):
        told = boot("right", "Looping")
        assert told["pairs"]["Looping"]["wrong"] == []
        assert set(told["pairs"]["Looping"]["steps"]) == {"eager"}
        (region,) = told["report"]["regions"]
        assert "torch does not store its graphs" in region["reason"]
        counts = told["ready"]["counts"]
        assert counts["misses"] == 0, "nothing is traced in the setup"
        packs.append(len(list((tmp_path / str(number) / "store").rglob("*.pack"))))
    assert len(set(packs)) == 1, packs


def test_a_class_of_which_torch_makes_no_graph_is_eager_and_says_so(booted):
    assert set(booted["pairs"]["Recurrent"]["steps"]) == {"eager"}
    (region,) = (region for region in booted["report"]["regions"] if region["name"] == "Recurrent")
    assert region["step"] == "eager"
    assert "torch makes no graph of it" in region["reason"]


def test_a_fork_is_served_by_the_code_that_it_has_and_says_that_it_gets_no_other(tmp_path):
    told = play(tmp_path, "forked")
    for name, step in (("early", "eager"), ("late", "precompiled")):
        fork = told[name]
        assert (fork["status"], fork["wrong"], fork["waiting"], fork["answered"]) == (0, [], 0, True)
        assert fork["steps"][-2:] == [step, "eager"]
        assert "a fork of a booted process has no second process" in fork["reason"]
    assert told["parent"]["wrong"] == []
    assert told["parent"]["steps"][-1] == "precompiled"


def test_graphs_of_the_second_process_are_found_whichever_module_imported_torch_first(first, tmp_path):
    folder, _ = first(*OUT_OF_FILES)
    told = play_scene(tmp_path, "right", "Broken", after=folder, forked=False, program="loaded_predictor")
    assert told["ready"]["counts"]["hits"] > told["ready"]["counts"]["misses"] == 0
    assert set(told["pairs"]["Broken"]["steps"][1:]) == {"graphs"}


def test_a_compiler_that_was_killed_once_slows_no_later_boot(tmp_path):
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    # The first kernel's compile, not a question that Inductor asks before.
    compiler.write_text(f"""#!/bin/sh
[ -e {tmp_path}/killed ] || case "$1" in *.cpp)
  if grep -q cpp_prefix "$1"; then touch {tmp_path}/killed; kill -KILL $$; fi
esac
exec {shutil.which("g++")} "$@"
""")
    compiler.chmod(0o755)
    ill, well = tmp_path / "ill", tmp_path / "well"
    (ill / "store").mkdir(parents=True)  # nothing may be stored there
    told = play(ill, "right", "Norm", PATH=f"{compiler.parent}{os.pathsep}{os.environ['PATH']}")
    assert (tmp_path / "killed").exists()
    assert told["pairs"]["Norm"]["wrong"] == []
    told = play(well, "right", "Norm", after=ill)
    assert told["pairs"]["Norm"]["wrong"] == []
    assert told["pairs"]["Norm"]["steps"][-1] == "precompiled"


def test_a_link_in_a_sticky_folder_is_not_written_through(tmp_path):
    victim, shared = tmp_path / "victim", tmp_path / "shared"
    victim.write_bytes(bytes(9 << 20))  # a log of this size is emptied
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "0.logs").mkdir()
    link = shared / "0.logs" / "compiling.log"
    link.symlink_to(victim)
    if os.geteuid() == 0:
        os.lchown(link, 65534, 65534)
    told = play(tmp_path, "right", "Wide", dir=str(shared))
    assert victim.read_bytes().count(0) == victim.stat().st_size == 9 << 20
    assert told["pairs"]["Wide"]["steps"][-1] == "precompiled"


@pytest.mark.parametrize("module", ["__main__", "own_classes"])
def test_calls_leave_what_eager_leaves_in_an_object_that_the_program_has_by_name(tmp_path, module):
    done = run_boot(settings(tmp_path, cold_start="block"), module, program="own_classes")
    left = json.loads(done.stdout)
    assert {name: found for name, (found, expected) in left.items() if found != expected} == {}
