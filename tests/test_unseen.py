"""Calls that nothing is compiled for, in boots that compile before READY and in others."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from blocks import SIZE, Block, Product
from diffusers import hooks
from diffusers.hooks import HookRegistry
from precompiling import boot, build, built, eager, finish, only_report, prediction, tensor, warm_up, warmed
from torch import nn

from compile_cache.background.orders import Orders
from compile_cache.calls import spec as call_spec
from compile_cache.inductor import make as making
from compile_cache.inductor.counters import CompileCounts, read_counts
from compile_cache.inductor.function_file import read_marks
from compile_cache.inductor.make import Answer, Traced
from compile_cache.inductor.stored_functions import Artifacts
from compile_cache.serving import kinds
from compile_cache.serving import region as routing
from compile_cache.serving.comparison import Check, Comparison
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

BLOCK = Settings(cold_start="block", unseen="background")
BACKGROUND = Settings(cold_start="background", unseen="background")


def answer(block: nn.Module, rows: int) -> torch.Tensor:
    with torch.inference_mode():
        return block(tensor(rows, 16))


def functions_of(compiler: Regions) -> list[str]:
    """The paths of all functions that were handed over."""
    return [path for path in compiler.supply.directory.ledger.ready(is_ending=True) if path.endswith(".aot")]


def served(compiler: Regions) -> dict[str, int]:
    (region,) = compiler.by_class.values()
    return dict(region.served)


def test_what_the_setup_had_no_time_for_is_compiled_for_no_request_and_precompiled_soon(directory):
    block = build(Product)
    compiler = boot(directory, block, settings=BLOCK)
    warm_up(compiler, lambda: block(tensor(4, 16)), until_s=time.monotonic())
    before = read_counts()
    answer_all([block])
    assert read_counts().since(before).graphs == 0
    assert served(compiler) == {"eager": 2}
    assert compiler._count_calls() == 2
    assert compiler.supply.waiting == 1
    finish(compiler)
    answer_all([block] * 2)
    assert served(compiler) == {"eager": 3, "precompiled": 1}
    assert compiler._count_calls() == 4
    assert (only_report(compiler).step, only_report(compiler).waiting) == ("precompiled", 0)


@pytest.fixture
def many(directory, monkeypatch):
    """Six blocks of one class whose code has just arrived, and their boot. None of its files is published early."""
    copy, early = Orders.copy_in, set[str]()

    def copy_and_look(orders: Orders, answer: Answer) -> None:
        copy(orders, answer)
        ledger = orders._directory.ledger
        ledger.hand_over(ledger.appeared())  # as the publisher may do at any moment
        early.update({*answer.files} & ledger.ready().keys())

    monkeypatch.setattr(Orders, "copy_in", copy_and_look)
    blocks = [build(Product) for _ in range(6)]
    compiler = warmed(directory, *blocks, settings=BACKGROUND)
    finish(compiler)
    assert early == set()
    return blocks, compiler


def answer_all(blocks: list[nn.Module], rows: int = 4) -> None:
    """Call each of them. Its answer is that of a new block."""
    for block in blocks:
        torch.testing.assert_close(answer(block, rows), eager(build(type(block)), tensor(rows, 16)))


def marks(compiler: Regions) -> set[str]:
    """What tells later boots on which instances code was compared."""
    return {path for path in compiler.supply.directory.ledger.ready(is_ending=True) if path.endswith(".compared")}


def test_a_whole_prediction_compares_all_instances_tells_later_boots_and_the_next_one_is_served(many):
    blocks, compiler = many
    for expected in ({"eager": 12}, {"eager": 12, "precompiled": 6}):
        with prediction(compiler.supply.moment):
            answer_all(blocks)
            assert bool(marks(compiler)) is ("precompiled" in expected)
        assert served(compiler) == expected
        assert marks(compiler)


def test_a_function_that_is_made_after_ready_is_published_once_it_was_compared_or_at_the_exit(directory):
    regions = boot(directory, build(Product), settings=BACKGROUND)
    regions.supply.release()
    (region,) = regions.by_class.values()
    files = "precompiled/a/0.aot", "kernel.so"
    region.supply._hand_over(Answer(files[0], files=files, function=build(Product)))
    assert directory.ledger.ready() == {}
    assert directory.ledger.ready(is_ending=True).keys() == {*files}


@pytest.mark.parametrize(("graphs", "hits"), [(1, 0), (0, 1)])
def test_an_answer_says_whether_graphs_were_found_and_not_whether_they_were_made(monkeypatch, tmp_path, graphs, hits):
    traced = Traced(None, False, 1.0, 1.0, CompileCounts(graphs=graphs, hits=hits))
    monkeypatch.setattr(making, "trace", lambda *_: traced)
    monkeypatch.setattr(making, "_graphs_made", lambda *_: Answer())
    artifacts, call = Artifacts(Settings(graphs=("Identity",)), tmp_path), (nn.Identity(), (tensor(4, 16),), {})
    assert making.make(artifacts, None, lambda: call).has_found is bool(hits)


def test_an_answer_without_code_uses_nothing_of_another_version(directory):
    regions = boot(directory, build(Product), settings=BACKGROUND)
    directory.ledger.plant({"seed.so": "blocks.Product"})
    (region,) = regions.by_class.values()
    region.supply._hand_over(Answer(has_found=True))
    assert directory.ledger.ready() == {}
    region.supply._hand_over(Answer(path := "precompiled/a/0.graphs"))
    assert directory.ledger.ready().keys() <= {path}
    region.supply._hand_over(Answer(path, has_found=True))
    directory.ledger.withheld.add(path)
    assert directory.ledger.ready() == {"seed.so": "blocks.Product"}


def test_code_is_published_with_its_files_once_it_serves_or_at_the_end(many):
    blocks, compiler = many
    (path,) = functions_of(compiler)
    ledger = compiler.supply.directory.ledger
    answer_all(blocks[:1])
    assert ledger.ready() == {}
    at_the_end = ledger.ready(is_ending=True)
    assert at_the_end[path] == path
    answer_all(blocks[:1])  # by code that is taken
    assert ledger.ready().items() >= at_the_end.items()
    assert {owner for file, owner in at_the_end.items() if not file.startswith("precompiled/")} == {"blocks.Product"}


@pytest.mark.parametrize(
    ("predictions", "marked"),
    [
        ([([0, 1, 2, 3, 4, 5], False)], []),
        ([([0, 2], True), ([0, 2], True)], [0, 2]),
        ([([0], True), ([1, 2, 3, 4, 5], False), ([0, 1], True)], [0]),
        ([([0], True), ([3, 4], True)], [0, 3, 4]),
        ([([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], True)], [0, 1, 2, 3, 4, 5]),
    ],
    ids=["broken off", "two instances", "broken off later", "one after another", "each twice"],
)
def test_later_boots_are_told_on_which_instances_whole_predictions_compared(many, predictions, marked):
    blocks, compiler = many
    for called, is_whole in predictions:
        before = marks(compiler)
        with prediction(compiler.supply.moment, is_whole):
            answer_all([blocks[number] for number in called])
            assert marks(compiler) == before
    answer_all(blocks * 2)  # outside predictions, none is whole
    read = read_marks(compiler.supply.directory.path, marks(compiler)).values()
    places = [f"blocks.Product {number + 1} " for number in marked]
    assert [sorted(mark.places) for mark in read] == ([places] if marked else [])


@pytest.fixture
def served_one(many):
    """The same, once code serves the first block."""
    blocks, compiler = many
    steps = [predict_each(compiler, blocks[:1]) for _ in range(3)]
    assert steps == [["eager"], ["precompiled"], ["precompiled"]]
    return blocks, compiler


def predict_each(compiler: Regions, blocks: list[nn.Module]) -> list[str]:
    """A prediction that calls each block once. Returns how each call was served."""
    steps = []
    with prediction(compiler.supply.moment):
        for block in blocks:
            before = Counter(served(compiler))
            answer_all([block])
            steps += Counter(served(compiler)) - before
    return steps


@pytest.mark.parametrize("obstacle", ["no copy", "no memory"])
def test_an_instance_on_which_code_cannot_be_compared_costs_the_others_nothing(served_one, monkeypatch, obstacle):
    (first, second, other, *_), compiler = served_one
    if obstacle == "no copy":
        other.numbers = (number for number in ())
    else:
        fail_for(other, monkeypatch)
    for _ in range(115):
        predict_each(compiler, [first, other])
    assert predict_each(compiler, [second, first, other]) == ["eager", "precompiled", "eager"]
    assert predict_each(compiler, [second, first, other]) == ["precompiled", "precompiled", "eager"]
    assert {"no copy": "cannot be copied", "no memory": "none left"}[obstacle] in only_report(compiler).reason
    assert compiler.supply.waiting == 0


def test_code_that_serves_already_does_not_wait_for_an_instance_that_is_gone(served_one, monkeypatch):
    (first, second, gone, *_), compiler = served_one
    with monkeypatch.context() as patch:
        fail_for(gone, patch)
        assert predict_each(compiler, [first, second, gone]) == ["precompiled", "eager", "eager"]
    for _ in range(2):
        assert predict_each(compiler, [first, second]) == ["precompiled", "precompiled"]


def fail_for(module: nn.Module, patch: pytest.MonkeyPatch) -> None:
    """Let comparisons on this instance find no memory."""
    check = Comparison.check

    def checked(self: Comparison, code: object) -> Check:
        if self._call[0] is module:
            raise MemoryError("none left")
        return check(self, code)

    patch.setattr(Comparison, "check", checked)


def test_a_comparison_that_does_not_end_is_tried_after_1_10_and_100_predictions_and_then_no_more(many, monkeypatch):
    """On each instance. What waits makes each call outside predictions one of its own, for which everything is looked
    at again. What was given up leaves nothing to wait for."""
    blocks, compiler = many
    moment, tries = compiler.supply.moment, []

    def fail(*_: object) -> None:
        tries.append(now)
        raise MemoryError("none left")

    monkeypatch.setattr(Comparison, "check", fail)
    for now in range(120):  # noqa: B007
        with prediction(moment):
            for block in (*blocks[:2], blocks[0]):
                answer(block, 4)
    assert tries == [0, 0, 1, 1, 11, 11, 111, 111]
    assert "none left" in only_report(compiler).reason
    known = moment.known
    for block in blocks[:2]:
        answer(block, 4)
    assert moment.known is known


def test_a_round_of_the_warm_up_that_fails_proves_nothing(directory):
    blocks = [build(Product) for _ in range(3)]
    compiler = boot(directory, *blocks)

    def call(count: int) -> None:
        for block in blocks[:count]:
            block(tensor())
        if count < len(blocks):
            raise LookupError("the model's own")

    with pytest.raises(LookupError):
        warm_up(compiler, lambda: call(2))
    assert not marks(compiler)
    warm_up(compiler, lambda: call(3))
    assert marks(compiler)


class Memory:
    """A cache as a language model's, or a part of one."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(keys=torch.zeros(0, SIZE))]


