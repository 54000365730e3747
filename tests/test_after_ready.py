"""Stored functions of modules that are compiled `after_ready`: they are loaded after READY."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
import torch
from blocks import Inner, Product
from boots import run_boot, settings
from precompiling import activated, artifacts, build, eager, finish, tensor, warm_up

from compile_cache.calls.torch_call import Call
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.prediction import Prediction
from compile_cache.serving.kinds import Case
from compile_cache.serving.region import Region
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.storage.ledger import Ledger

BACKGROUND = Settings(cold_start="background", unseen="background")
FILLING = Settings(cold_start="block", unseen="background", setup_budget_s=0)
# A boot and two predictions: what each region's step was at READY, what waited, and what served.
PREDICTIONS = """
import json, sys
import compile_cache
with compile_cache.boot("model") as boot:
    import torch
    from blocks import SIZE, Product
    class Once(Product): ...
    torch.manual_seed(0)
    once, step = Once().eval(), Product().eval()
    with boot.importing():
        pass
    boot.compile(once, whole=True, after_ready=True)
    boot.compile(step, whole=True)
    def predict():
        with torch.inference_mode():
            return once(step(step(torch.ones(4, SIZE))))
    boot.warm_up(predict)
told = {"steps": {region.name: region.step for region in boot.report.regions}}
if "--leave" not in sys.argv:
    told["is_compiled"] = boot.wait_compiled(60)
    with boot.prediction() as prediction:
        predict()
    told["served"] = prediction.metrics()["compile_cache.served"]
    boot.wait_published(60)
told["is_warm"] = boot.report.fully_precompiled
print(json.dumps(told))
"""


class Once(Product):
    """Called once in a prediction."""


class Step(Product):
    """Called in each step of a prediction."""


Modules = tuple[Once, Once, Step]


def call(modules: Modules) -> None:
    """A prediction's calls. Their answers are eager's."""
    *once, step = modules
    with torch.inference_mode():
        for module in (*once, step, step):
            torch.testing.assert_close(module(tensor()), eager(build(Product), tensor()))


def predict(compiler: Regions, modules: Modules) -> tuple[dict[str, int], bool]:
    """What served one prediction's calls of Once, and whether it had new code."""
    with Prediction(BootReport(), compiler) as prediction:
        call(modules)
    return dict(prediction.served()["Once"]), prediction.has_new_code


def next_boot(
    cache: CacheDirectory, settings: Settings = BACKGROUND, is_hit: bool = True, late: int = 2, warms_up: bool = True
) -> tuple[Regions, Modules]:
    """A boot, after its warm-up if it `warms_up`. READY does not need the first `late` modules."""
    torch._dynamo.reset()
    compiler = Regions(settings, cache, is_hit)
    if loading := compiler.supply.preload():
        loading.join()
    modules = build(Once), build(Once), build(Step)
    for number, module in enumerate(modules):
        compiler.compile(module, after_ready=number < late)
    if warms_up:
        warm_up(compiler, lambda: call(modules))
    return compiler, modules


