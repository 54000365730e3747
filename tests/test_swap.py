"""Code that arrives for a module between two requests."""

from __future__ import annotations

import pytest
import torch
from precompiling import activated
from torch import nn
from torch._inductor import config

from compile_cache.regions.compiler import Compiler
from compile_cache.regions.counters import read_counts
from compile_cache.settings import Settings
from models.text.steps import prepare_process


def test_a_swap_compiles_nothing_in_the_servers_process(tmp_path):
    """The warm-up compiles what no other process can build; a request that swaps has a user who waits."""

    class Local(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x) + 1

    module, known, new = Local(), torch.randn(8, 8), torch.randn(4, 4)
    with activated(tmp_path) as directory:
        compiler = Compiler(Settings(cold_start="background", unseen="background"), directory)
        compiler.compile(module, whole=True, holds=True)
        with torch.inference_mode(), compiler.watching():
            module(known)
        assert read_counts().graphs > 0
        before = read_counts()
        with torch.inference_mode(), compiler.watching(may_compile=False):
            torch.testing.assert_close(module(new), torch.mm(new, new) + 1)
        assert read_counts().graphs == before.graphs
        assert compiler.reports[0].step == "eager"


@pytest.mark.skipif(torch.cuda.is_available(), reason="operators are joined on a GPU")
def test_preparing_the_compiling_process_leaves_options_as_the_servers_are_on_a_cpu():
    """Artifacts are found by their options: with another pass over graphs, the server would never find one."""
    prepare_process()
    assert config.post_grad_custom_pre_pass is None
