"""Regions in this process, with real torch.compile: which modules they are, and how they climb and fall."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn
from toy_model import NormBlock, ToyModel, WideBlock, run

from compile_cache.errors import NotAModuleError
from compile_cache.inductor.counters import read_counts
from compile_cache.lifecycle.host import resolve_cold_start
from compile_cache.serving.comparison import compare
from compile_cache.serving.regions import Regions, find_regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """An empty cache directory that Inductor writes."""
    torch._dynamo.reset()
    directory = CacheDirectory.claim(tmp_path)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    directory.activate(os.environ)
    yield directory
    torch._dynamo.reset()


@pytest.fixture
def compiler(directory):
    return Regions(resolve_cold_start(Settings()), directory)


def warm_up(compiler: Regions, call) -> dict[str, str]:
    """Run `call` watched; each region's step afterwards."""
    with compiler.watching():
        call()
    return {region.report.name: region.report.step for region in compiler.by_class.values()}


def close(expected: list[float]):
    """Equal but for what fused float32 arithmetic rounds otherwise."""
    return pytest.approx(expected, rel=1e-3, abs=1e-6)


def only_report(compiler: Regions):
    (region,) = compiler.by_class.values()
    return region.report


class Root(nn.Module):
    """Two blocks in a row, of any class."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class NotANumber(NormBlock):
    def forward(self, x):
        return super().forward(x) * (x.sum() / x.sum())


class Picky(WideBlock):
    def forward(self, x):
        if x.shape[0] == 3:
            raise ValueError("three rows are one too many")
        return super().forward(x)


class InPlace(NormBlock):
    def forward(self, x):
        return x.add_(1.0) * 2.0


def test_regions_are_the_classes_in_module_lists_where_the_model_names_none():
    assert [type(module) for module in find_regions(ToyModel(), "regional")] == [WideBlock] * 2 + [NormBlock] * 2


@pytest.mark.parametrize(
    ("attribute", "name"),
    [("_repeated_blocks", "NormBlock"), ("_no_split_modules", "WideBlock")],
    ids=["diffusers", "transformers"],
)
def test_regions_are_the_classes_that_a_library_names(attribute, name):
    model = ToyModel()
    setattr(model, attribute, [name])
    assert find_regions(model, "regional") == [block for block in model.modules() if type(block).__name__ == name]


def test_what_stands_once_beside_the_blocks_that_transformers_names_is_no_region():
    model = nn.Sequential(ToyModel(), InPlace())
    model._no_split_modules = {"WideBlock", "InPlace"}
    assert find_regions(model, "regional") == list(model[0].wide)


def test_lists_in_a_list_are_no_regions():
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleList([NormBlock(), NormBlock(), nn.Identity()]) for _ in range(2))
    assert {type(module) for module in find_regions(model, "regional")} == {NormBlock}


def test_regions_are_never_inside_one_another():
    model = Root(ToyModel)
    model._repeated_blocks = ["ToyModel", "WideBlock"]
    assert find_regions(model, "regional") == list(model.blocks)


def test_a_model_without_repeated_blocks_and_one_in_the_scope_whole_are_one_region():
    for model, scope in ((nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "regional"), (ToyModel(), "whole")):
        assert find_regions(model, scope) == [model]


@pytest.mark.parametrize(("is_dynamic", "graphs"), [(True, 1), (False, 2)])
def test_dynamic_shapes_compile_one_graph_for_all_sizes_and_static_ones_one_for_each(directory, is_dynamic, graphs):
    compiler = Regions(resolve_cold_start(Settings(dynamic=is_dynamic)), directory)
    model = Root(WideBlock).eval()
    compiler.compile(model)
    warm_up(compiler, lambda: [run(model, 4), run(model, 8)])
    assert only_report(compiler).graphs == graphs


@torch.no_grad()
def test_an_answer_of_nan_alone_shows_nothing_so_the_code_waits_for_another(compiler):
    model = Root(NotANumber).eval()
    compiler.compile(model)
    warm_up(compiler, lambda: model(torch.zeros(4, 16)))
    assert model(torch.zeros(4, 16)).isnan().all()
    (region,) = compiler.by_class.values()
    assert (region.report.relative_error, {*region.served}) == (None, {"eager"})
    warm_up(compiler, lambda: [model(torch.ones(4, 16)) for _ in range(30)])
    assert region.report.relative_error < region.report.tolerance
    assert {*region.served} == {"eager", "precompiled"}


def test_models_own_error_passes_through_demotes_nothing_and_leaves_the_graphs_that_are_there(compiler):
    model = Root(Picky).eval()
    compiler.compile(model)
    with pytest.raises(ValueError, match="three rows"), compiler.watching():
        run(model, 3)
    assert warm_up(compiler, lambda: run(model)) == {"Picky": "cold"}
    with pytest.raises(ValueError, match="three rows"):
        run(model, 3)
    before = read_counts()
    run(model)
    assert read_counts().since(before).graphs == 0
    assert only_report(compiler).reason == "lookups found nothing"


def test_regions_inside_of_another_torch_compile_are_unused_and_say_so(compiler):
    model = Root(WideBlock)
    compiler.compile(model)
    served = torch.compile(model, backend="inductor")
    with torch.inference_mode():
        assert warm_up(compiler, lambda: served(torch.ones(4, 16))) == {"WideBlock": "unused"}
    assert "another torch.compile compiled code. Take that away" in only_report(compiler).reason


def test_torch_script_is_refused(compiler):
    with pytest.raises(NotAModuleError, match="Root is TorchScript"):
        compiler.compile(torch.jit.trace(Root(NormBlock).eval(), torch.ones(4, 16)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_relative_error_is_that_of_the_norms(dtype):
    reference = torch.full((1000,), 2.0, dtype=dtype)
    assert compare((reference * 1.5,), (reference,)).error == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("output", "reference"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), (torch.zeros(2),)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([float("nan")]), torch.tensor([1.0])),
        (torch.tensor([float("inf")]), torch.tensor([float("-inf")])),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([1.0, float("inf")])),
    ],
)
def test_what_cannot_be_compared_is_infinitely_wrong(output, reference):
    assert compare((output,), (reference,)).error == float("inf")


def test_largest_error_of_several_outputs_counts():
    reference = (torch.ones(4), {"a": torch.ones(4)})
    output = (torch.ones(4), {"a": torch.full((4,), 1.1)})
    assert compare((output,), (reference,)).error == pytest.approx(0.1)


def test_shapes_beyond_the_limit_are_served_eager_and_the_others_stay_compiled(compiler):
    model = Root(NormBlock).eval()
    compiler.compile(model)
    expected = run(Root(NormBlock).eval(), 6)
    with torch._dynamo.config.patch(recompile_limit=2):
        warm_up(compiler, lambda: [run(model, 4), run(model, 5)])
        assert run(model, 6) == close(expected)
    assert only_report(compiler).step == "eager"
    assert "COMPILE_CACHE_DYNAMIC=auto" in only_report(compiler).reason
    before = read_counts()
    run(model, 4)
    assert read_counts().since(before).graphs == 0


def test_cache_directory_that_vanishes_does_not_fail_the_warm_up(compiler, directory):
    model = Root(NormBlock).eval()
    compiler.compile(model)
    warm_up(compiler, lambda: run(model))
    shutil.rmtree(directory.path)
    warm_up(compiler, lambda: run(model, 8))
    assert only_report(compiler).instances == 2
