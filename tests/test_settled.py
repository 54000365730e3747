"""A call like one that was settled is served alike at once. What changes in between is seen: by the next call where
torch's code would ignore it, else by the next prediction, and outside predictions after 64 calls."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import SIZE, Weighted
from precompiling import (
    SECOND,
    activated,
    boot,
    build,
    built,
    eager,
    finish,
    only_report,
    prediction,
    tensor,
    warm_up,
    warmed,
)
from torch import nn
from torch.nn.modules import module as module_hooks

from compile_cache.calls import module_state
from compile_cache.calls import spec as call_spec
from compile_cache.calls.spec import CallSpec, likeness
from compile_cache.serving import region as routing
from compile_cache.serving.comparison import Comparison
from compile_cache.serving.kinds import State
from compile_cache.serving.region import Region
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings

TABLE = torch.eye(SIZE)


class Part(Weighted):
    """Its `forward` has neither defaults nor a closure: torch does not see that another one takes its place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


class Block(Weighted):
    """All that may change in it changes its answer. With `graphs`, it is served by those of `torch.compile`: by two
    because of a break, or by one that reads a global tensor."""

    def __init__(self, graphs: int = 0) -> None:
        super().__init__()
        self.part: nn.Module = Part()
        self.adapter: nn.Module | None = None
        self.factor = 1.0
        self.graphs = graphs

    def forward(self, x: torch.Tensor, seen: dict[str, Any] | None = None, by: float = 1.0) -> torch.Tensor:
        factor = -1 if self.training else math.copysign(1.0, self.factor) * (1 + abs(self.factor))
        y = torch.addmm(x, self.part(x), self.weight, alpha=factor * math.copysign(1 + abs(by), by))
        if self.graphs == 1:
            y = torch.mm(y, TABLE)
        elif self.graphs:
            torch._dynamo.graph_break()
        return torch.mm(y if self.adapter is None else self.adapter(y), self.weight)


PRECOMPILED = Settings(cold_start="block", unseen="eager")
BACKGROUND = Settings(cold_start="background", unseen="background")
# The settings, the `graphs` of the block, and what serves its calls.
STATES = {
    "precompiled": (PRECOMPILED, 0, "precompiled"),
    "graphs": (PRECOMPILED, 2, "graphs"),
    "a whole graph": (PRECOMPILED, 1, "graphs"),
    "eager": (Settings(cold_start="background", unseen="eager"), 0, "eager"),
    "ordered": (BACKGROUND, 0, "eager"),
}
Served = tuple[Block, Block, Regions]


@contextlib.contextmanager
def settled(state: str, root: Path) -> Iterator[Served]:
    """A block whose calls are settled, its twin, and its boot."""
    settings, graphs, step = STATES[state]
    with activated(root) as directory:
        block, twin = build(Block, graphs), build(Block, graphs)
        compiler = boot(directory, block, settings=settings)
        if state != "eager":  # of which the warm-up knows nothing
            warm_up(compiler, lambda: block(tensor()))
        with prediction(compiler.supply.moment):
            for _ in range(3):
                assert_right(block, twin)
        assert step_of(compiler, block) == step
        yield block, twin, compiler


@pytest.fixture(scope="module", params=STATES)
def lasting(request, tmp_path_factory) -> Iterator[tuple[Served, str]]:
    """One for all tests that undo what they change, and what serves its calls."""
    with settled(request.param, tmp_path_factory.mktemp("settled")) as served:
        yield served, STATES[request.param][2]


@pytest.fixture
def served(lasting) -> Iterator[Served]:
    """The same, which each test finds and leaves as it was."""
    (block, twin, compiler), step = lasting
    assert step_of(compiler, block) == step
    yield block, twin, compiler
    with prediction(compiler.supply.moment):
        assert_right(block, twin)
        assert step_of(compiler, block) == step


def assert_right(block: nn.Module, twin: nn.Module, x: torch.Tensor | None = None, **given: float) -> None:
    x = tensor() if x is None else x
    torch.testing.assert_close(eager(block, x, **given), eager(twin, x, **given), rtol=1e-3, atol=1e-3, equal_nan=True)


