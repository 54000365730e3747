"""Calls of the warm-up whose code is on its way: eager, compiled on no request, and swapped when that is asked."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import flagged_block
import pytest
import torch
from precompiling import activated, boot, build, only_report, warm_up
from torch import nn
from toy_model import CheatingBlock, NormBlock, WideBlock

from compile_cache.background.order import Order
from compile_cache.errors import UnseenCallError
from compile_cache.regions.compiler import Compiler
from compile_cache.regions.counters import read_counts
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory

PATIENCE_S = 400.0


@pytest.fixture
def directory(tmp_path) -> Iterator[CacheDirectory]:
    with activated(tmp_path) as directory:
        yield directory


def rows(count: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.linspace(-1, 1, count * 16).view(count, 16)


def background(directory: CacheDirectory, *modules: nn.Module, unseen: str = "background") -> Compiler:
    """A boot whose second process has not begun: it begins at READY."""
    return boot(directory, *modules, settings=Settings(cold_start="background", unseen=unseen))


def predict(module: nn.Module, count: int) -> torch.Tensor:
    with torch.inference_mode():
        output: torch.Tensor = module(rows(count))
        return output


def orders(compiler: Compiler) -> list[Order]:
    """What waits for the second process."""
    backlog = compiler.backlog()
    assert backlog is not None
    return [pickle.loads(job.content) for job in backlog._jobs._queue]


def test_where_unseen_calls_are_errors_those_of_the_warm_up_are_not(directory):
    block = build(WideBlock)
    compiler = background(directory, block, unseen="error")
    warm_up(compiler, lambda: block(rows(4)))
    assert predict(block, 4).shape == (4, 16)
    with pytest.raises(UnseenCallError, match="5x16"):
        predict(block, 5)


@pytest.mark.parametrize("cold_start", ["background", "block"])
def test_where_unseen_calls_wait_for_the_compiler_those_of_the_warm_up_do_not(directory, cold_start):
    block = build(WideBlock)
    compiler = boot(directory, block, settings=Settings(cold_start=cold_start, unseen="block"))
    compiler.hurry(0.0)  # the setup's time is up
    warm_up(compiler, lambda: block(rows(4)))
    (region,) = compiler.regions.values()
    predict(block, 4)
    assert (region.served["compiled"], region.waited_s) == (0, 0)
    predict(block, 5)
    assert region.served["compiled"] == 1
    assert region.waited_s > 0


def test_sizes_of_the_warm_up_get_code_of_their_own_and_those_met_later_share_one(directory):
    block = build(WideBlock)
    compiler = background(directory, block)
    warm_up(compiler, lambda: [block(rows(count)) for count in (3, 4, 5, 6)])
    assert [order.dynamic for order in orders(compiler)] == [()] * 4
    predict(block, 7)
    assert orders(compiler)[-1].dynamic == ((0, 0),)


def test_what_arrives_serves_after_a_swap_and_a_swap_that_breaks_off_is_begun_again(directory):
    good, bad = build(NormBlock), build(CheatingBlock)
    compiler = background(directory)
    for block in (good, bad):
        compiler.compile(block, whole=True, holds=True)
    eager = warm_up(compiler, lambda: [good(rows(4)), bad(rows(4))])
    compiler.release()
    assert compiler.wait(PATIENCE_S)
    region = compiler.regions[NormBlock]
    with torch.inference_mode():
        predict(good, 4)
        assert region.served == {"eager": 2}
        assert not region.has_arrived(good, (rows(4),), {}), "nothing arrives but in a swap"
        graphs = read_counts().graphs
        assert compiler.begin_swap()
        assert compiler.begin_swap(), "the first one did not end"
        assert region.has_arrived(good, (rows(4),), {})
        with compiler.watching(may_compile=False):
            swapped = [good(rows(4)), bad(rows(4))]
        assert not region.has_arrived(good, (rows(4),), {})
        compiler.end_swap()
    assert not compiler.begin_swap()
    torch.testing.assert_close(swapped, eager)
    assert region.served == {"eager": 2, "precompiled": 1}
    assert set(compiler.regions[CheatingBlock].served) == {"eager"}
    assert read_counts().graphs == graphs, "no request compiles what arrived and was wrong"


def test_code_that_never_fits_is_made_twice_and_the_report_says_why(directory, monkeypatch):
    """The second process does not know what the server has changed: it makes the same code again."""
    monkeypatch.setattr(flagged_block, "IS_DOUBLED", True)
    block = build(flagged_block.FlaggedBlock)
    compiler = background(directory, block)
    eager = warm_up(compiler, lambda: block(rows(4)))
    compiler.release()
    for _ in range(4):
        assert compiler.wait(PATIENCE_S)
        torch.testing.assert_close(predict(block, 4), eager)
    assert compiler.waiting == 0
    report = only_report(compiler)
    assert (report.made, report.step) == (1, "eager")
    assert "IS_DOUBLED" in report.reason
