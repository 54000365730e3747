"""A call that compiled code may serve has eager's answer and eager's effects, whatever happens on the way there."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from background_boots import Told
from background_boots import play as play_scene
from boots import run_boot, settings

play = functools.partial(play_scene, program="serving_faults")


@pytest.fixture(scope="module")
def booted(tmp_path_factory) -> Callable[..., Told]:
    """Plays the scene `right` for these classes, once. With `then`, it is the second boot over the same store."""

    @functools.cache
    def play_once(*names: str, cold_start: str = "background", then: str = "") -> Told:
        folder = tmp_path_factory.mktemp("boot")
        told = play(folder, "right", *names, cold_start=cold_start)
        return play(folder / "next", "right", *names, cold_start=then, after=folder) if then else told

    return play_once


WITH_STATE = ("TokenStep", "Streaming", "Counter", "Tally", "Noisy")
# No code fits twice where a number in an attribute changes, and compiled code draws other numbers than eager.
NEVER_COMPILED = ("Tally", "Noisy")


@pytest.mark.parametrize(
    ("policy", "name"),
    [(policy, name) for policy in ("background", "block") for name in WITH_STATE],
)
def test_a_comparison_advances_neither_a_state_nor_a_generator(booted, policy, name):
    pair = booted(*WITH_STATE, cold_start=policy)["pairs"][name]
    assert pair["wrong"] == []
    assert name in NEVER_COMPILED or "precompiled" in pair["steps"]


BEYOND = ("Valued", "Writing", "Keeping", "Recognising")


@pytest.mark.parametrize("name", BEYOND)
def test_code_that_differs_in_anything_but_its_tensors_serves_no_call(booted, name):
    assert booted(*BEYOND)["pairs"][name]["wrong"] == []


@pytest.mark.parametrize("why", ["cancelled", "no memory"])
def test_code_whose_comparison_did_not_end_neither_serves_nor_is_published(tmp_path, why):
    told = play(tmp_path, "interrupted", why)
    assert told["left"] == 0
    assert told["wrong"] == []
    assert told["stored"] == []


def test_a_request_beside_a_comparison_is_not_served_by_the_code_that_is_compared(tmp_path):
    assert play(tmp_path, "beside")["wrong"] == []


def test_a_second_process_that_is_killed_before_it_is_ready_loses_no_call(tmp_path):
    told = play(tmp_path, "killed")
    assert told["killed"]
    assert told["answered"]
    assert {name: pair["steps"][-1] for name, pair in told["pairs"].items()} == dict.fromkeys(
        ("Wide", "Other", "Factor"), "precompiled"
    )


def test_orders_are_bounded(tmp_path):
    assert 0 < play(tmp_path, "many")["waiting"] <= 64


@pytest.mark.parametrize(
    ("scene", "then"), [("unrepeated", ("right", "Wide")), ("brief", ("brief",))], ids=["warm-up", "short life"]
)
def test_what_is_not_called_again_or_ends_soon_is_not_compiled_again_in_the_next_boot(tmp_path, scene, then):
    assert play(tmp_path / "first", scene)["published"]
    told = play(tmp_path / "second", *then, after=tmp_path / "first")
    assert told["waiting"] == told.processes == 0


@pytest.mark.parametrize(("name", "first"), [("Broken", "block"), ("Broken", "background"), ("Autocast", "background")])
def test_what_cannot_be_compiled_ahead_of_time_is_compiled_out_of_stored_files(booted, first, name):
    told = booted(name, cold_start=first, then="background")
    counts = told["ready"]["counts"]
    assert told["pairs"][name]["wrong"] == []
    assert "eager" not in told["pairs"][name]["steps"][-3:]
    assert counts["fxgraph_hits"] + counts["precompiled_loaded"] > 0
    assert counts["fxgraph_misses"] == counts["precompiled_made"] == told["waiting"] == 0


RELEASED = """
import torch
from background_blocks import Wide
from released_helper import combine

class Released(Wide):
    def forward(self, x):
        x = torch.addmm(x, super().forward(x), self.scale, alpha=FACTOR)
        torch._dynamo.graph_break()
        return combine(x, self.scale)
"""
HELPER = """
import torch

def combine(x, y):
    return torch.addmm(x, x, y, alpha=FACTOR)