def step_of(compiler: Regions, block: nn.Module) -> str:
    (region,) = compiler.by_class.values()
    before = region.served.copy()
    eager(block, tensor())
    ((step, _),) = (region.served - before).items()
    return step


def double(module: nn.Module, args: Any, answer: torch.Tensor) -> torch.Tensor:
    return answer * 2


def patched(target: Any, name: str, value: Any) -> Callable[[], None]:
    patch = pytest.MonkeyPatch()
    patch.setattr(target, name, value)
    return patch.undo


def own_forward(module: Block) -> Callable[[], Any]:
    module.forward = lambda x, by=1.0: x * 3
    return lambda: vars(module).pop("forward")


def adapter(module: Block) -> Callable[[], None]:
    torch.manual_seed(5)
    module.adapter = nn.Linear(SIZE, SIZE).eval()

    def take_out() -> None:
        del module.adapter
        module.adapter = None

    return take_out


def other_part(module: Block) -> Callable[[], None]:
    part, doubling = module.part, nn.Linear(SIZE, SIZE, bias=False)
    doubling.weight.data = 2 * torch.eye(SIZE)
    module.part = nn.Sequential(part, doubling)
    return lambda: setattr(module, "part", part)


# Each changes a block, and returns what takes the change back.
AT_ONCE: dict[str, Callable[[Block], Callable[[], Any]]] = {
    "hook": lambda module: module.register_forward_hook(double).remove,
    "hook of all modules": lambda module: module_hooks.register_module_forward_hook(double).remove,
    "hook of a part": lambda module: module.part.register_forward_hook(double).remove,
    "forward of its own": own_forward,
    "forward of its class": lambda module: patched(Block, "forward", lambda self, x, by=1.0: x * 3),
    "forward of its part's class": lambda module: patched(Part, "forward", lambda self, x: x * 3),
    "training": lambda module: module.train() and module.eval,
    "attribute": lambda module: patched(module, "factor", 2.0),
}
CHANGES = {**AT_ONCE, "adapter": adapter, "other part": other_part}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_a_module_is_served_in_the_next_prediction_and_so_is_the_way_back(served, change):
    """The fixture looks at the way back."""
    block, twin, compiler = served
    undo = [CHANGES[change](module) for module in (block, twin)]
    for _ in range(2):
        with prediction(compiler.supply.moment):
            for _ in range(2):
                assert_right(block, twin)
    for back in reversed(undo):
        back()


@pytest.mark.parametrize("change", AT_ONCE)
def test_what_changes_in_the_middle_of_a_prediction_is_never_ignored(served, change):
    block, twin, compiler = served
    with prediction(compiler.supply.moment):
        assert_right(block, twin)
        undo = [AT_ONCE[change](module) for module in (block, twin)]
        assert_right(block, twin)
        for back in reversed(undo):
            back()
        assert_right(block, twin)


def test_code_that_does_not_fit_for_some_predictions_serves_again_afterwards(served):
    block, twin, compiler = served
    before, steps = step_of(compiler, block), []
    for factor in (2.0, 1.0, 3.0, 1.0, 2.0, 1.0):
        block.factor = twin.factor = factor
        with prediction(compiler.supply.moment):
            for _ in range(2):
                assert_right(block, twin)
            steps += [step_of(compiler, block)] * (factor == 1.0)
    assert steps == [before] * 3


ZERO_FIRST, ZERO_SECOND = [(0.0, -0.0), (1.0, True, 1)], [(-0.0, 0.0), (math.nan, -math.nan)]


@pytest.mark.parametrize(
    ("state", "numbers"),
    [*((state, ZERO_FIRST) for state in STATES), ("precompiled", ZERO_SECOND), ("graphs", ZERO_SECOND)],
)
def test_numbers_that_are_equal_and_not_the_same_are_told_apart(tmp_path, state, numbers):
    """Where torch's own graphs cannot, which take one zero of an attribute for the other, nothing else can."""
    with settled(state, tmp_path) as (block, twin, compiler):

        def call_with(input: float) -> None:
            assert_right(block, twin, by=input)

        def call_having(attribute: float) -> None:
            block.factor = twin.factor = attribute
            assert_right(block, twin)

        for call in (call_with, call_having):
            for first, *others in [(1.0, True, 1)] if call is call_having and block.graphs else numbers:
                warm_up(compiler, lambda call=call, first=first: call(first))
                with prediction(compiler.supply.moment):
                    for number in (first, *(first, *others) * 2):
                        call(number)


