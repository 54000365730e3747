"""A call like one that was settled is served alike at once. What changes in between is seen: by the next call where
torch's code would ignore it, else by the next prediction, and outside predictions after 64 calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from blocks import SIZE
from precompiling import activated, boot, build, eager, only_report, tensor, warm_up
from torch import nn

from compile_cache.inductor import call_spec
from compile_cache.serving.compiler import Compiler
from compile_cache.settings import Settings


class Block(nn.Module):
    """All that may change in it changes its answer."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.part = nn.Linear(SIZE, SIZE, bias=False)
        self.adapter: nn.Module | None = None
        self.factor = 1.0
        self.breaks = breaks

    def forward(self, x: torch.Tensor, seen: dict[str, Any] | None = None) -> torch.Tensor:
        y = torch.addmm(x, self.part(x), self.weight, alpha=-1 if self.training else self.factor)
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.mm(y if self.adapter is None else self.adapter(y), self.weight)


PRECOMPILED = Settings(cold_start="block", unseen="eager")
STATES = {
    "precompiled": (PRECOMPILED, False),
    "compiled": (PRECOMPILED, True),
    "eager": (Settings(cold_start="background", unseen="eager"), False),
    "ordered": (Settings(cold_start="background", unseen="background"), False),
}


@pytest.fixture(params=STATES)
def served(request, tmp_path):
    """A block whose calls are settled, its twin, and its boot."""
    settings, breaks = STATES[request.param]
    with activated(tmp_path) as directory:
        block, twin = build(Block, breaks), build(Block, breaks)
        compiler = boot(directory, block, settings=settings)
        if request.param != "eager":  # of which the warm-up knows nothing
            warm_up(compiler, lambda: [block(tensor()) for _ in range(2)])
        with prediction(compiler):
            for _ in range(3):
                assert_right(block, twin)
        assert step_of(compiler, block) == request.param.replace("ordered", "eager")
        yield block, twin, compiler


@contextlib.contextmanager
def prediction(compiler: Compiler):
    compiler.moment.begin()
    yield
    compiler.moment.end(is_complete=True, had_new_code=False)


def assert_right(block: nn.Module, twin: nn.Module, x: torch.Tensor | None = None) -> None:
    x = tensor() if x is None else x
    torch.testing.assert_close(eager(block, x), eager(twin, x), rtol=1e-3, atol=1e-3)


def step_of(compiler: Compiler, block: nn.Module) -> str:
    (region,) = compiler.regions.values()
    before = region.served.copy()
    eager(block, tensor())
    ((step, _),) = (region.served - before).items()
    return step


def double(module: nn.Module, args: Any, answer: torch.Tensor) -> torch.Tensor:
    return answer * 2


def hook(module: Block) -> Callable[[], Any]:
    return module.register_forward_hook(double).remove


def hook_of_a_part(module: Block) -> Callable[[], Any]:
    return module.part.register_forward_hook(double).remove


def own_forward(module: Block) -> Callable[[], Any]:
    module.forward = lambda x: x * 3
    return lambda: vars(module).pop("forward")


def adapter(module: Block) -> Callable[[], Any]:
    torch.manual_seed(5)
    module.adapter = nn.Linear(SIZE, SIZE).eval()

    def take_out() -> None:
        del module.adapter
        module.adapter = None

    return take_out


def train(module: Block) -> Callable[[], Any]:
    module.train()
    return module.eval


def attribute(module: Block) -> Callable[[], Any]:
    module.factor = 2.0
    return lambda: setattr(module, "factor", 1.0)


def other_part(module: Block) -> Callable[[], Any]:
    part, module.part = module.part, nn.Sequential(module.part, nn.Linear(SIZE, SIZE, bias=False, dtype=torch.float32))
    nn.init.eye_(module.part[1].weight)
    module.part[1].weight.data *= 2
    return lambda: setattr(module, "part", part)


CHANGES = (hook, hook_of_a_part, own_forward, adapter, train, attribute, other_part)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_module_is_served_in_the_next_prediction_and_so_is_the_way_back(served, change):
    block, twin, compiler = served
    before = step_of(compiler, block)
    undo = [change(module) for module in (block, twin)]
    for _ in range(2):
        with prediction(compiler):
            for _ in range(2):
                assert_right(block, twin)
    for back in undo:
        back()
    with prediction(compiler):
        assert_right(block, twin)
        assert step_of(compiler, block) == before


@pytest.mark.parametrize("change", [hook, hook_of_a_part, train, attribute])
def test_what_changes_in_the_middle_of_a_prediction_is_never_ignored(served, change):
    block, twin, compiler = served
    with prediction(compiler):
        assert_right(block, twin)
        undo = [change(module) for module in (block, twin)]
        assert_right(block, twin)
        for back in undo:
            back()
        assert_right(block, twin)


def strided() -> torch.Tensor:
    return torch.randn(SIZE, 4).T


def tracked() -> torch.Tensor:
    return torch.randn(4, SIZE).requires_grad_()


@pytest.mark.parametrize("other", [strided, tracked, lambda: tensor(5, SIZE), lambda: tensor().double().float()])
def test_other_inputs_are_served_as_their_own_kind(served, other):
    block, twin, compiler = served
    with prediction(compiler):
        assert_right(block, twin, other())
        assert_right(block, twin)


def test_a_region_that_is_eager_because_of_a_hook_is_compiled_once_the_hook_is_gone(tmp_path):
    with activated(tmp_path) as directory:
        block, twin = build(Block), build(Block)
        handles = [module.register_forward_hook(double) for module in (block, twin)]
        compiler = boot(directory, block, settings=Settings(cold_start="block"))
        warm_up(compiler, lambda: [block(tensor()) for _ in range(3)])
        assert "has a hook" in only_report(compiler).reason
        for handle in handles:
            handle.remove()
        steps = []
        for _ in range(3):
            with prediction(compiler):
                assert_right(block, twin)
                steps.append(step_of(compiler, block))
        assert steps[-1] == "precompiled", steps


def test_outside_predictions_a_module_is_looked_at_again_after_64_calls(tmp_path):
    with activated(tmp_path) as directory:
        block = build(Block)
        compiler = boot(directory, block, settings=PRECOMPILED)
        warm_up(compiler, lambda: [block(tensor()) for _ in range(2)])
        remove = hook(block)
        assert step_of(compiler, block) == "eager"
        remove()
        steps = [step_of(compiler, block) for _ in range(70)]
        assert steps[-1] == "precompiled"


@pytest.mark.parametrize("outside", [False, True])
def test_an_eager_call_is_described_once_a_prediction(tmp_path, monkeypatch, outside):
    with activated(tmp_path) as directory:
        block = build(Block)
        compiler = boot(directory, block, settings=STATES["eager"][0])
        inputs = {"again": [tensor(3, 3), 1, "text"]}
        eager(block, tensor(), inputs)
        described, real = [], call_spec.structure
        monkeypatch.setattr(call_spec, "structure", lambda module: described.append(module) or real(module))
        for _ in range(2):
            with contextlib.nullcontext() if outside else prediction(compiler):
                for number in range(20):
                    eager(block, tensor(seed=number), inputs)
        assert len(described) == (1 if outside else 2)