class Remembering(Product):
    def forward(self, x: torch.Tensor, memory: Memory | None) -> torch.Tensor:
        if memory is None:
            return super().forward(x)
        (layer,) = memory.layers
        layer.keys = torch.cat([layer.keys, super().forward(x)])
        return torch.mm(layer.keys.T, layer.keys)


class Lengthening(Product):
    def __init__(self) -> None:
        super().__init__()
        self.keys = torch.zeros(0, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys = torch.cat([self.keys, super().forward(x)])
        return torch.mm(self.keys.T, self.keys)


@pytest.mark.parametrize("settings", [BLOCK, BACKGROUND], ids=["block", "background"])
@pytest.mark.parametrize(("block_class", "inputs"), [(Remembering, (Memory,)), (Lengthening, ())])
def test_nothing_is_compiled_for_calls_that_make_a_cache_larger(directory, settings, block_class, inputs):
    block = build(block_class)
    compiler, before = boot(directory, block, settings=settings), read_counts()
    given = [make() for make in inputs]
    warm_up(compiler, lambda: [block(tensor(4, 16), *given) for _ in range(3)])
    assert read_counts().since(before).graphs == compiler.supply.waiting == 0
    assert served(compiler) == {"eager": 3}
    assert "larger" in only_report(compiler).reason


class Tabled(Product):
    """It keeps a table that is as long as the longest input so far."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(2, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > len(self.table):
            self.table = torch.ones(len(x), SIZE)
        return super().forward(x) + self.table[: len(x)]


def test_what_was_made_larger_once_costs_no_later_call_its_code(directory):
    block = build(Tabled)
    compiler = boot(directory, block, settings=BLOCK)
    warm_up(compiler, lambda: block(tensor(2, 16)))
    steps = [(predict_each(compiler, [block]), finish(compiler))[0] for _ in range(5)]
    assert steps == [["eager"]] * 4 + [["precompiled"]]


def test_a_call_with_a_growing_cache_is_described_once_and_one_without_has_its_own_code(directory, monkeypatch):
    block, other, twin = (build(Remembering) for _ in range(3))
    compiler = boot(directory, block, other, settings=BLOCK)
    warm_up(compiler, lambda: [each(tensor(4, 16), None) for each in (block, other) for _ in range(2)])
    described, real = [], call_spec.structure
    monkeypatch.setattr(call_spec, "structure", lambda module: described.append(module) or real(module))
    looked_at, all_tensors = [], routing.reachable_tensors
    monkeypatch.setattr(routing, "reachable_tensors", lambda *call: looked_at.append(call) or all_tensors(*call))
    for known in (1, 0, 0):  # the first call shows that it grows
        described.clear(), looked_at.clear()
        before, memories = Counter(served(compiler)), {each: Memory() for each in (block, other, twin)}
        with prediction(compiler.supply.moment):
            for seed in range(4):
                x = tensor(4, 16, seed=seed)
                answers = [eager(each, x, memory) for each, memory in memories.items()]
                torch.testing.assert_close(answers[:2], answers[1:])
            assert (len(described), len(looked_at)) == (2 + known, 2)  # before a call and after it
            torch.testing.assert_close(eager(block, x, None), eager(twin, x, None))
        assert Counter(served(compiler)) - before == {"eager": 8, "precompiled": 1}


def arrived(directory: CacheDirectory, kind: type[nn.Module]) -> tuple[nn.Module, Regions]:
    """A block that the warm-up has called, and whose code has just arrived; and its boot."""
    block, compiler = built(directory, kind, settings=BACKGROUND)
    finish(compiler)
    return block, compiler


class Adaptable(Product):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("adapter", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if self.adapter is None else torch.mm(y, self.adapter)


def test_code_that_arrives_while_an_adapter_is_in_serves_once_it_is_out(directory):
    block, compiler = arrived(directory, Adaptable)
    block.adapter = nn.Parameter(torch.eye(16))
    answer(block, 4)
    assert compiler.supply.wait(600)  # for the adapter's code
    block.adapter = None
    answer_all([block] * 4)
    assert len(functions_of(compiler)) == 2
    assert served(compiler)["precompiled"] >= 1
    assert not only_report(compiler).reason


def hook_of_diffusers(module: nn.Module) -> None:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hooks.ModelHook(), "test")


@pytest.mark.parametrize(
    ("add", "remove"),
    [
        (lambda module: add_hook_to_module(module, ModelHook()), remove_hook_from_module),
        (hook_of_diffusers, lambda module: HookRegistry.check_if_exists_or_initialize(module).remove_hook("test")),
    ],
    ids=["accelerate", "diffusers"],
)
def test_hooks_that_were_removed_leave_a_module_as_it_was(directory, add, remove):
    """They replace the `forward` of the instance, and of its part."""
    block, compiler = arrived(directory, Block)
    steps = []
    for change in (lambda module: None, add, remove):
        for part in (block, block.inner):
            change(part)
        *_, last = [predict_each(compiler, [block]) for _ in range(3)]
        steps += last
    assert steps == ["precompiled", "eager", "precompiled"]


class Scaled(Product):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = 1.0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.shift


def test_code_that_arrives_while_a_number_is_another_serves_once_it_is_back(directory):
    block, compiler = arrived(directory, Scaled)
    block.scale = 2.0
    answer(block, 4)
    assert compiler.supply.wait(600)
    for scale in (1.0, 1.0, 2.0, 2.0, 1.0, 2.0):
        block.scale = scale
        torch.testing.assert_close(answer(block, 4), scale * eager(build(Product), tensor(4, 16)))
    assert len(functions_of(compiler)) == 2
    assert served(compiler)["precompiled"] == 4
    block.shift = 5.0
    for scale in (1.0, 2.0):  # what is ordered with one arrives with the other, as before
        block.scale = scale
        answer(block, 4)
        assert compiler.supply.wait(600)
    for scale in (1.0, 2.0) * 2:
        block.scale = scale
        torch.testing.assert_close(answer(block, 4), scale * eager(build(Product), tensor(4, 16)) + 5)
    assert served(compiler)["precompiled"] == 6
    assert not only_report(compiler).reason


def test_a_number_that_changes_from_call_to_call_is_given_up_and_reported(directory, monkeypatch):
    monkeypatch.setattr(kinds, "MOST_FUNCTIONS", 2)
    block, compiler = arrived(directory, Scaled)
    for scale in (1.0, 2.0, 3.0, 4.0, 5.0):
        block.scale = scale
        torch.testing.assert_close(answer(block, 4), scale * eager(build(Product), tensor(4, 16)))
        assert compiler.supply.wait(600)
    assert only_report(compiler).settled == "eager"
    assert "a number or a flag changes from call to call" in only_report(compiler).reason
    assert len(functions_of(compiler)) == 2


class BreakingIfTold(Product):
    def forward(self, x: torch.Tensor, breaks: bool) -> torch.Tensor:
        y = super().forward(x)
        if breaks:
            torch._dynamo.graph_break()
        return torch.mm(y, self.weight)


def test_calls_that_graphs_serve_are_served_so_while_others_are_compared(directory):
    blocks = [build(BreakingIfTold) for _ in range(6)]
    compiler = boot(directory, *blocks, settings=BLOCK)
    warm_up(compiler, lambda: [block(tensor(4, 16), True) for block in blocks])
    compiler.supply.release()
    with torch.inference_mode():
        for block in blocks:
            block(tensor(4, 16), False)
        assert compiler.supply.wait(600)
        blocks[0](tensor(4, 16), False)
        before = served(compiler)
        for block in blocks:
            block(tensor(4, 16), True)
    assert served(compiler) == {**before, "graphs": 6}


class Breaking(Product):
    """A branch on the values of tensors, which a second process does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.mm(y, self.weight if y.sum() > 1e9 else self.weight.T)


def test_a_call_that_cannot_be_compiled_ahead_is_tried_once_in_each_boot(directory):
    for settings in (BACKGROUND, BACKGROUND, BLOCK):
        block, compiler = built(directory, Breaking, settings=settings)
        assert compiler.supply.waiting == (settings is BACKGROUND)
        finish(compiler)
        answer(block, 4)
        assert compiler.supply.waiting == 0
        assert only_report(compiler).step == "eager"
        assert "a branch depends on the values of tensors" in only_report(compiler).reason
        compiler.supply.orders.queue.close()


def test_new_calls_are_eager_for_good_where_that_is_set(directory):
    block, compiler = built(directory, Product, settings=replace(BLOCK, unseen="eager"))
    compiler.supply.release()
    for _ in range(2):
        answer(block, 5)
    assert (served(compiler), compiler.supply.waiting) == ({"eager": 4}, 0)


def test_a_new_call_is_served_by_code_that_an_earlier_boot_has_made_whatever_the_setting(directory):
    block, compiler = built(directory, Product, settings=BLOCK)
    warm_up(compiler, lambda: block(tensor(5, 16)))
    block, compiler = built(directory, Product, settings=BLOCK)
    before = read_counts()
    answer_all([block] * 2, 5)
    assert read_counts().since(before).graphs == 0
    assert served(compiler) == {"eager": 2, "precompiled": 1}


@pytest.fixture
def varied(directory):
    """A block that compiles in the background, and calls of five sizes before the second process begins."""
    block, compiler = built(directory, Product, settings=BACKGROUND)
    for rows in (5, 6, 7, 8):
        answer(block, rows)
    return block, compiler


def test_sizes_for_which_an_open_graph_is_on_order_wait_for_it_until_it_is_dropped(varied):
    block, compiler = varied
    assert compiler.supply.waiting == 3  # two sizes, and the graph that fits the others too
    finish(compiler)
    before = read_counts()
    for rows in (4, 5, 6, 7, 8, 9):
        answer_all([block], rows)
    assert read_counts().since(before).graphs == 0
    assert served(compiler) == {"eager": 5 + 3, "precompiled": 3}
    assert compiler.supply.waiting == 0
    (region,) = compiler.by_class.values()
    (case,) = (case for case in region.supply.kinds if case.spec.open)
    region.supply.drop(case, "it differs")
    answer(block, 8)
    answer(block, 9)
    assert compiler.supply.waiting == 2


def test_sizes_whose_open_graph_could_not_be_made_are_ordered_by_themselves(varied, monkeypatch):
    """And answers without code wait for no gap between calls."""
    block, compiler = varied
    pauses: list[float] = []
    monkeypatch.setattr("compile_cache.serving.supply.time.sleep", pauses.append)
    *others, (*_, order) = sorted(compiler.supply.orders.queue._orders.queue)
    order.answer.set_result(Answer(reason="no graph fits all sizes"))
    answer(block, 7)
    answer(block, 8)
    assert compiler.supply.waiting == 5  # the queue itself still has that order
    for *_, order in others:
        order.answer.set_result(Answer(reason="no process can be started"))
    assert not pauses


class Cancelled(BaseException):
    """As Cog raises it in a cancelled prediction."""


def break_off(block: Product, rows: int, error: type[BaseException]) -> None:
    """Call the block, whose eager code ends with this error."""

    def fail(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "call_region", fail)
        with pytest.raises(error):
            answer(block, rows)


def test_a_call_that_was_cancelled_is_ordered_next_time(directory):
    block, compiler = built(directory, Product, settings=BACKGROUND)
    break_off(block, 5, Cancelled)
    answer(block, 5)
    assert compiler.supply.waiting == only_report(compiler).waiting == 2


@pytest.mark.parametrize("error", [Cancelled, torch.OutOfMemoryError])
def test_code_is_not_published_while_its_comparison_did_not_end_and_serves_once_it_has(directory, error):
    block, compiler = arrived(directory, Product)
    break_off(block, 4, error)
    assert functions_of(compiler) == []
    answer_all([block] * 4)
    assert served(compiler)["precompiled"] >= 1
    assert len(functions_of(compiler)) == 1


@pytest.mark.parametrize(("counts", "slept"), [((5, 5), 1), ((5, 6, 7, 7), 3), (range(1000), 20)])
def test_an_artifact_is_loaded_when_no_region_is_called_or_after_two_seconds(directory, monkeypatch, counts, slept):
    compiler = boot(directory, build(Product), settings=BACKGROUND)
    calls, pauses = iter(counts), []
    monkeypatch.setattr(compiler.supply, "_calls", lambda: next(calls))
    monkeypatch.setattr("compile_cache.serving.supply.time.sleep", pauses.append)
    compiler.supply._wait_for_gap()
    assert len(pauses) == slept
    assert sum(pauses) <= 2.001