def steps(compiler: Regions) -> dict[str, str]:
    return {report.name: report.step for report in compiler.reports}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a boot that compiled all before READY."""
    with activated(tmp_path_factory.mktemp("compiled")) as directory:
        compiler, _ = next_boot(directory, FILLING, is_hit=False)
        assert steps(compiler)["Once"] == "precompiled"
        assert compiler.supply.waiting == 0
        yield directory


def test_what_is_needed_after_ready_is_loaded_then_and_serves_whole_predictions(restart):
    compiler, modules = next_boot(restart)
    assert steps(compiler) == {"Once": "late", "Step": "precompiled"}
    assert compiler.supply.waiting == 1
    assert not compiler.supply.wait(0.0)
    assert predict(compiler, modules) == ({"eager": 2}, False)
    with Prediction(BootReport(), compiler) as prediction:
        call(modules)
        finish(compiler)
        call(modules)
    assert compiler.supply.waiting == 0
    assert prediction.served()["Once"] == {"eager": 4}
    assert predict(compiler, modules) == ({"precompiled": 2}, True)
    assert predict(compiler, modules) == ({"precompiled": 2}, False)
    assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}


def test_calls_that_wait_for_several_functions_get_them_at_one_moment(restart, monkeypatch):
    """A predictor with recorded calls records once."""
    for mark in restart.path.rglob("*.compared"):
        mark.rename(mark.with_suffix(".late"))
    compiler, modules = next_boot(restart, late=3)
    assert set(steps(compiler).values()) == {"late"}
    meanwhile = []
    monkeypatch.setattr(compiler.supply, "_wait_for_gap", lambda _: meanwhile.append(predict(compiler, modules)))
    finish(compiler)
    assert meanwhile == [({"eager": 2}, False)] * 2
    assert [predict(compiler, modules) for _ in "12"] == [({"precompiled": 2}, True), ({"precompiled": 2}, False)]


def test_what_another_version_compared_is_compared_before_it_serves(restart):
    compiler, modules = next_boot(restart, is_hit=False)
    assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}, "nobody said what can be loaded later"
    for mark in [*restart.path.rglob("*.late"), *restart.path.rglob("*.compared")]:
        mark.unlink()
    compiler = Regions(BACKGROUND, restart)
    for module in modules:
        compiler.compile(module, after_ready=True)
    warm_up(compiler, lambda: call(modules))
    assert steps(compiler) == {"Once": "late", "Step": "late"}
    finish(compiler)
    assert predict(compiler, modules)[0] == {"eager": 2}
    assert predict(compiler, modules)[0] == {"precompiled": 2}
    assert compiler.reports[0].relative_error is not None


def test_a_process_of_one_answer_compiles_it_only_if_the_rest_is_stored(restart, tmp_path):
    settings = Settings(cold_start="block", unseen="eager")  # without a setup budget
    with activated(tmp_path / "empty") as directory:
        compiler, modules = next_boot(directory, settings, is_hit=False)
        assert steps(compiler) == {"Once": "eager", "Step": "precompiled"}
        assert "what is needed first" in compiler.reports[0].reason
        assert predict(compiler, modules)[0] == {"eager": 2}
        compiler, modules = next_boot(directory, settings, is_hit=False, late=3)
        assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}, "there is nothing else"
    for mark in restart.path.rglob("*.late"):
        mark.with_name(mark.name.partition(".")[0] + ".aot").unlink()
    compiler, _ = next_boot(restart, settings)
    assert (compiler.reports[0].made, compiler.supply.waiting) == (1, 0)


def test_nothing_is_late_if_calls_without_code_are_not_ordered(restart):
    """All of it is preloaded then."""
    compiler, _ = next_boot(restart, Settings(cold_start="background", unseen="eager"), warms_up=False)
    assert len(compiler.supply.artifacts._known) == 2
    warm_up(compiler, lambda: call(tuple(region for kind in compiler.by_class.values() for region in kind.places)))
    assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}


def test_a_function_that_is_taken_during_a_call_is_asked_whether_it_fits_the_next_one(restart, monkeypatch):
    compiler, (one, other, _) = next_boot(restart)
    serve, known = Region._serve_eager, compiler.supply.moment.known
    meanwhile = (monkeypatch.undo, lambda: finish(compiler), lambda: eager(other, tensor()))  # as another thread
    monkeypatch.setattr(Region, "_serve_eager", lambda *inputs: (serve(*inputs), *(call() for call in meanwhile))[0])
    known.clear()
    eager(one, tensor())
    assert not compiler.supply.moment.known.get(one), "so its guards are checked"


def test_predictions_at_the_same_time_have_one_code_each(restart):
    """Both find the code: the first one while the other's call of the same kind is answered eager."""
    compiler, modules = next_boot(restart)
    finish(compiler)
    served = compiler.by_class[Once].served
    with Prediction(BootReport(), compiler), Prediction(BootReport(), compiler):
        before = Counter(served)
        call(modules)
        call(modules)
        assert served - before == {"eager": 4}
    assert predict(compiler, modules)[0] == {"precompiled": 2}


def test_a_function_that_another_thread_has_found_serves_only_calls_that_it_fits(tmp_path, monkeypatch):
    def built(compiler: Regions) -> tuple[Inner, Inner]:
        modules = build(Inner, 1.0), build(Inner, 2.0)  # their functions differ by this number
        for module in modules:
            compiler.compile(module, after_ready=True)
        warm_up(compiler, lambda: [module(tensor()) for module in modules])
        return modules

    with activated(tmp_path) as directory:
        built(Regions(FILLING, directory))
        torch._dynamo.reset()
        compiler = Regions(BACKGROUND, directory, is_hit=True)
        one, two = built(compiler)
        finish(compiler)
        compiler.supply.moment.pass_by()
        claim, other = Case.claim, [one]

        def faster(case: Case, call: Call) -> bool:
            while other:  # this thread has looked its case up
                eager(other.pop(), tensor())
            return claim(case, call)

        monkeypatch.setattr(Case, "claim", faster)
        torch.testing.assert_close(eager(two, tensor()), eager(build(Inner, 2.0), tensor()))