"""
# The code that a release changes: the class's file, a function that it calls, both together with the version of the
# model, and code that `exec` has run, which is compiled ahead of time.
CHANGES = ("class", "helper", "version", "exec")


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_release_is_compiled_once_and_its_second_boot_finds_all(tmp_path, change):
    """Code with a graph break, whose graphs are taken out of stored files."""
    code = tmp_path / "code"
    code.mkdir()
    factors = {"class": "1.5", "helper": "1.5"}
    play_next = boots_of(tmp_path)

    def boot() -> Told:
        text, helper = (
            source.replace("FACTOR", factors[of]) for source, of in ((RELEASED, "class"), (HELPER, "helper"))
        )
        if change == "exec":
            (code / "released.txt").write_text(text.replace("torch._dynamo.graph_break()", "pass"))
            text = "from pathlib import Path\nexec(Path(__file__).with_suffix('.txt').read_text(), globals())\n"
        (code / "released.py").write_text(text)
        (code / "released_helper.py").write_text(helper)
        sources = [str(code)] if change == "version" else []
        return play_next("released", str(code), *sources)

    assert boot()["published"]
    factors["helper" if change == "helper" else "class"] = "0.5"
    told, second = boot(), boot()
    assert [each["pairs"]["Released"]["wrong"] for each in (told, second)] == [[], []]
    assert (told.processes, second.processes) == (1, 0)
    steps = {"precompiled" if change == "exec" else "compiled"}
    assert set(second["pairs"]["Released"]["steps"][-3:]) == steps, second["report"]["regions"]
    assert second["ready"]["counts"]["fxgraph_misses"] == 0


def test_graphs_that_torch_does_not_store_are_no_promise_to_the_next_boots(tmp_path):
    packs, boot = [], boots_of(tmp_path)
    for number in range(3):
        told = boot("right", "Looping")
        assert told["pairs"]["Looping"]["wrong"] == []
        assert set(told["pairs"]["Looping"]["steps"]) == {"eager"}
        (region,) = told["report"]["regions"]
        assert "torch does not store its graphs" in region["reason"]
        counts = told["ready"]["counts"]
        assert counts["fxgraph_misses"] == counts["fxgraph_bypasses"] == 0, "nothing is traced in the setup"
        packs.append(len(list((tmp_path / str(number) / "store").rglob("*.pack"))))
    assert len(set(packs)) == 1, packs


@pytest.mark.parametrize("name", ["Recurrent", "Gated"])
@pytest.mark.parametrize("policy", ["background", "block"])
def test_a_class_of_which_torch_makes_no_graph_is_eager_and_says_so(booted, name, policy):
    told = booted("Recurrent", "Gated", cold_start=policy)
    assert set(told["pairs"][name]["steps"]) == {"eager"}
    (region,) = [region for region in told["report"]["regions"] if region["name"] == name]
    assert region["step"] == "eager"
    assert "torch makes no graph of it" in region["reason"]


def test_hooks_that_were_removed_leave_a_module_as_it_was(tmp_path):
    told = play(tmp_path, "unhooked")
    assert told["wrong"] == [[], []]
    steps = {"before": "precompiled", "accelerate": "eager", "diffusers": "eager"}
    steps |= {"after accelerate": "precompiled", "after diffusers": "precompiled"}
    assert (told["Wide"], told["Nested"]) == (steps, steps), told["regions"]


def test_a_fork_is_served_by_the_code_that_it_has_and_says_that_it_gets_no_other(tmp_path):
    told = play(tmp_path, "forked", forked=False)
    for name, step in (("early", "eager"), ("late", "precompiled")):
        fork = told[name]
        assert (fork["status"], fork["wrong"], fork["waiting"], fork["answered"]) == (0, [], 0, True)
        assert fork["steps"][-2:] == [step, "eager"]
        assert "a fork of a booted process has no second process" in fork["reason"]
    assert told["parent"]["wrong"] == []
    assert told["parent"]["steps"][-1] == "precompiled"


def test_graphs_of_the_second_process_are_found_whichever_module_imported_torch_first(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    predictor = functools.partial(play_scene, program="loaded_predictor", forked=False)
    predictor(one, "right", "Broken")
    told = predictor(other, "right", "Broken", after=one)
    assert told["ready"]["counts"]["fxgraph_hits"] > told["ready"]["counts"]["fxgraph_misses"] == 0
    assert set(told["pairs"]["Broken"]["steps"][1:]) == {"compiled"}


@pytest.mark.parametrize("then", ["", "background"], ids=["first", "next"])
def test_a_call_with_hooks_is_eager_and_says_so(booted, then):
    told = booted("Hooked", then=then)
    assert told["ready"]["counts"]["graphs"] == 0
    assert told["pairs"]["Hooked"]["wrong"] == []
    assert set(told["pairs"]["Hooked"]["steps"]) == {"eager"}
    assert "hook" in told["report"]["regions"][0]["reason"]


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


@pytest.mark.parametrize("module", ["main", "imported"])
def test_calls_leave_what_eager_leaves_in_an_object_that_the_program_has_by_name(tmp_path, module):
    environ = settings(tmp_path, cold_start="block")
    done = run_boot(environ, module, forked=module == "imported", program="own_classes")
    left = json.loads(done.stdout)
    assert {name: found for name, (found, expected) in left.items() if found != expected} == {}