def strided() -> torch.Tensor:
    return torch.randn(SIZE, 4).T


def tracked() -> torch.Tensor:
    return torch.randn(4, SIZE).requires_grad_()


@pytest.mark.parametrize("other", [strided, tracked, lambda: tensor(5, SIZE), lambda: tensor().double().float()])
def test_other_inputs_are_served_as_their_own_kind(served, other):
    block, twin, compiler = served
    with prediction(compiler.supply.moment):
        assert_right(block, twin, other())
        assert_right(block, twin)


def test_a_region_that_is_eager_because_of_a_hook_is_compiled_once_the_hook_is_gone(directory):
    block, twin = build(Block), build(Block)
    handles = [module.register_forward_hook(double) for module in (block, twin)]
    compiler = warmed(directory, block, settings=BACKGROUND)
    assert "has a hook" in only_report(compiler).reason
    for handle in handles:
        handle.remove()
    steps = []
    for _ in range(3):
        with prediction(compiler.supply.moment):
            steps.append(step_of(compiler, block))
            assert_right(block, twin)
        finish(compiler)
    assert steps == ["eager", "eager", "precompiled"]


@pytest.mark.parametrize("way", ["data", "load_state_dict", "buffer"])
def test_code_for_aligned_weights_serves_none_that_lie_elsewhere_from_the_next_prediction_on(directory, way):
    """On a GPU, it would read 16 bytes at a time."""
    block = build(Block)
    block.register_buffer("kept", torch.ones(SIZE))
    compiler = warmed(directory, block, settings=PRECOMPILED)
    kept = {name: value.clone() for name, value in block.state_dict().items()}
    moved = {
        name: torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape) for name, value in kept.items()
    }
    steps = []
    for state in (kept, moved, kept):
        if way == "load_state_dict":
            block.load_state_dict(state, assign=True)
        elif way == "data":
            for name, weight in block.named_parameters():
                weight.data = state[name]
        else:
            block.kept = state["kept"]
        with prediction(compiler.supply.moment):
            assert_right(block, build(Block))
            steps.append(step_of(compiler, block))
    assert steps == ["precompiled", "eager", "precompiled"]


def test_outside_predictions_a_module_is_looked_at_again_after_64_calls(directory):
    block, compiler = built(directory, Block, settings=PRECOMPILED)
    remove = AT_ONCE["hook"](block)
    assert step_of(compiler, block) == "eager"
    remove()
    steps = [step_of(compiler, block) for _ in range(70)]
    assert steps[-1] == "precompiled"


def test_outside_predictions_each_module_counts_its_own_calls(directory, monkeypatch):
    blocks = [build(Block) for _ in range(4)]
    compiler = boot(directory, nn.ModuleList(blocks), settings=STATES["eager"][0])
    assert {step_of(compiler, block) for block in blocks for _ in range(2)} == {"eager"}
    for _ in range(60):
        eager(blocks[0], tensor())
    looked_at = []
    monkeypatch.setattr("compile_cache.serving.region.why_eager", lambda module: looked_at.append(module) or "")
    for _ in range(8):
        eager(blocks[0], tensor())
    assert looked_at == [blocks[0]]


@pytest.mark.parametrize("outside", [False, True])
def test_an_eager_call_is_described_once_a_prediction(directory, monkeypatch, outside):
    block = build(Block)
    compiler = boot(directory, block, settings=STATES["eager"][0])
    inputs = {"again": [tensor(3, 3), 1, "text"]}
    eager(block, tensor(), inputs)
    described, real = [], call_spec.structure
    monkeypatch.setattr(call_spec, "structure", lambda module: described.append(module) or real(module))
    for _ in range(2):
        with contextlib.nullcontext() if outside else prediction(compiler.supply.moment):
            for number in range(20):
                eager(block, tensor(seed=number), inputs)
    assert len(described) == (0 if outside else 2)
    assert set(compiler.supply.moment.known) == {block}


