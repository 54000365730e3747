"""Code that arrives for a module between two requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from precompiling import activated
from torch import nn
from torch._inductor import config

from compile_cache.regions.compiler import Compiler
from compile_cache.regions.counters import read_counts
from compile_cache.settings import Settings
from models.text.compiling import prepare_process

ROOT = Path(__file__).resolve().parents[1]
# A boot in the background, an answer, the swap, and another answer.
_SERVED = """
import json
import predict
from served import InProcess

predictor = predict.TextPredictor()
predictor.setup()
served = InProcess(predictor)
question = {"prompt": "1 + 2 =", "max_new_tokens": 4, "temperature": 0.0, "seed": 0}
answers = [served.answer(**question)]
assert predictor.boot.wait_compiled(400)
answers += [served.answer(**question), served.answer(**question)]
print(json.dumps([[one.sha256, one.regions, one.served, one.compiled_now] for one in answers]))
"""


def test_steps_of_a_language_model_that_the_second_process_has_made_serve_after_the_swap(tmp_path):
    """Also where transformers' registries, which the traced code reads, are filled by making a model alone."""
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "benchmarks", ROOT / "demo")),
        "MODEL": "demo/llama-adder",
        "CACHE_TOKENS": "64",
        "PROMPT_BUCKETS": "16",
        "COMPILE_CACHE_COLD_START": "background",
        "COMPILE_CACHE_STORE": str(tmp_path / "store"),
        "COMPILE_CACHE_DIR": str(tmp_path / "directory"),
    }
    ran = subprocess.run(
        [sys.executable, "-c", _SERVED], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    first, *later = json.loads(ran.stdout.splitlines()[-1])
    assert set(first[2].values()) == {"eager"}
    precompiled = dict.fromkeys(("Prefill", "DecodeStep"), "precompiled")
    assert later == [[first[0], precompiled, precompiled, 0]] * 2


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
