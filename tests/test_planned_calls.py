"""Calls of the warm-up whose code is on its way: eager, compiled on no request, and taken between two predictions."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import faulty_blocks
import pytest
import torch
from background_blocks import Wide
from blocks import Batched
from precompiling import (
    FIRST,
    SECOND,
    Token,
    artifacts,
    boot,
    build,
    eager,
    finish,
    only_report,
    prediction,
    tensor,
    warm_up,
)
from torch import nn
from toy_model import WideBlock

from compile_cache.background.orders import Order
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.prediction import Prediction
from compile_cache.serving.moment import Moment
from compile_cache.serving.regions import Regions
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory


def background(directory: CacheDirectory, *modules: nn.Module) -> Regions:
    """A boot whose second process has not begun: it begins at READY."""
    return boot(directory, *modules, settings=Settings(cold_start="background", unseen="background"))


def orders(compiler: Regions) -> list[Order]:
    """What waits for the second process."""
    backlog = compiler.supply.orders
    assert not isinstance(backlog, str)
    return [order for *_, order in sorted(backlog.queue._orders.queue)]


@pytest.mark.parametrize("cold_start", ["background", "block"])
def test_no_call_waits_for_the_compiler_once_the_setups_time_is_up(directory, cold_start):
    block = build(WideBlock)
    compiler = boot(directory, block, settings=Settings(cold_start=cold_start, unseen="background"))
    warm_up(compiler, lambda: block(tensor(4, 16)), until_s=0.0)
    prediction = Prediction(BootReport(), compiler)
    for rows in (4, 5):
        eager(block, tensor(rows, 16))
    told = prediction.metrics()
    assert told["compile_cache.served"] == {"WideBlock": "eager"}
    assert (told["compile_cache.compiled_now"], told["compile_cache.compiling"]) == (0, 2)
    finish(compiler)
    eager(block, tensor(5, 16))  # compares
    prediction.count_from_now()
    eager(block, tensor(5, 16))
    told = prediction.metrics()
    assert told["compile_cache.served"] == {"WideBlock": "precompiled"}
    assert (told["compile_cache.compiled_now"], told["compile_cache.compiling"]) == (0, 0)


def test_sizes_of_the_warm_up_get_code_of_their_own_and_those_met_later_share_one(directory):
    block = build(WideBlock)
    compiler = background(directory, block)
    warm_up(compiler, lambda: [block(tensor(count, 16)) for count in (3, 4, 5, 6)])
    assert [order.dynamic for order in orders(compiler)] == [()] * 4
    eager(block, tensor(7, 16))
    assert orders(compiler)[-1].dynamic == ((0, 0),)


def test_code_that_leaves_other_sizes_open_is_a_file_of_its_own(directory):
    block = build(Batched)
    compiler = background(directory, block)
    compiler.supply.release()
    for shape in ((2, 3), (2, 4), (2, 5), (3, 5), (4, 5), (5, 6)):
        for _ in range(2):
            eager(block, tensor(*shape, 16))
            assert compiler.supply.wait(600)
    assert len(artifacts(directory)) == only_report(compiler).made


def test_a_call_for_which_too_many_wait_is_ordered_once_they_are_made(directory, monkeypatch):
    monkeypatch.setattr("compile_cache.serving.supply.RECOMPILE_LIMIT", 2)
    block = build(WideBlock)
    compiler = background(directory, block)
    warm_up(compiler, lambda: [block(tensor(count, 16)) for count in (3, 4, 5, 5)])
    assert len(orders(compiler)) == 2
    finish(compiler)
    eager(block, tensor(5, 16))
    assert compiler.supply.wait(600)
    for count in (3, 4, 5, 3, 4, 5):
        eager(block, tensor(count, 16))
    assert dict(compiler.by_class[WideBlock].served) == {"eager": 8, "precompiled": 3}
    assert compiler.by_class[WideBlock].report.reason == ""


def test_new_code_is_taken_between_two_predictions(directory):
    good, bad = build(Wide), build(faulty_blocks.Cheating)
    compiler = background(directory, good, bad)
    expected = warm_up(compiler, lambda: [good(tensor(4, 16)), bad(tensor(4, 16))])
    moment, regions = compiler.supply.moment, compiler.by_class
    moment.begin(FIRST)
    finish(compiler)
    served = []
    for is_new in (False, True, True, False):
        if served:
            assert moment.begin(FIRST) == is_new
        torch.testing.assert_close([eager(good, tensor(4, 16)), eager(bad, tensor(4, 16))], expected)
        served.append(dict(regions[Wide].served))
        moment.end(FIRST, is_complete=True)
    assert served == [{"eager": 2}, {"eager": 3}, {"eager": 3, "precompiled": 1}, {"eager": 3, "precompiled": 2}]
    assert set(regions[faulty_blocks.Cheating].served) == {"eager"}


def test_a_prediction_that_overlaps_changes_no_code_and_one_that_was_broken_off_is_made_up_for():
    moment, taken = Moment(), []
    assert not moment.begin(FIRST)
    moment.defer(moment, lambda: taken.append(1))
    assert not moment.begin(SECOND)
    moment.pass_by()
    assert taken == []
    moment.end(FIRST, is_complete=True)
    moment.end(SECOND, is_complete=True)
    assert moment.begin(FIRST)
    assert taken == [1]
    moment.end(FIRST, is_complete=False)
    assert moment.begin(FIRST)


def test_a_prediction_that_a_cancel_breaks_off_while_it_begins_is_not_open_and_loses_no_change():
    """The cancel comes in the middle of a change, and again behind it."""
    moment, taken = Moment(), []
    cancels = iter([KeyboardInterrupt, None])

    def change() -> None:
        taken.append(1)
        if error := next(cancels, None):
            raise error

    moment.defer("code", change)
    moment.defer("other code", lambda: taken.append(2))
    with pytest.raises(KeyboardInterrupt):
        moment.begin(FIRST)
    assert not moment.open
    assert moment.begin(SECOND)
    assert taken == [1, 1, 2]


def test_a_prediction_that_is_gone_is_not_open():
    moment, token = Moment(), Token()
    moment.begin(token)
    del token
    assert not moment.open


def test_a_change_that_comes_too_early_is_made_at_a_later_moment():
    moment, are_new, tries = Moment(), [], iter([True, True, False])
    with prediction(moment):
        moment.defer(moment, lambda: next(tries))
    for _ in range(4):
        with prediction(moment) as is_new:
            are_new.append(is_new)
    assert are_new == [False, False, True, False]


def test_outside_predictions_what_is_known_of_calls_is_kept_while_a_change_is_too_early():
    moment, tries = Moment(), iter([True, True, False])
    moment.defer(moment, lambda: next(tries))
    known = moment.known
    for is_early in (True, True, False):
        moment.pass_by()
        assert (moment.known is known) is is_early


def test_a_change_that_is_noted_anew_while_it_is_made_is_made_at_the_next_moment():
    moment, taken = Moment(), list[str]()
    moment.defer("code", lambda: (taken.append("first"), moment.defer("code", lambda: taken.append("second")))[1])
    for expected in (["first"], ["first", "second"]):
        with prediction(moment):
            assert taken == expected


def test_a_change_that_fails_costs_no_other_change_and_no_prediction():
    moment, taken = Moment(), []
    for subject, change in (("a", lambda: 1 / 0), ("b", lambda: taken.append(1))):
        moment.defer(subject, change)
    assert moment.begin(FIRST)
    assert taken == [1]


def test_a_prediction_is_alone_until_another_one_is_open_whatever_arrives():
    moment = Moment()
    stays_alone = moment.stays_alone()
    moment.defer("code", lambda: None)
    assert stays_alone()
    for expected, token in ((True, FIRST), (False, SECOND)):
        moment.begin(token)
        with moment.alone() as is_alone:
            assert is_alone is expected
    assert not stays_alone()


def test_a_prediction_that_is_just_beginning_is_not_overlooked(monkeypatch):
    """Another thread asks while the changes are made."""
    monkeypatch.setattr("compile_cache.serving.moment._LONGEST_WAIT_S", -1.0)
    moment, asked = Moment(), []
    moment.begin(FIRST)
    with ThreadPoolExecutor() as threads:
        moment.defer("code", lambda: asked.append(threads.submit(moment.stays_alone)) or bool(wait(asked, 0.2)))
        moment.begin(SECOND)
        assert not asked[0].result()()


def test_the_report_says_why_code_does_not_fit(directory, monkeypatch):
    """The second process does not know what the server has changed."""
    monkeypatch.setattr(faulty_blocks, "IS_DOUBLED", True)
    block = build(faulty_blocks.Flagged)
    compiler = background(directory, block)
    expected = warm_up(compiler, lambda: block(tensor(4, 16)))
    compiler.supply.release()
    for _ in range(4):
        assert compiler.supply.wait(600)
        torch.testing.assert_close(eager(block, tensor(4, 16)), expected)
    assert compiler.supply.waiting == 0
    report = only_report(compiler)
    assert (report.made, report.step) == (0, "eager")
    assert "IS_DOUBLED" in report.reason


def test_the_warm_ups_calls_are_compiled_first(directory):
    first, second = build(Wide), build(faulty_blocks.Flagged)
    compiler = background(directory, first, second)
    warm_up(compiler, lambda: second(tensor(4, 16)))
    eager(first, tensor(4, 16))
    assert [order.name.split()[0] for order in orders(compiler)] == ["Flagged", "Wide"]


def test_what_waits_for_an_ending_waits_for_the_last_prediction_that_is_open():
    moment, made = Moment(), list[str]()
    moment.begin(FIRST)
    moment.begin(SECOND)
    moment.at_end("a function", lambda: made.append("marked"))
    moment.end(FIRST, is_complete=True)
    assert made == []
    moment.end(SECOND, is_complete=True)
    assert made == ["marked"]


def test_what_a_call_outside_predictions_waits_for_is_no_predictions_ending():
    moment, made = Moment(), list[str]()
    moment.at_end("a function", lambda: made.append("marked"))
    with prediction(moment):
        pass
    assert made == []


@pytest.mark.parametrize(("error", "made"), [(None, ["marked"]), (ValueError("of the model"), [])])
def test_a_prediction_that_raises_is_no_whole_one(directory, error, made):
    compiler, marked = background(directory), list[str]()
    prediction = Prediction(BootReport(), compiler)
    prediction.__enter__()
    compiler.supply.moment.at_end("a function", lambda: marked.append("marked"))
    prediction.__exit__(error and type(error), error, None)
    assert marked == made


def test_code_that_is_noted_again_waits_no_longer_under_steady_overlap(monkeypatch):
    moment, taken, now = Moment(), list[str](), [0.0]
    monkeypatch.setattr("compile_cache.serving.moment.time", SimpleNamespace(monotonic=lambda: now[0]))
    moment.begin(FIRST)
    for now[0], what in ((0.0, "one instance"), (9.0, "another")):
        moment.defer("code", lambda what=what: taken.append(what))
    now[0] = 11.0
    moment.begin(SECOND)  # while the first one is open
    assert taken == ["another"]
