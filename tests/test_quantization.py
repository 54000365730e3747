"""Weights of 8 bits, in processes that have torchao: installed in the environment, it is imported in every process."""

from __future__ import annotations

from pathlib import Path

import pytest
from boots import python_path
from programs import run_program

PROJECT = Path(__file__).parent.parent
# Beside the virtual environment's own packages, where `make` puts it.
TORCHAO = PROJECT / ".venv" / "quantize"

pytestmark = pytest.mark.skipif(
    not TORCHAO.is_dir(), reason="torchao is not in .venv/quantize: make test puts it there"
)

_LOAD = """
from models.text.settings import TextSettings
from models.text.model import TextInputs, TextModel
settings = TextSettings(cache_tokens=64, prompt_buckets=(16,), quantize="{quantization}")
model = TextModel.load("demo/llama-adder", None, settings)
block = model.generator.decode.model.model.layers[0].mlp
"""


def run(quantization: str, script: str) -> list[str]:
    """What a script prints after the demo model was loaded and quantized."""
    path = python_path(TORCHAO, PROJECT, PROJECT / "demo")
    done = run_program(_LOAD.format(quantization=quantization) + script, folder=PROJECT, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_ADD = """
from sums import answer, prompt, unseen_sums
print(sum("".join(model.answer(TextInputs(prompt(a, b)))) == answer(a, b) for a, b in unseen_sums(80)))
print(*{weight.dtype for weight in block.down_proj.buffers()})
print(type(model.generator.decode.model.lm_head.weight).__name__)
"""
_PRECOMPILE = """
import torch
from compile_cache.inductor.function import compile_ahead
from compile_cache.inductor.function import Precompiled
from compile_cache.inductor.toolchain import configure_torch
configure_torch()
inputs = (torch.randn(1, 3, 128),)
with torch.inference_mode():
    loaded = Precompiled("", *compile_ahead(block, inputs, {}, "default", False, ""))
    print(repr(loaded.misfit(block, inputs, {})))
    print((loaded(block, inputs, {}) - block(*inputs)).abs().max().item() < 1e-5)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """What a process for each quantization printed; that of int8 precompiles a block as well."""
    return {"int8": run("int8", _ADD + _PRECOMPILE), "fp8": run("fp8", _ADD)}


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "torch.int8"), ("fp8", "torch.float8_e4m3fn")])
def test_a_quantized_model_adds_as_well(printed, quantization, dtype):
    """The speed mode's effect on quality, on the one task whose answers are known."""
    right, dtypes, output = printed[quantization][:3]
    assert int(right) >= 78
    assert dtype in dtypes
    assert output == "Parameter"


def test_quantized_weights_can_be_precompiled(printed):
    assert printed["int8"][3:] == ["''", "True"]
