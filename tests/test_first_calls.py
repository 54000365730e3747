"""Slow first calls are written down by one boot, and made by the next ones while their weights load."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from boots import run_boot, settings
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import compile_cache
from compile_cache.calls.first_calls import Notes, make
from compile_cache.errors import SettingsError

PICTURE = torch.zeros(1, 3, 8, 8)
WEIGHT = torch.zeros(4, 3, 3, 3)


@torch.inference_mode()
def draw(picture: torch.Tensor) -> torch.Tensor:
    noise = torch.randn(1, 5, 2, 8, generator=torch.Generator().manual_seed(1))
    heads = noise.transpose(1, 2)
    attention = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    row = torch.zeros(1, 3).expand(4, 3)
    picked = row[torch.tensor([1, 2])]
    return torch.cat([functional.conv2d(picture, WEIGHT).flatten(), attention.flatten(), picked.flatten()]).sigmoid()


def slow_calls(run: Callable[[Any], object], plan: list[Any], least_s: float = 0.0) -> str:
    with Notes(least_s) as notes:
        for inputs in plan:
            run(inputs)
    return str(notes)


def make_calls(noted: str, is_over: Callable[[], bool] = lambda: False) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "first_calls.json")
        path.write_text(noted)
        make(path, is_over)


class Seen(TorchDispatchMode):
    """The operators that are called, with the sizes and strides of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[torch.Size, tuple[int, ...]]]]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        self.calls.append((str(operator), [(each.shape, each.stride()) for each in tensors]))
        return operator(*args, **(kwargs or {}))


def test_the_same_operators_are_called_with_zeros_of_the_same_sizes_and_strides():
    with Seen() as drawn:
        draw(PICTURE)
    with Seen() as made:
        make_calls(slow_calls(draw, [PICTURE]))
    for name in ("conv2d.default", "scaled_dot_product_attention.default", "index.Tensor", "cat.default"):
        assert next(call for call in drawn.calls if call[0] == f"aten.{name}") in made.calls


def test_random_calls_and_those_with_objects_are_left_out_and_random_numbers_stay():
    def draw_noise(_: object) -> None:
        torch.zeros(3).exponential_()
        torch.rand(2)
        torch.randn(2, generator=torch.Generator())
        draw(PICTURE)

    noted = slow_calls(draw_noise, [None])
    names = {name for name, *_ in json.loads(noted)}
    assert "conv2d.default" in names
    assert not names & {"exponential_.default", "rand.default", "randn.generator"}
    before = torch.get_rng_state()
    make_calls(noted)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_slow_calls_are_noted_once_each_and_the_slowest_first():
    assert json.loads(slow_calls(draw, [PICTURE], least_s=100.0)) == []
    noted = [json.dumps(each) for each in json.loads(slow_calls(draw, [PICTURE, PICTURE]))]
    assert len(set(noted)) == len(noted)


def test_what_the_caller_compiles_is_compiled_while_calls_are_noted():
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph

    with Notes():
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(2))
    assert len(graphs) == 1


def test_no_call_is_made_once_the_weights_are_there():
    noted = slow_calls(draw, [PICTURE])
    with Seen() as made:
        make_calls(noted, lambda: True)
    assert made.calls == []


@pytest.mark.parametrize("damaged", ["", "{}x", '[["no_such.default", [], {}]]', '[["../load_library", ["x"], {}]]'])
def test_what_is_damaged_is_an_error_that_a_boot_can_do_without(damaged):
    with pytest.raises(Exception, match=r"."):
        make_calls(damaged)


BOOT = """
import sys, torch, compile_cache
def add(name):
    path = boot.kept_file(name)
    text = path.read_text() if path and path.exists() else ""
    print(path and text)
    if path:
        path.write_text(text + "x")
with compile_cache.boot("org/model") as boot:
    if "compile" in sys.argv:
        boot.compile(torch.nn.Linear(2, 2), whole=True)
        add("mine.json")
add("after/READY.json")
stored = boot.wait_published(60)
add("after/all.json")
print(stored, boot.wait_published(60))
add("before/exit.json")
"""


@pytest.mark.parametrize("compiles", [("compile",), ()])
def test_what_a_boot_writes_is_stored_and_the_next_one_finds_the_newest(tmp_path, compiles):
    told = []
    for _ in range(3):
        done = run_boot(settings(tmp_path), BOOT, *compiles, program="run_source")
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split("\n"))
    for number, lines in enumerate(told):
        assert lines == [*["x" * number] * (2 + len(compiles)), "True True", "x" * number, ""]
    lines = run_boot(settings(tmp_path, publish="false"), BOOT, *compiles, program="run_source").stdout.split("\n")
    assert lines[:2] == ["xxx", "xxx"], "found, though nothing is published"