class Attributes(dict[str, Any]):
    """Its keys are its attributes, as in many a configuration: it has no other, not even `__dict__`."""

    __slots__ = ()
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize("name", ["precompiled", "ordered"])
def test_an_object_whose_attributes_are_its_own_matter_fails_no_call(directory, name):
    block, twin = build(Block), build(Block)
    compiler = boot(directory, block, settings=STATES[name][0])
    block.options = Attributes(a=1)
    warm_up(compiler, lambda: block(tensor(), Attributes(a=1)))
    for _ in range(3):
        with prediction(compiler.supply.moment):
            torch.testing.assert_close(eager(block, tensor(), Attributes(a=1)), eager(twin, tensor()))
    assert only_report(compiler).step == STATES[name][2]


class Shapeless(torch.Tensor):
    """A tensor as only another library knows it."""

    @property
    def shape(self) -> torch.Size:
        raise RuntimeError("it has no shape")


@pytest.mark.parametrize("first", [nn.UninitializedParameter(), torch.ones(2).as_subclass(Shapeless)])
def test_a_first_input_without_a_shape_fails_no_call(directory, first):
    class Ignoring(Block):
        def forward(self, ignored: Any, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    block, twin = build(Ignoring), build(Block)
    boot(directory, block, settings=STATES["eager"][0])
    for given in (tensor(), first, first):
        torch.testing.assert_close(eager(block, given, tensor()), eager(twin, tensor()))


@pytest.mark.parametrize(
    "pair",
    [
        (State.NEW, State.EAGER),
        (torch.float32, torch.float64),
        (len, max),
        (int, str),
        (torch.ones(2), torch.ones(2).requires_grad_()),
        (torch.ones(2), tensor(2)),  # made in inference mode
    ],
)
def test_objects_of_one_class_that_are_other_kinds_are_not_alike(pair):
    one, other = (CallSpec.of((nn.Identity(), (tensor(), given), {})) for given in pair)
    assert one != other
    assert likeness([pair[0]]) != likeness([pair[1]])


# What two threads can do to one case, with the other thread's part made at the worst moment.


@pytest.fixture
def arrived(directory) -> Callable[[type[Block]], tuple[Block, Regions, Region]]:
    """Makes a block whose function has arrived, and was not compared yet."""

    def make(kind: type[Block]) -> tuple[Block, Regions, Region]:
        block, compiler = built(directory, kind, settings=BACKGROUND)
        finish(compiler)
        return block, compiler, *compiler.by_class.values()

    return make


class Drawing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight) + torch.rand(1)


def test_another_thread_draws_no_random_numbers_twice(directory, monkeypatch):
    """While code that draws some is compared, no prediction begins."""
    began, real = threading.Event(), Comparison.check
    with ThreadPoolExecutor() as threads:
        block = build(Drawing)
        compiler = boot(directory, block, settings=Settings(cold_start="block"))

        def check(comparison: Comparison, function: Callable[..., Any]) -> Any:
            def try_out(*call: Any) -> Any:
                threads.submit(compiler.supply.moment.begin, SECOND).add_done_callback(lambda _: began.set())
                assert not began.wait(0.2)
                return function(*call)

            return real(comparison, try_out)

        monkeypatch.setattr(Comparison, "check", check)
        warm_up(compiler, lambda: block(tensor()))
        assert began.wait(60)
        assert "AssertionError" not in only_report(compiler).reason