def test_what_another_version_stored_is_published_though_nothing_calls_it_again(restart):
    for mark in restart.path.rglob("*.late"):
        mark.unlink()
    paths = {path.relative_to(restart.path).as_posix() for path in artifacts(restart)}
    restart.ledger = Ledger(restart.scan)
    restart.ledger.plant({path: path for path in paths})
    torch._dynamo.reset()
    compiler, modules = Regions(BACKGROUND, restart), (build(Once), build(Once), build(Step))
    for module in modules:
        compiler.compile(module, after_ready=True)
    warm_up(compiler, lambda: call(modules))
    assert paths <= restart.ledger.ready(is_ending=True).keys()


def test_if_nothing_can_be_loaded_on_a_thread_calls_load_it(restart, monkeypatch):
    compiler, modules = next_boot(restart)
    monkeypatch.setattr("compile_cache.serving.supply.end_at_exit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compiler.supply.release()
    assert compiler.supply.wait(0.0)
    assert predict(compiler, modules)[0] == {"precompiled": 2}


def test_a_module_that_ready_needs_after_all_is_not_late(restart):
    compiler, modules = next_boot(restart)
    compiler.compile(build(Once))
    warm_up(compiler, lambda: call(modules))
    assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}


def test_a_class_is_late_only_if_all_its_modules_are(restart):
    compiler, _ = next_boot(restart, late=1)
    assert steps(compiler) == {"Once": "precompiled", "Step": "precompiled"}


def test_late_functions_that_are_damaged_are_made_anew(restart):
    compiler, modules = next_boot(restart)
    for path in restart.path.rglob("*.late"):
        path.with_name(path.name.partition(".")[0] + ".aot").write_bytes(b"damaged")
    finish(compiler)
    assert predict(compiler, modules)[0] == {"eager": 2}
    assert compiler.supply.wait(60)
    assert predict(compiler, modules)[0]["eager"]
    assert predict(compiler, modules)[0] == {"precompiled": 2}


def test_calls_after_ready_wait_for_nothing(restart):
    """A warm-up of its own after READY, as by a model that is loaded later."""
    compiler, modules = next_boot(restart)
    finish(compiler)
    predict(compiler, modules)
    other = build(Once)
    compiler.compile(other, after_ready=True)
    warm_up(compiler, lambda: call((other, *modules[1:])))
    assert compiler.supply.waiting == 0
    assert predict(compiler, (other, *modules[1:]))[0] == {"precompiled": 2}


def test_a_fork_loads_what_it_needs(restart):
    compiler, modules = next_boot(restart)
    compiler.supply.order_nothing("a fork has no second process")
    call(modules)
    assert dict(compiler.by_class[Once].served) == {"eager": 2, "precompiled": 2}


def test_whole_boots_load_it_after_ready_and_an_exit_right_then_is_clean(tmp_path):
    environ = settings(tmp_path, cold_start="block", unseen="background")
    told = []
    for arguments in ((), (), ("--leave",)):
        done = run_boot(environ, PREDICTIONS, *arguments, program="run_source")
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout.splitlines()[-1]))
    first, second, third = told
    assert first["steps"] == {"Once": "precompiled", "Product": "precompiled"}
    assert second["steps"] == third["steps"] == {"Once": "late", "Product": "precompiled"}
    assert second["is_compiled"]
    assert second["served"] == {"Once": "precompiled", "Product": "precompiled"}
    assert second["is_warm"]
    assert third["is_warm"]


def test_the_mark_says_what_is_late(restart):
    late = {path.parent for path in restart.path.rglob("*.late")}
    assert len(late) == 1
    assert late < {path.parent for path in artifacts(restart)}


def test_a_request_loads_nothing_while_its_functions_are_to_be_loaded_beside_it(restart, monkeypatch):
    compiler, modules = next_boot(restart)
    gap = threading.Event()
    monkeypatch.setattr(compiler.supply, "_wait_for_gap", lambda _: gap.wait(60))
    compiler.supply.release()
    assert predict(compiler, modules) == ({"eager": 2}, False)
    gap.set()
    assert compiler.supply.wait(60)
    assert predict(compiler, modules) == ({"precompiled": 2}, True)
