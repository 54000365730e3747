"""Regions in this process, with real torch.compile: which modules they are, and how they climb and fall."""

from __future__ import annotations

import shutil

import pytest
import torch
from precompiling import boot, eager, only_report, warm_up
from torch import nn
from toy_model import NormBlock, ToyModel, WideBlock, run

from compile_cache.errors import NotAModuleError
from compile_cache.inductor.counters import read_counts
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.prediction import Prediction
from compile_cache.serving.regions import find_regions
from compile_cache.settings import Settings


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
    model = nn.Sequential(ToyModel(), Picky())
    model._no_split_modules = {"WideBlock", "Picky"}
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


@pytest.mark.parametrize(("is_dynamic", "functions"), [(True, 1), (False, 2), (None, 2)])
def test_with_dynamic_shapes_a_function_serves_later_sizes_and_otherwise_each_has_its_own(
    directory, is_dynamic, functions
):
    model = Root(WideBlock).eval()
    compiler = boot(directory, model, settings=Settings(dynamic=is_dynamic))
    for rows in (4, 8):
        warm_up(compiler, lambda rows=rows: run(model, rows))
    assert (only_report(compiler).made, only_report(compiler).step) == (functions, "precompiled")


def test_an_answer_of_nan_alone_shows_nothing_so_the_code_waits_for_another(directory):
    model = Root(NotANumber).eval()
    compiler = boot(directory, model)
    warm_up(compiler, lambda: model(torch.zeros(4, 16)))
    assert eager(model, torch.zeros(4, 16)).isnan().all()
    (region,) = compiler.by_class.values()
    assert (region.report.relative_error, {*region.served}) == (None, {"eager"})
    warm_up(compiler, lambda: [model(torch.ones(4, 16)) for _ in range(30)])
    assert region.report.relative_error < region.report.tolerance
    assert {*region.served} == {"eager", "precompiled"}


def test_models_own_error_passes_through_demotes_nothing_and_leaves_the_code_that_is_there(directory):
    model = Root(Picky).eval()
    compiler = boot(directory, model)
    with pytest.raises(ValueError, match="three rows"):
        warm_up(compiler, lambda: run(model, 3))
    warm_up(compiler, lambda: run(model))
    with pytest.raises(ValueError, match="three rows"):
        run(model, 3)
    run(model)
    assert compiler.by_class[Picky].served["precompiled"] == 2
    assert (only_report(compiler).step, only_report(compiler).reason) == ("precompiled", "")


def test_regions_inside_of_another_torch_compile_are_unused_and_say_so(directory):
    model = Root(WideBlock)
    compiler = boot(directory, model)
    served, before = torch.compile(model, backend="inductor"), read_counts()
    warm_up(compiler, lambda: served(torch.ones(4, 16)))
    compiler.name_unused(read_counts().since(before).graphs)
    assert only_report(compiler).step == "unused"
    assert "another torch.compile compiled code. Take that away" in only_report(compiler).reason


def named(factor: int) -> nn.Module:
    """A module of a class that has the name of others, and their module."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * factor

    return Net()


def test_classes_of_one_name_are_counted_apart_and_own_their_files_apart(directory):
    nets = [named(2), named(3)]
    compiler = boot(directory, *nets)
    with Prediction(BootReport(), compiler) as prediction:
        warm_up(compiler, lambda: [net(torch.ones(2, 2)) for net in nets])
    assert {name: sum(steps.values()) for name, steps in prediction.served().items()} == {
        "Net": 2,
        "test_regions.named.<locals>.Net 2": 2,
    }
    first, second = compiler.by_class.values()
    ready = directory.ledger.ready(is_ending=True)
    directory.ledger.withdraw(first.supply.owner)
    left = directory.ledger.ready(is_ending=True)
    assert first.supply.owner not in left.values()
    assert {path for path, owner in ready.items() if owner == second.supply.owner} <= left.keys()
    assert second.supply.owner in left.values()


def test_torch_script_is_refused(directory):
    with pytest.raises(NotAModuleError, match="Root is TorchScript"):
        boot(directory, torch.jit.trace(Root(NormBlock).eval(), torch.ones(4, 16)))


def test_shapes_beyond_the_limit_are_served_eager_and_the_others_stay_compiled(directory, monkeypatch):
    monkeypatch.setattr("compile_cache.serving.kinds.RECOMPILE_LIMIT", 2)
    model = Root(NormBlock).eval()
    compiler = boot(directory, model)
    expected = run(Root(NormBlock).eval(), 6)
    warm_up(compiler, lambda: [run(model, 4), run(model, 5)])
    assert run(model, 6) == pytest.approx(expected, rel=1e-3, abs=1e-6)  # fused arithmetic rounds otherwise
    assert only_report(compiler).step == "eager"
    assert "are kept" in only_report(compiler).reason
    run(model, 4)
    assert compiler.by_class[NormBlock].served["precompiled"] == 2


def test_cache_directory_that_vanishes_does_not_fail_the_warm_up(directory):
    model = Root(NormBlock).eval()
    compiler = boot(directory, model)
    warm_up(compiler, lambda: run(model))
    shutil.rmtree(directory.path)
    warm_up(compiler, lambda: run(model, 8))
    assert only_report(compiler).instances == 2
