"""How a region serves calls: what fails costs the call that failed a step, runs the model once, and is compared once.

The blocks multiply matrices, which compiles in half a second, without a C++ compiler.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import shutil
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import blocks
import numpy
import pytest
import torch
from passes import Versioned
from precompiling import boot, build, built, eager, find, finish, only_report, tensor, warm_up, warmed
from torch import nn
from torch._inductor import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from compile_cache.inductor.make import out_of_stored_files
from compile_cache.lifecycle.host import resolve_cold_start
from compile_cache.serving import kinds as kinds_module
from compile_cache.serving import region as region_module
from compile_cache.serving import supply as supply_module
from compile_cache.serving.comparison import compare
from compile_cache.serving.kinds import State
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.ledger import Ledger

close = torch.testing.assert_close
BACKGROUND = Settings(cold_start="background", unseen="background")


class Product(blocks.Weighted):
    """A matrix product, times what it is told."""

    def __init__(self, factor: Any = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight, alpha=self.factor)


class Listing(Product):
    """Adds to a list, and breaks the graph."""

    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        y = super().forward(x)
        seen.append(y)
        torch._dynamo.graph_break()
        return torch.mm(y, self.weight)


class Halved(Product):
    """Breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return torch.mm(y, self.weight)


class InPlace(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.copy_(super().forward(x))
        return torch.mm(x, self.weight)


class Hidden:
    """An input that no copy can be made of."""

    def __init__(self) -> None:
        self.calls = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("there is only one")


class Counting(Product):
    """Counts its calls in an input, and breaks the graph."""

    def forward(self, x: torch.Tensor, counter: Any) -> torch.Tensor:
        counter.calls += 1
        torch._dynamo.graph_break()
        return super().forward(x)


def predict(module: nn.Module, *args: Any) -> Any:
    """A call after READY."""
    return eager(module, *args)


TORCHS_OWN: dict[str, Callable[[], nn.Module]] = {
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
    "linear layer": lambda: nn.Linear(16, 16, bias=False),
    "layer with a hook of its own": lambda: torch.nn.utils.weight_norm(nn.Linear(16, 16)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", TORCHS_OWN)
def test_a_class_of_torchs_own_is_compiled(shared, name):
    module, reference = build(TORCHS_OWN[name]), build(TORCHS_OWN[name])
    compiler = boot(shared, module)
    close(warm_up(compiler, lambda: module(tensor(1, 4, 16))), eager(reference, tensor(1, 4, 16)), rtol=1e-3, atol=1e-3)
    assert only_report(compiler).step in ("precompiled", "graphs"), only_report(compiler).reason
    assert name == "encoder layer" or "graph breaks" not in only_report(compiler).reason


def test_a_graph_break_changes_the_inputs_once(shared):
    module = build(Listing)
    compiler = boot(shared, module)
    for call in (partial(warm_up, compiler), eager):
        answer, seen = call(lambda: (module(tensor(), seen := []), seen))
        assert len(seen) == 1
        close(answer, eager(build(Listing), tensor(), []))
    assert "with graph breaks" in only_report(compiler).reason
    assert compiler.by_class[Listing].served["graphs"] == 1


def test_graphs_answer_while_another_thread_traces(shared):
    """torch's flag of traces is one for all threads."""
    module, begun, ended = build(Halved), threading.Event(), threading.Event()

    def wait(x: torch.Tensor) -> torch.Tensor:
        begun.set()
        assert ended.wait(60)
        return x + 1

    compiler = boot(shared, module)
    answer = warm_up(compiler, lambda: module(tensor()))
    with ThreadPoolExecutor() as threads:
        tracing = threads.submit(make_fx(wait), tensor())
        assert begun.wait(60)
        try:
            close(predict(module, tensor()), answer)
        finally:
            ended.set()
    tracing.result()


TRACED: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "export": lambda module, x: torch.export.export(module, (x,)).graph_module.code,
    "make_fx": lambda module, x: make_fx(module)(x).code,
    "jit": lambda module, x: torch.jit.trace(module, x[:1]).code,
}


@pytest.mark.parametrize("way", TRACED)
def test_a_trace_of_a_module_after_ready_has_what_the_module_computes_and_no_more(shared, way):
    """No code is tried in it: the trace would have the copies."""
    module, x = build(Product), torch.ones(5, blocks.SIZE)
    compiler = boot(shared, module)
    warm_up(compiler, lambda: module(tensor()))
    assert TRACED[way](module, x) == TRACED[way](build(Product), x)
    assert "eager in a dispatch mode" in only_report(compiler).reason


class Forking(Product):
    def forward(self, x: torch.Tensor, inner: nn.Module) -> torch.Tensor:
        with ThreadPoolExecutor() as threads:
            return super().forward(threads.submit(predict, inner, x).result())


def test_a_call_that_waits_for_a_region_in_another_thread_is_answered(shared):
    outer, inner = build(Forking), build(Product)
    compiler = boot(shared, outer, inner)
    expected = eager(build(Product), eager(build(Product), tensor()))
    close(warm_up(compiler, lambda: outer(tensor(), inner)), expected)
    close(predict(outer, tensor(), inner), expected)


class Asking(Product):
    """A guard asks for its property, which calls `Asking.wait` meanwhile."""

    class Lazy:
        @property
        def scale(self) -> float:
            return Asking.wait()

    wait = staticmethod(lambda: 2.0)

    def __init__(self) -> None:
        super().__init__()
        self.lazy = self.Lazy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if hasattr(self.lazy, "scale") else 1)


def test_a_guard_that_waits_for_a_call_in_another_thread_is_answered(directory, monkeypatch):
    """The other call is of another region, and of a new size."""
    first, second, other = build(Asking), build(Asking), build(Product)
    compiler = boot(directory, first, second, other)
    warm_up(compiler, lambda: [first(tensor()), other(tensor())])

    def wait() -> float:
        monkeypatch.undo()
        with ThreadPoolExecutor() as threads:
            return float(threads.submit(predict, other, tensor(8, 16)).result().shape[0] > 0)

    monkeypatch.setattr(Asking, "wait", staticmethod(wait))
    close(predict(second, tensor()), eager(build(Asking), tensor()))


def test_a_call_that_is_cancelled_at_any_instruction_leaves_no_case_claimed(directory):
    """After one whole call, each line of serving that a comparing call runs is the last one, once."""
    calls, modules = 0, (region_module, supply_module, kinds_module)
    files, compiler = [module.__file__ for module in modules], boot(directory, settings=BACKGROUND)

    def cancel_at(number: int) -> Any:
        seen = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal seen
            # Python itself is never interrupted between the end of a `with` block and its exit.
            is_with = linecache.getline(file := frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with")
            if event == "line" and file in files and not is_with:
                seen += 1
                if seen == number:
                    raise KeyboardInterrupt
            return trace

        return trace

    for calls in range(1, 200):
        module = build(Product)
        compiler.compile(module)
        sys.settrace(cancel_at(calls))
        try:
            predict(module, tensor(calls % 50 + 1, 16))
            is_whole = True
        except KeyboardInterrupt:
            is_whole = False
        finally:
            sys.settrace(None)
        (region,) = compiler.by_class.values()
        assert {case.state for case in region.supply.kinds} <= {State.NEW, State.ORDERED, State.EAGER}
        assert not any(case.claimant for case in region.supply.kinds)
        if is_whole:
            break
    assert calls > 20


def test_inputs_that_cannot_be_copied_are_used_once(shared):
    module, counter = build(Counting), Hidden()
    compiler = boot(shared, module)
    close(warm_up(compiler, lambda: module(tensor(), counter)), eager(build(Counting), tensor(), Hidden()))
    assert counter.calls == 1
    warm_up(compiler, lambda: module(tensor(), counter))
    assert counter.calls == 2
    assert "there is only one" in only_report(compiler).reason


class Full(Versioned):
    """Compiling fails with it, as on a full disk."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        raise OSError("no space left on device")


@pytest.mark.parametrize("kind", [Product, Halved])
def test_a_failed_compile_after_ready_demotes_calls_of_its_kind_alone(directory, kind):
    """The others are served by a function, or by graphs."""
    module = build(kind)
    compiler = warmed(directory, module)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=Full("full")):
        close(predict(module, tensor(5, 16)), eager(build(kind), tensor(5, 16)))
    finish(compiler)
    assert "no space left" in only_report(compiler).reason
    served = compiler.by_class[kind].served
    for rows, others in ((5, 1), (4, 0)):
        before = served["eager"]
        close(predict(module, tensor(rows, 16)), eager(build(kind), tensor(rows, 16)))
        assert served["eager"] == before + others
    predict(module, tensor(6, 16))
    assert compiler.supply.waiting == 1, "other kinds are compiled"


def test_an_attribute_that_changes_after_ready_is_used(shared):
    module, other = build(Product), build(Product)
    compiler = boot(shared, module, other)
    warm_up(compiler, lambda: [module(tensor()), other(tensor())])
    for factor in (numpy.float32(2.0), 1.0, 3.0):
        other.factor = factor
        close(predict(other, tensor()), eager(build(Product, factor), tensor()))
        close(predict(module, tensor()), eager(build(Product), tensor()))


class Cheating(Halved):
    """Compiled for other calls than those of a first warm-up, it gives another answer than eager."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return -y if torch.compiler.is_compiling() and (len(x) > 4 or self.factor > 1) else y


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_graph_that_was_not_compared_or_failed_serves_no_call(directory, is_ready):
    """torch would serve any call by a graph whose guards hold."""
    module, twin = build(Cheating), build(Halved)
    compiler = warmed(directory, module, settings=Settings(dynamic=True))
    assert only_report(compiler).step == "graphs"
    for rows, factor in ((4, 2.0), (8, 1.0)):
        module.factor = twin.factor = factor
        for call in (eager if is_ready else partial(warm_up, compiler), eager):
            close(call(lambda rows=rows: module(tensor(rows, 16))), eager(twin, tensor(rows, 16)))
    assert ("its graphs: its answer differs from eager" in only_report(compiler).reason) is not is_ready


class Failing(Product):
    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.mm(x, self.weight).index_select(0, at)


def test_an_error_of_compiled_code_after_ready_is_raised_and_runs_nothing_again(shared):
    module, x = build(Failing), tensor()
    compiler = boot(shared, module)
    warm_up(compiler, lambda: module(tensor(), torch.tensor([1])))
    with pytest.raises((IndexError, RuntimeError)):
        eager(lambda: module(x, torch.tensor([7])))
    close(x, tensor() + 1)
    close(*(eager(lambda one=one: one(tensor(), torch.tensor([2]))) for one in (module, build(Failing))))
    assert compiler.by_class[Failing].served == {"eager": 2, "precompiled": 2}


class Catching(Product):
    """Breaks the graph, and catches whatever its second part raises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        try:
            torch._dynamo.graph_break()
            return torch.mm(y, self.weight)
        except Exception:
            return torch.mm(y, self.weight)


@pytest.mark.parametrize("kind", [Halved, Catching])
def test_a_stored_graph_that_is_gone_is_not_compiled_in_the_setup_but_ordered(directory, monkeypatch, kind):
    module = build(kind)
    warmed(directory, module)
    for folder in ("fxgraph", "aotautograd"):
        shutil.rmtree(directory.path / folder)
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", lambda *_, **__: pytest.fail("compiled"))
    for suppressed in (False, True):
        again = build(kind)
        compiler = boot(directory, again, settings=BACKGROUND)
        with torch._dynamo.config.patch(suppress_errors=suppressed):
            close(warm_up(compiler, lambda again=again: again(tensor())), eager(build(kind), tensor()))
        assert (only_report(compiler).step, compiler.supply.waiting) == ("eager", 1)


def test_while_one_thread_takes_graphs_out_of_stored_files_another_one_compiles(monkeypatch):
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", lambda: "compiled")
    with ThreadPoolExecutor() as threads, out_of_stored_files():
        assert threads.submit(lambda: compile_fx.fx_codegen_and_compile()).result() == "compiled"


def test_an_instance_whose_graph_is_not_stored_is_ordered_beside_one_whose_graph_is(directory, monkeypatch):
    module = build(Halved)
    warmed(directory, module)
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", lambda *_, **__: pytest.fail("compiled"))
    stored, other, unused = build(Halved), build(Halved, 2.0), build(Scaled)
    compiler = boot(directory, stored, other, unused, settings=BACKGROUND)
    warm_up(compiler, lambda: [stored(tensor()), other(tensor())])
    close(predict(stored, tensor()), eager(build(Halved), tensor()))
    close(predict(other, tensor()), eager(build(Halved, 2.0), tensor()))
    halved, idle = (region.report for region in compiler.by_class.values())
    assert (halved.settled, halved.waiting, compiler.supply.waiting) == ("graphs", 1, 1)
    assert compiler.by_class[Halved].served == {"eager": 4, "graphs": 2}
    assert "another torch.compile" not in idle.reason


def test_graphs_are_made_and_traced_of_a_class_that_asks_for_them_although_functions_are_stored(directory):
    asking = Settings(graphs=("Product",))
    for orders in (1, 0):
        module, compiler = built(directory, Product, settings=asking)
        close(predict(module, tensor()), eager(build(Product), tensor()))
        assert only_report(compiler).step == "graphs"
        assert "not precompiled: COMPILE_CACHE_GRAPHS asks for graphs" in only_report(compiler).reason
        assert next(compiler.supply.orders.queue._numbers) == orders
    for made in (1, 0):  # by boots that do not ask
        _, compiler = built(directory, Product)
        assert (only_report(compiler).step, only_report(compiler).made) == ("precompiled", made)
    _, compiler = built(directory, Product, settings=asking)
    assert only_report(compiler).step == "graphs"


def test_instances_that_need_graphs_of_their_own_get_them_and_the_next_boot_orders_none(directory):
    for orders in (3, 0):
        modules = [build(Halved, factor) for factor in (1.0, 2.0, 3.0)]
        compiler = boot(directory, *modules)
        warm_up(compiler, lambda modules=modules: [module(tensor()) for module in modules])
        (region,) = compiler.by_class.values()
        before = region.served.copy()
        for factor, module in zip((1.0, 2.0, 3.0), modules, strict=True):
            close(predict(module, tensor()), eager(build(Halved, factor), tensor()))
        assert (region.served - before, region.report.step) == ({"graphs": 3}, "graphs")
        assert (next(compiler.supply.orders.queue._numbers), len(list(directory.path.rglob("*.graphs")))) == (
            orders,
            1,
        )


class Scaled(Product):
    def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
        return torch.addmm(x, x, self.weight, alpha=by)


def test_the_code_for_a_number_serves_it_again_after_another_number(directory):
    module = build(Scaled)
    compiler = boot(directory, module)
    warm_up(compiler, lambda: module(tensor(), 0.5))
    for by in (2.0, 2.0, 2.0):  # is ordered, compared and served
        predict(module, tensor(), by)
        finish(compiler)
    served = next(iter(compiler.by_class.values())).served
    before = served["precompiled"]
    close(predict(module, tensor(), 0.5), eager(build(Scaled), tensor(), 0.5))
    assert (before, served["precompiled"]) == (1, 2)


class Acting(Halved):
    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(x))


def test_graphs_are_compared_with_eager_on_every_instance(shared):
    """torch guards an attribute such as `torch.Tensor.exp` by its type alone, and serves the wrong graph."""
    modules = [build(Acting, torch.Tensor.abs), build(Acting, torch.Tensor.neg)]
    references = [build(Acting, torch.Tensor.abs), build(Acting, torch.Tensor.neg)]
    compiler = boot(shared, *modules)
    answers = warm_up(compiler, lambda: [module(tensor()) for module in modules])
    close(answers, [eager(reference, tensor()) for reference in references])
    close([predict(module, tensor()) for module in modules], answers)


def test_an_artifact_is_compared_with_eager_on_every_instance(directory, monkeypatch):
    module = build(Product)
    warmed(directory, module)
    right, wrong = build(Product), build(Product, 2.0)
    compiler = boot(directory, right, wrong)
    # As if nothing of an artifact said which factor it was made for.
    function_class = type(find(directory, right, tensor()))
    monkeypatch.setattr(function_class, "misfit", lambda *_: "")
    monkeypatch.setattr(function_class, "fits", lambda *_: True)
    answers = warm_up(compiler, lambda: [right(tensor()), wrong(tensor())])
    close(answers, [eager(build(Product), tensor()), eager(build(Product, 2.0), tensor())])
    close([predict(right, tensor()), predict(wrong, tensor())], answers)
    assert "differs from eager" in only_report(compiler).reason
    assert compiler.supply.directory.ledger.withheld
    assert not list(directory.path.rglob("*.compared"))


@pytest.mark.parametrize(("is_hit", "is_marked", "comparisons"), [(True, True, 1), (True, False, 2), (False, True, 2)])
def test_a_boot_that_hits_compares_an_artifact_once_and_any_other_on_every_instance(
    directory, monkeypatch, is_hit, is_marked, comparisons
):
    warmed(directory, build(Product), build(Product))
    for mark in directory.path.rglob("*.compared"):
        if not is_marked:
            mark.unlink()
    compared = []
    monkeypatch.setattr(
        "compile_cache.serving.comparison.compare", lambda *answers: compared.append(answers) or compare(*answers)
    )
    one, another = build(Product), build(Product)
    compiler = Regions(resolve_cold_start(Settings()), directory, is_hit)
    for instance in (one, another):
        compiler.compile(instance)
    warm_up(compiler, lambda: [one(tensor()), another(tensor())])
    assert only_report(compiler).step == "precompiled"
    assert len(compared) == comparisons


def test_a_version_trusts_what_another_has_compared_only_once_it_has_compared_it_itself(directory):
    modules = [build(Product), build(Product)]
    first = boot(directory, *modules)
    warm_up(first, lambda: [module(tensor()) for module in modules])
    owners = first.supply.directory.ledger.ready(is_ending=True)
    assert len(marks := [path for path in owners if path.endswith(".compared")]) == 1
    modules = [build(Product), build(Product)]
    directory.ledger = Ledger(directory.scan)
    directory.ledger.plant(owners)
    second = Regions(resolve_cold_start(Settings()), directory)
    for module in modules:
        second.compile(module)

    def call() -> None:
        modules[0](tensor())
        published = second.supply.directory.ledger.ready(is_ending=True)
        assert [path for path in published if path.endswith(".aot")]
        assert not published.keys() & {*marks}
        modules[1](tensor())

    warm_up(second, call)
    assert {*marks} <= second.supply.directory.ledger.ready(is_ending=True).keys()


def test_code_for_whose_comparison_there_is_no_memory_serves_once_it_was_compared(shared, monkeypatch):
    exhausted = mock.Mock(side_effect=torch.OutOfMemoryError("no memory left"))
    module = build(Product)
    compiler = boot(shared, module)
    (region,) = compiler.by_class.values()
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", exhausted)
        close(warm_up(compiler, lambda: module(tensor())), eager(build(Product), tensor()))
    for _ in range(4):
        assert region.served["precompiled"] == 0
        close(predict(module, tensor()), eager(build(Product), tensor()))
        if region.served["precompiled"]:
            break
    assert region.served["precompiled"] == 1


@pytest.mark.parametrize("reason", ["no space left", "no attribute 'version'"])
def test_a_graph_pass_that_fails_costs_the_step_and_inputs_are_changed_once(shared, reason):
    module, full = build(InPlace), Full("full")
    if "version" in reason:
        del full.version
    with torch._inductor.config.patch(post_grad_custom_pre_pass=full):
        compiler = boot(shared, module)
        answer = warm_up(compiler, lambda: (module(changed := tensor()), changed))
    close(answer, eager(lambda: (build(InPlace)(changed := tensor()), changed)))
    assert reason in only_report(compiler).reason
    assert (only_report(compiler).step, only_report(compiler).made) == ("eager", 0)


@pytest.mark.parametrize("name", ["torch._C._get_sdp_priority_order", "torch._dynamo.guards.GuardsStatePickler"])
def test_a_torch_without_a_private_name_costs_the_compiled_code_alone(directory, monkeypatch, name):
    inductor = ("aot", "stored_functions", "guards", "function", "lean_loading", "torch_state")
    for needing in (*(f"inductor.{module}" for module in inductor), "background.orders"):
        module = importlib.import_module(f"compile_cache.{needing}")
        monkeypatch.setattr(f"compile_cache.{needing}", module)  # also the package has it again afterwards
        monkeypatch.delitem(sys.modules, module.__name__)
    monkeypatch.delattr(name)
    module = build(Product)
    compiler = boot(directory, module)
    close(warm_up(compiler, lambda: module(tensor())), eager(build(Product), tensor()))
    assert only_report(compiler).step == "eager"
    assert name.rpartition(".")[2] in only_report(compiler).reason
    assert only_report(compiler).made == 0


def test_a_function_is_refused_by_name(shared):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not predict"):
        Regions(resolve_cold_start(Settings()), shared).compile(predict)  # type: ignore[arg-type]


class Encoding(Product):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight)


def test_a_module_of_which_only_a_method_is_called_is_unused_and_the_report_says_so(shared, caplog):
    module = build(Encoding)
    compiler = boot(shared, module)
    warm_up(compiler, lambda: module.encode(tensor()))
    compiler.name_unused(graphs=0)
    assert only_report(compiler).step == "unused"
    assert "nothing called it" in caplog.text


class Alike:
    """Compares as a tensor does, item by item."""

    def __eq__(self, other: Any) -> Any:
        return self.weight == other.weight

    def __hash__(self) -> int:
        return 1


class AlikeProduct(Alike, Product):
    pass


class AlikeHalved(Alike, Halved):
    pass


@pytest.mark.parametrize(("kind", "step"), [(AlikeProduct, "precompiled"), (AlikeHalved, "graphs")])
def test_modules_that_are_equal_are_told_apart_and_one_that_the_program_forgets_is_freed(shared, kind, step):
    modules = [build(kind), build(kind)]
    compiler = boot(shared, *modules)
    warm_up(compiler, lambda: [one(tensor()) for one in modules])
    close(predict(modules[0], tensor()), predict(modules[1], tensor()))
    forgotten, other = weakref.ref(modules[0]), modules[1]
    modules.clear()
    gc.collect()
    assert forgotten() is None
    close(predict(other, tensor()), eager(build(kind), tensor()))
    assert compiler.by_class[kind].served == {"eager": 4, step: 3}
