"""Weights of 8 bits, in processes that have torchao: installed in the environment, it is imported in every process."""

from __future__ import annotations

import os
import re

import pytest
from boots import run_boot
from cog_server import PROJECT

# Beside the virtual environment's own packages, where `make` puts it.
TORCHAO = PROJECT / ".venv" / "quantize"

pytestmark = pytest.mark.skipif(
    not TORCHAO.is_dir(), reason="torchao is not in .venv/quantize: make test puts it there"
)

# Prints what the demo model does with the weights of each kind, and precompiles a block with the first.
_ADD_AND_PRECOMPILE = """
import sys, torch
from compile_cache.inductor.function import Precompiled, compile_ahead
from compile_cache.inductor.toolchain import configure_torch
from models.text.settings import TextSettings
from models.text.model import TextInputs, TextModel
from sums import answer, prompt, unseen_sums
blocks = []
for quantization in ("int8", "fp8"):
    settings = TextSettings(cache_tokens=64, prompt_buckets=(16,), quantize=quantization)
    model = TextModel.load(sys.argv[1], None, settings)
    network = model.generator.decode.model
    blocks.append(network.model.layers[0].mlp)
    right = sum("".join(model.answer(TextInputs(prompt(a, b)))) == answer(a, b) for a, b in unseen_sums(80))
    print(right, {weight.dtype for weight in blocks[-1].down_proj.buffers()}, type(network.lm_head.weight).__name__)
configure_torch()
inputs = (torch.randn(1, 3, 128),)
with torch.inference_mode():
    loaded = Precompiled("", *compile_ahead((blocks[0], inputs, {}), "default", False, ""))
    print(repr(loaded.misfit((blocks[0], inputs, {}))))
    print((loaded(blocks[0], inputs, {}) - blocks[0](*inputs)).abs().max().item() < 1e-5)
"""


def test_quantized_models_add_as_well_and_can_be_precompiled():
    """The speed mode's effect on quality, on the one task whose answers are known."""
    model = str(PROJECT / "demo" / "llama-adder")
    done = run_boot(os.environ, _ADD_AND_PRECOMPILE, model, program="run_source", folder=TORCHAO)
    assert done.returncode == 0, done.stderr
    *added, misfit, is_near = done.stdout.splitlines()
    for line, dtype in zip(added, ("torch.int8", "torch.float8_e4m3fn"), strict=True):
        right, dtypes, output = re.fullmatch(r"(\d+) ({.*}) (\w+)", line).groups()
        assert int(right) >= 78
        assert dtype in dtypes
        assert output == "Parameter"
    assert (misfit, is_near) == ("''", "True")
