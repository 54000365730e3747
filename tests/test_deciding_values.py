"""Each value in the table of docs/architecture.md decides: with another one, the same call is served otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from documents import PROJECT, rows
from precompiling import FIRST, eager, tensor
from test_states import BACKGROUND, Stored
from torch import nn

from compile_cache.background.orders import Orders
from compile_cache.calls.spec import RECOMPILE_LIMIT, call_region, top_sizes
from compile_cache.inductor import stored_functions
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.function_file import SUFFIX, Mark
from compile_cache.inductor.stored_functions import GraphsRecord
from compile_cache.of_each import OfEach
from compile_cache.serving.kinds import PASSED, WHOLE_GRAPH, Case, State
from compile_cache.serving.moment import Known
from compile_cache.serving.region import _likeness
from compile_cache.serving.regions import Regions
from compile_cache.storage.directory import CacheDirectory

PATH = "precompiled/group/0.aot"


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Function(Precompiled):
    """Code for `Block` that no compiler made. Its checks are real, and it has one guard, `fits_all`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.path, self.compared_on, self.fits_all = PATH, frozenset[str](), True
        self._function, self._check_guards = run, lambda _: self.fits_all
        self._guards: Any = SimpleNamespace(check_verbose=lambda _: SimpleNamespace(verbose_code_parts=()))
        self._checks: Any = SimpleNamespace(difference=lambda *_: "", per_call=lambda _: lambda _: True)
        self._accepted, self._parts = None, OfEach()

    def outdated(self) -> str:
        return ""


class Store(Stored):
    """Has functions at these `paths`, and maybe a record of graphs."""

    paths: tuple[str, ...] = ()
    record: GraphsRecord | None = None

    def _paths(self, group: str, suffix: str) -> list[str]:
        return [*self.paths] if suffix == SUFFIX else []

    def graphs(self, *_: Any) -> GraphsRecord | None:
        return self.record


class Scene:
    """A region with a block, on which the function of its case has passed."""

    def __init__(self, directory: CacheDirectory) -> None:
        self.supply = (regions := Regions(BACKGROUND, directory)).supply
        self.store = self.supply.artifacts = Store(BACKGROUND, directory.path)
        self.orders = self.supply._orders = Orders(BACKGROUND, directory)
        self.orders.queue = SimpleNamespace(put=lambda _: None, waiting=0)  # type: ignore[assignment]
        self.moment, self.block, self.x, self.did = self.supply.moment, Block(), tensor(4, 2), list[str]()
        regions.compile(self.block)
        (self.region,) = regions.by_class.values()
        self.region._graphs.trace = lambda case, record, call: self.note("traced", call)  # type: ignore[method-assign]
        self.region._graphs._graphs = SimpleNamespace(run=lambda is_whole, call, compiles: call_region(*call))
        self.kinds, self.place = self.region.supply.kinds, self.region.places[self.block]
        self.function, self.error, self.meanwhile = Function(self.run), 0.0, int
        found = eager(self.kinds.case, (self.block, (self.x,), {}))
        self.case: Case = found[0]
        self.case.arrive(self.function)
        eager(self.function.misfit, (self.block, (self.x,), {}))
        self.case.trials[self.block] = PASSED

    def note(self, what: str, call: Any) -> Any:
        self.did.append(what)
        return call_region(*call)

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if module is not self.block:
            self.did.append("compared")
            self.meanwhile()
        return call_region(module, args, kwargs) + self.error

    def call(self) -> str:
        """What a call is served by, and what else it does."""
        served, states = self.region.served.copy(), {case: case.state for case in self.kinds}
        eager(self.block, self.x)
        moved = [case.state for case in self.kinds if case.state is not states.get(case, State.NEW)]
        return ", ".join([*(self.region.served - served), *self.did, *(f"now {state.value}" for state in moved)])

    # Where the call of a test begins. No start: its function has passed.

    def settled(self) -> None:
        """Such calls were found to be eager."""
        eager(lambda: self.region.settle((self.block, (self.x,), {}), _likeness((self.x,), {})))

    def not_compared(self) -> None:
        self.case.trials[self.block] = 0

    def wrong(self) -> None:
        self.not_compared()
        self.error = 1.0

    def open(self) -> None:
        self.moment.open[FIRST] = False

    def growing(self) -> None:
        self.open()
        self.case.state = State.GROWING

    def longer(self) -> None:
        self.x = tensor(5, 2)

    def new(self) -> None:
        self.kinds._cases.clear()
        self.region.supply.is_late = False

    def stored(self) -> None:
        self.new()
        self.store.paths = (PATH,)

    def late(self) -> None:
        self.stored()
        self.region.supply.is_late = True

    def marked(self) -> None:
        self.stored()
        self.function.compared_on = frozenset({self.place})

    def traceable(self) -> None:
        self.new()
        self.store.record = GraphsRecord("precompiled/group/0.graphs", 5.0, "it breaks")
        self.supply.is_warming_up = True

    def graphs(self) -> None:
        self.case.state, self.case.graphs = State.EAGER, "precompiled/group/0.graphs"
        self.case.trials[self.block] = WHOLE_GRAPH

    # Flips that take more than an expression.

    def know(self, one: object, **of_sizes: Case) -> None:
        known = self.moment.known[one] = Known(9)
        known.functions = {top_sizes((self.x,), {}): tuple(of_sizes.values())}


def given(name: str, value: Any) -> Callable[[Any], None]:
    """Sets what this dotted name says, from a scene on."""
    *path, last = name.split(".")

    def flip(scene: Any) -> None:
        for part in path:
            scene = getattr(scene, part)
        setattr(scene, last, value)

    return flip