def test_code_is_not_dropped_for_random_numbers_that_a_prediction_drew_between_the_copy_and_the_call(
    arrived, monkeypatch
):
    # With this option, compiled code draws the same numbers as eager.
    with torch._inductor.config.patch(fallback_random=True):
        block, compiler, region = arrived(Drawing)
        moment, real = compiler.supply.moment, routing.call_region

        def call_region(*call: Any) -> Any:
            monkeypatch.undo()
            with prediction(moment):
                torch.rand(1)
            return real(*call)

        monkeypatch.setattr(routing, "call_region", call_region)
        for _ in range(30):
            eager(block, tensor())
        assert "not compared with eager: other predictions would see" in region.report.reason
        assert "differs from eager" not in region.report.reason
        assert region.served["precompiled"] > 0


class Counting(Block):
    """It notes its last call."""

    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = torch.mm(x, self.weight)
        return self.last + 1


def test_a_difference_while_another_prediction_is_open_is_no_reason_to_drop_code(arrived, monkeypatch):
    block, compiler, region = arrived(Counting)
    moment, real = compiler.supply.moment, Comparison.check

    def check(comparison: Comparison, function: Callable[..., Any]) -> Any:
        monkeypatch.undo()
        with prediction(moment):
            block._call_impl(tensor() * 2)  # another thread's, on the same module
        return real(comparison, function)

    monkeypatch.setattr(Comparison, "check", check)
    for _ in range(30):
        eager(block, tensor())
    assert "not compared with eager: while other predictions were open" in region.report.reason
    with prediction(moment):
        assert step_of(compiler, block) == "precompiled"


def test_a_call_that_fails_after_it_claimed_its_case_leaves_it_to_the_next_one(directory, monkeypatch):
    block = build(Block)
    compiler = boot(directory, block, settings=STATES["ordered"][0])
    with monkeypatch.context() as patch:
        patch.setattr("compile_cache.serving.region.reachable_tensors", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warm_up(compiler, lambda: block(tensor()))
    (region,) = compiler.by_class.values()
    (case,) = region.supply.kinds
    assert case.state is State.NEW
    warm_up(compiler, lambda: block(tensor()))
    assert case.state is State.ORDERED


def test_an_own_forward_that_another_thread_takes_away_meanwhile_fails_no_call(monkeypatch):
    block, real = build(Block), module_state._is_own
    block.forward = block.forward

    def is_own(forward: Any, part: nn.Module) -> bool:
        vars(part).pop("forward")
        return real(forward, part)

    monkeypatch.setattr(module_state, "_is_own", is_own)
    assert module_state.why_eager(block) == ""


class Streaming(nn.Module):
    """Writes into its buffer, and then reads its input, which may be a part of the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / SIZE)
        self.register_buffer("past", torch.ones(8, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.past.copy_(torch.mm(self.past, self.weight))
        return torch.mm(x, self.weight)


def test_an_input_that_is_a_part_of_a_buffer_that_is_written_is_an_eager_kind_of_call(directory):
    block, twin = build(Streaming), build(Streaming)
    for module in (block, twin):
        with torch.inference_mode():
            module.past = tensor(8, SIZE).clone()
    compiler = boot(directory, block, settings=Settings(cold_start="block"))
    warm_up(compiler, lambda: (block(tensor().clone()), twin(tensor().clone())))
    for is_part in (False, True) * 4:
        with prediction(compiler.supply.moment):
            found, expected = (eager(m, m.past[:4] if is_part else tensor().clone()) for m in (block, twin))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        finish(compiler)
    assert "it writes into memory that two of its tensors share" in only_report(compiler).reason


class BreaksBefore(Streaming):
    """Served by graphs, whose calls are settled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_an_input_that_is_a_part_of_a_buffer_is_not_like_a_settled_call_with_another(directory):
    with torch.inference_mode():
        block, twin = build(BreaksBefore), build(BreaksBefore)
    compiler = boot(directory, block, settings=PRECOMPILED)
    warm_up(compiler, lambda: block(tensor()))
    with prediction(compiler.supply.moment), torch.inference_mode():
        assert [step_of(compiler, block) for _ in range(2)] == ["graphs"] * 2
        block.past.copy_(tensor(8, SIZE)), twin.past.copy_(tensor(8, SIZE))
        torch.testing.assert_close(block(block.past[:4]), twin(twin.past[:4]), rtol=1e-3, atol=1e-3)
