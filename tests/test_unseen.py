"""Calls that nothing is compiled for, in a boot that compiles before READY."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from precompiling import activated, boot, build, eager, only_report, tensor, warm_up
from torch import nn

from compile_cache.background import cold_start
from compile_cache.background.cold_start import resolve_cold_start
from compile_cache.regions.compiler import Compiler
from compile_cache.regions.counters import read_counts
from compile_cache.settings import Settings

BLOCK = Settings(cold_start="block", unseen="block")


class Product(nn.Module):
    """A matrix product, which compiles without a C++ compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(x, x, self.weight)


@pytest.fixture
def late(tmp_path):
    """A block, and a boot that had no time left to compile it in the setup."""
    with activated(tmp_path) as directory:
        block = build(Product)
        compiler = boot(directory, block, settings=BLOCK)
        compiler.hurry(time.monotonic())
        warm_up(compiler, lambda: block(tensor(4, 16)))
        yield block, compiler
        if backlog := compiler.backlog():
            backlog._jobs.close()


def answer(block: Product, rows: int) -> torch.Tensor:
    with torch.inference_mode():
        return block(tensor(rows, 16))


def served(compiler: Compiler) -> dict[str, int]:
    (region,) = compiler.regions.values()
    return dict(region.served)


def test_what_the_setup_had_no_time_for_is_compiled_for_no_request(late):
    block, compiler = late
    before = read_counts()
    torch.testing.assert_close(answer(block, 4), eager(build(Product), tensor(4, 16)))
    assert read_counts().since(before).graphs == 0
    assert served(compiler) == {"eager": 2}
    assert compiler.waiting == 1


def test_what_the_setup_had_no_time_for_is_precompiled_soon(late):
    block, compiler = late
    compiler.release()
    assert compiler.wait(600)
    torch.testing.assert_close(answer(block, 4), eager(build(Product), tensor(4, 16)))
    assert served(compiler) == {"eager": 1, "precompiled": 1}
    assert (only_report(compiler).step, only_report(compiler).waiting) == ("precompiled", 0)


def test_other_calls_of_a_late_boot_wait_for_the_compiler_as_told(late):
    block, compiler = late
    torch.testing.assert_close(answer(block, 5), eager(build(Product), tensor(5, 16)))
    assert served(compiler) == {"eager": 1, "compiled": 1}


def test_auto_blocks_where_nothing_may_be_compiled_ahead_of_time(monkeypatch):
    monkeypatch.setattr(cold_start, "_is_lasting_server", lambda: True)
    assert resolve_cold_start(Settings()).cold_start == "background"
    found = resolve_cold_start(replace(Settings(), precompile=False))
    assert (found.cold_start, found.unseen) == ("block", "block")