@pytest.mark.parametrize(
    "name",
    [".x", "x.lock", "x.tmp.json", "../x", "/tmp/x", "a/../x", "", "a//x", "x/", "locks/x", "a\nb", "a\\b", "x" * 256],
)
def test_a_name_that_cannot_be_stored_is_refused_when_it_is_named(tmp_path, name):
    boot = compile_cache.boot("org/model", environ=settings(tmp_path, store="off"))
    with pytest.raises(SettingsError, match="no pack can have this file: "):
        boot.kept_file(name)


@pytest.mark.parametrize("other", ["Mine.json", "mine.json/x"])
def test_two_names_that_no_pack_can_have_together_are_refused(tmp_path, other):
    boot = compile_cache.boot("org/model", environ=settings(tmp_path, store="off"))
    boot.kept_file("mine.json")
    with pytest.raises(SettingsError, match=r"mine\.json"):
        boot.kept_file(other)


def test_damaged_notes_are_removed_so_that_they_are_written_anew(tmp_path):
    path = tmp_path / "first_calls.json"
    path.write_text('[["conv2d"')
    with pytest.raises(json.JSONDecodeError):
        make(path, lambda: False)
    assert not path.exists()


def test_without_a_store_no_file_is_kept(tmp_path):
    with compile_cache.boot("org/model", environ=settings(tmp_path, store="off")) as boot:
        assert boot.kept_file("mine.json") is None


FIRST_CALLS = """
import sys, torch, compile_cache
from torch import nn
from compile_cache.calls import first_calls

first_calls.Notes.__init__.__defaults__, made = (0.0,), []
first_calls.make = lambda path, is_over: made.append((path.read_text(), is_over()))
block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU())

@torch.inference_mode()
def draw(size):
    block(torch.zeros(1, 3, size, 8)).cumsum(0)

with compile_cache.boot("org/model") as boot:
    thread = boot.model_thread()
    while (path := boot.kept_file("first_calls.json")) is None:
        with boot.importing():  # takes nothing before the restore has ended
            pass
    thread.call(int)
    torch.cuda.is_available = lambda: True  # notes are taken on a GPU alone
    boot.compile(block, whole=True)
    boot.warm_up(thread.call, function=draw, size=8)
    thread.call(boot.warm_up, draw, size=9)
    print(made == [(path.read_text(), False)] if made else path.read_text())
    print(boot.waiting)
boot.wait_compiled(120)
boot.wait_published(60)
"""


def test_the_first_boot_notes_what_was_slow_and_the_next_one_calls_it_beside_the_weights(tmp_path):
    """Outside regions and in them, in each warm-up, and on the model's thread. Each call of a region is ordered all the
    same."""
    environ = settings(tmp_path, cold_start="background")
    first, second = (run_boot(environ, FIRST_CALLS, program="run_source") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    noted, told = first.stdout.splitlines()
    tensors = [(name, args[0]["sizes"]) for name, args, _ in json.loads(noted) if args and "sizes" in args[0]]
    assert {(name, tuple(sizes)) for name, sizes in tensors} >= {
        ("conv2d.default", (1, 3, 8, 8)),
        ("conv2d.default", (1, 3, 9, 8)),
        ("cumsum.default", (1, 4, 6, 6)),
    }
    assert told == "2"
    assert second.stdout.splitlines()[0] == "True"


def test_operators_of_higher_order_run_while_calls_are_noted():
    """As of `flex_attention` and `torch.cond`, which torch makes of their functions without a compile of the model."""

    def choose(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    one = torch.ones(3)
    with Notes(0.0):
        assert torch.equal(choose(one), one.sin())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:.*quantiz")
def test_calls_with_tensors_that_are_not_plain_are_left_out():
    """Some have no strides. Zeros in place of the others would be other calls, and fail."""
    rows = torch.eye(4).to_sparse_csr()
    codes = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)

    def multiply(_: object) -> None:
        rows @ torch.ones(4, 4)
        codes.dequantize()
        torch.ones(4, 4).to_mkldnn().to_dense()

    make_calls(slow_calls(multiply, [None]))


def test_a_call_that_fails_with_zeros_is_left_out_and_the_others_are_made():
    """Else no boot would make what is noted after it, and each one would write the notes anew."""

    def invert(one: torch.Tensor) -> None:
        torch.linalg.inv(one)
        one.cumsum(0)

    noted = slow_calls(invert, [torch.eye(2)])
    calls = sorted(json.loads(noted), key=lambda call: "inv" not in call[0])
    assert "inv" in calls[0][0]
    with Seen() as made:
        make_calls(json.dumps(calls))
    assert "aten.cumsum.default" in [name for name, _ in made.calls]
