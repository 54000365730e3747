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

from compile_cache.calls.spec import RECOMPILE_LIMIT, top_sizes
from compile_cache.calls.torch_call import call_region
from compile_cache.inductor import stored_functions
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.function_file import SUFFIX, Mark
from compile_cache.inductor.stored_functions import GraphsRecord
from compile_cache.of_each import OfEach
from compile_cache.serving import supply
from compile_cache.serving.kinds import LEFT_OUT, PASSED, WHOLE_GRAPH, Case, State
from compile_cache.serving.moment import Known
from compile_cache.serving.region import _likeness
from compile_cache.serving.regions import Regions
from compile_cache.storage.directory import CacheDirectory

PATH = "precompiled/group/0.aot"


class Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Function(Precompiled):
    """Code for `Block` that no compiler made. Its checks are real, and it has one guard: whether it `fits`."""

    def __init__(self, run: Callable[..., Any], fits: bool = True) -> None:
        self.path, self.compared_on = PATH, frozenset[str]()
        self._function, self._check_guards = run, lambda _: fits
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
        self.orders: Any = self.supply.orders
        self.orders.queue = SimpleNamespace(put=lambda _: None, waiting=0)  # type: ignore[assignment]
        self.moment, self.block, self.x, self.did = self.supply.moment, Block(), tensor(4, 2), list[str]()
        regions.compile(self.block)
        (self.region,) = regions.by_class.values()
        self.region._graphs.trace = lambda case, record, call, eager: self.note("traced", call)  # type: ignore
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

    # What a test begins with, or flips.

    def settled(self) -> None:
        """Such calls were found to be eager."""
        eager(lambda: self.region._settle((self.block, (self.x,), {}), _likeness((self.x,), {})))

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

    def use_up(self) -> None:
        self.moment.known[self.block].calls_left = 0

    def know(self, one: object, *of_sizes: Case) -> None:
        self.moment.known[one] = Known(9)
        self.moment.known[one].functions[top_sizes((self.x,), {})] = of_sizes


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
SERVES, NOW_SERVES, EAGER = "precompiled", "precompiled, now has code", "eager"
COMPARED, NOW_COMPARED = "eager, compared", "eager, compared, now has code"
ORDERED = "eager, now ordered"
# By value: where the call begins, how it is served there, the flip of this value alone, and how it is served then.
FLIPS: dict[str, Flip] = {
    "Moment.known": (START, SERVES, Scene.settled, EAGER),
    "Moment.known, of a case": (Scene.growing, "eager, now new", lambda s: s.know(s.case), EAGER),
    "Known.functions": (Scene.not_compared, COMPARED, lambda s: s.know(s.block, s.case), SERVES),
    "Known.calls_left": (Scene.settled, EAGER, Scene.use_up, SERVES),
    "Moment.open": (lambda s: (s.settled(), s.use_up()), SERVES, Scene.open, EAGER),
    "Moment._begun": (
        Scene.wrong,
        "eager, compared, now eager",
        lambda s: given("meanwhile", lambda: given("moment._begun", 1)(s))(s),
        COMPARED,
    ),
    "Moment._changes": (
        Scene.open,
        SERVES,
        lambda s: s.moment._changes.update({s.case.subject(s.block): (int, 0.0)}),
        EAGER,
    ),
    "Kinds._cases": (START, SERVES, lambda s: s.kinds._cases.clear(), ORDERED),
    "Case.spec": (Scene.longer, ORDERED, lambda s: given("case.spec", replace(s.case.spec, open=((0, 0),)))(s), SERVES),
    "Case.state": (START, SERVES, given("case.state", State.EAGER), EAGER),
    "Case.function": (START, SERVES, lambda s: given("case.function", Function(s.run, fits=False))(s), ORDERED),
    "Case.trials": (START, SERVES, Scene.not_compared, COMPARED),
    "Case.graphs": (Scene.graphs, "graphs", given("case.graphs", ""), EAGER),
    "Case.claimant": (Scene.not_compared, COMPARED, given("case.claimant", ("another",)), EAGER),
    "Supply.late": (Scene.late, ORDERED, given("supply.late", None), NOW_COMPARED),
    "RegionSupply.is_late": (Scene.late, ORDERED, given("region.supply.is_late", False), NOW_COMPARED),
    "Supply.artifacts": (Scene.stored, NOW_COMPARED, given("supply.artifacts", ""), ORDERED),
    "Supply.orders": (Scene.new, ORDERED, given("supply.orders", "a fork has none"), "eager, now eager"),
    "Supply.is_warming_up": (Scene.marked, NOW_SERVES, given("supply.is_warming_up", True), NOW_COMPARED),
    "Supply.tracing_s": (Scene.traceable, "traced", given("supply.tracing_s", 4.0), "eager, now eager"),
    "Region.places": (Scene.marked, NOW_SERVES, lambda s: s.region.places.update({s.block: "elsewhere"}), NOW_COMPARED),
    "Precompiled.compared_on": (
        Scene.stored,
        NOW_COMPARED,
        lambda s: given("function.compared_on", frozenset({s.place}))(s),
        NOW_SERVES,
    ),
    "Precompiled._accepted": (
        START,
        SERVES,
        lambda s: given("function._accepted", s.function._accepted._replace(overlaps=((0, 1),)))(s),
        ORDERED,
    ),
    "Artifacts._marks": (
        Scene.stored,
        NOW_COMPARED,
        lambda s: s.store._marks.update({PATH: Mark(frozenset({s.place}), False)}),
        NOW_SERVES,
    ),
    "Artifacts._known": (Scene.late, ORDERED, lambda s: s.store._known.update({PATH: s.function}), NOW_COMPARED),
    "OrderQueue.waiting": (Scene.new, ORDERED, given("orders.queue.waiting", RECOMPILE_LIMIT), EAGER),
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


def test_code_that_has_failed_stops_at_once_though_it_is_known_to_serve(directory: CacheDirectory) -> None:
    scene = Scene(directory)
    scene.open()
    assert scene.call() == SERVES
    other = Case(replace(scene.case.spec, nesting="another"))
    scene.kinds._cases[other.spec] = [other]
    other.arrive(scene.function)
    scene.region.supply.drop(scene.case, "it failed")
    assert (scene.call(), other.state) == (EAGER, State.EAGER)


def test_no_mark_names_an_instance_of_which_a_call_was_not_compared(
    directory: CacheDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, places = Scene(directory), list[frozenset[str]]()
    monkeypatch.setattr(supply, "write_mark", lambda folder, path, mark: places.append(mark.places))
    scene.region.supply.mark(scene.case, scene.region.places)
    assert places == [{scene.place}]
    other = Case(replace(scene.case.spec, nesting="another"))
    scene.kinds._cases[other.spec] = [other]
    other.arrive(scene.function)
    other.meet(scene.block)
    scene.region.supply.mark(scene.case, scene.region.places)
    assert places == [{scene.place}]


def test_what_calls_wait_for_is_loaded_first(directory: CacheDirectory) -> None:
    scene: Any = Scene(directory)
    scene.store.load, scene.supply._wait_for_gap = scene.did.append, id
    scene.supply._load_late({"a": False, "b": True, "c": False, "d": True})
    assert scene.did == ["b", "d", "a", "c"]


def test_what_was_left_out_is_not_compared_again(directory: CacheDirectory) -> None:
    scene = Scene(directory)
    scene.case.trials[scene.block] = LEFT_OUT
    assert scene.call() == EAGER


def test_outside_predictions_each_call_shows_whether_such_calls_still_grow(directory: CacheDirectory) -> None:
    scene = Scene(directory)
    scene.case.state = State.GROWING
    scene.know(scene.case)
    assert scene.call() == "eager, now new"


def test_the_table_has_these_values_and_no_other() -> None:
    assert [cells[0].replace("`", "") for cells in rows(PROJECT / "docs/architecture.md", "value")] == [*FLIPS]