Flip = tuple[Callable[[Scene], object], str, Callable[[Scene], object], str]
START = id
# By value: where the call begins, how it is served there, the flip of this value alone, and how it is served then.
FLIPS: dict[str, Flip] = {
    "Moment.known": (START, "precompiled", Scene.settled, "eager"),
    "Moment.known, of a case": (Scene.growing, "eager, now new", lambda scene: scene.know(scene.case), "eager"),
    "Known.functions": (
        Scene.not_compared,
        "eager, compared",
        lambda scene: scene.know(scene.block, case=scene.case),
        "precompiled",
    ),
    "Known.calls_left": (
        Scene.settled,
        "eager",
        lambda scene: setattr(scene.moment.known[scene.block], "calls_left", 0),
        "precompiled",
    ),
    "Moment.open": (
        lambda scene: (scene.settled(), setattr(scene.moment.known[scene.block], "calls_left", 0)),
        "precompiled",
        Scene.open,
        "eager",
    ),
    "Moment._begun": (
        Scene.wrong,
        "eager, compared, now eager",
        lambda scene: given("meanwhile", lambda: given("moment._begun", 1)(scene))(scene),
        "eager, compared",
    ),
    "Moment._changes": (
        Scene.open,
        "precompiled",
        lambda scene: scene.moment._changes.update({scene.case.subject(scene.block): (int, 0.0)}),
        "eager",
    ),
    "Kinds._cases": (START, "precompiled", lambda scene: scene.kinds._cases.clear(), "eager, now ordered"),
    "Case.spec": (
        Scene.longer,
        "eager, now ordered",
        lambda scene: setattr(scene.case, "spec", replace(scene.case.spec, open=((0, 0),))),
        "precompiled",
    ),
    "Case.state": (START, "precompiled", given("case.state", State.EAGER), "eager"),
    "Case.function": (
        START,
        "precompiled",
        lambda scene: (given("case.function", other := Function(scene.run))(scene), setattr(other, "fits_all", False)),
        "eager, now ordered",
    ),
    "Case.trials": (START, "precompiled", Scene.not_compared, "eager, compared"),
    "Case.graphs": (Scene.graphs, "graphs", given("case.graphs", ""), "eager"),
    "Case.claimant": (Scene.not_compared, "eager, compared", given("case.claimant", ("another",)), "eager"),
    "Supply.late": (Scene.late, "eager, now late", given("supply.late", None), "eager, compared, now has code"),
    "RegionSupply.is_late": (
        Scene.late,
        "eager, now late",
        given("region.supply.is_late", False),
        "eager, compared, now has code",
    ),
    "Supply.artifacts": (
        Scene.stored,
        "eager, compared, now has code",
        given("supply.artifacts", ""),
        "eager, now ordered",
    ),
    "Supply._orders": (Scene.new, "eager, now ordered", given("supply._orders", "a fork has none"), "eager, now eager"),
    "Supply.is_warming_up": (
        Scene.marked,
        "precompiled, now has code",
        given("supply.is_warming_up", True),
        "eager, compared, now has code",
    ),
    "Supply.tracing_s": (Scene.traceable, "traced", given("supply.tracing_s", 4.0), "eager, now eager"),
    "Region.places": (
        Scene.marked,
        "precompiled, now has code",
        lambda scene: scene.region.places.update({scene.block: "elsewhere"}),
        "eager, compared, now has code",
    ),
    "Precompiled.compared_on": (
        Scene.stored,
        "eager, compared, now has code",
        lambda scene: given("function.compared_on", frozenset({scene.place}))(scene),
        "precompiled, now has code",
    ),
    "Precompiled._accepted": (
        START,
        "precompiled",
        lambda scene: given("function._accepted", scene.function._accepted._replace(overlaps=((0, 1),)))(scene),
        "eager, now ordered",
    ),
    "Artifacts._marks": (
        Scene.stored,
        "eager, compared, now has code",
        lambda scene: scene.store._marks.update({PATH: Mark(frozenset({scene.place}), False)}),
        "precompiled, now has code",
    ),
    "Artifacts._functions": (
        Scene.late,
        "eager, now late",
        lambda scene: scene.store._functions.update({PATH: scene.function}),
        "eager, compared, now has code",
    ),
    "Artifacts._ahead": (
        Scene.late,
        "eager, now late",
        lambda scene: scene.store._ahead.update({PATH: scene.function}),
        "eager, compared, now has code",
    ),
    "Artifacts._refused": (
        Scene.stored,
        "eager, compared, now has code",
        lambda scene: scene.store._refused.update({PATH: "damaged"}),
        "eager, now ordered",
    ),
    "OrderQueue.waiting": (
        Scene.new,
        "eager, now ordered",
        given("orders.queue.waiting", RECOMPILE_LIMIT),
        "eager",
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> CacheDirectory:
    return CacheDirectory.claim(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", FLIPS)
def test_a_value_decides(name: str, directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    start, before, flip, after = FLIPS[name]
    for change, served in ((START, before), (flip, after)):
        scene = Scene(directory)
        monkeypatch.setattr(stored_functions, "_load", lambda *_, scene=scene: scene.function)
        start(scene)
        change(scene)
        assert scene.call() == served


def test_the_table_has_these_values_and_no_other() -> None:
    assert [cells[0].replace("`", "") for cells in rows(PROJECT / "docs/architecture.md", "value")] == [*FLIPS]
