"""go_fast on the demo model, and which layers of other architectures it takes."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from precompiling import boot, build, eager, only_report, tensor, warm_up
from read_digits import DIGIT_WORDS, share_read
from test_lora import write
from torch import nn

from models.image.go_fast import FastLinear, fast_copy, make_fast
from models.image.inputs import ImageInputs
from models.image.lora_files import Lora, LoraError
from models.image.pipeline import DiffusionModel
from models.image.settings import ImageSettings
from models.image.sizes import Size
from models.kernels.float8 import scaled_linear, to_float8, to_float8_at_once

DEMO = Path(__file__).parent.parent / "demo" / "flux-digits"
SEVEN = ImageInputs("a handwritten seven", Size(64, 64), seed=7, num_inference_steps=4, shows_progress=False)
QUERY = "transformer_blocks.0.attn.to_q"


@functools.cache
def load(go_fast: str) -> DiffusionModel:
    """The demo model with this setting, the same one for all tests."""
    return DiffusionModel.load(str(DEMO), None, ImageSettings(image_sizes=(SEVEN.size,), go_fast=go_fast))


@pytest.fixture
def model() -> DiffusionModel:
    return load("on")


def fast_tensors(model: DiffusionModel) -> dict[str, torch.Tensor]:
    layers = {name: part for name, part in model.denoisers[True].named_modules() if isinstance(part, FastLinear)}
    return {
        f"{name}.{part}": getattr(layer, part).clone() for name, layer in layers.items() for part in ("weight", "scale")
    }


def test_digits_are_read_as_they_were_asked_for():
    model = load("only")
    digits = [digit for digit in range(10) for _ in range(2)]
    pictures = [
        model.run(replace(SEVEN, prompt=f"a handwritten {DIGIT_WORDS[digit]}", seed=seed, go_fast=True))
        for seed, digit in enumerate(digits)
    ]
    assert share_read(pictures, digits) >= 0.95


def test_both_networks_draw_in_one_process_and_share_all_other_weights(model):
    plain, fast = model.run(SEVEN), model.run(replace(SEVEN, go_fast=True))
    assert plain.tobytes() == load("off").run(SEVEN).tobytes()
    assert fast.tobytes() == load("only").run(replace(SEVEN, go_fast=True)).tobytes() != plain.tobytes()
    others = {id(weight) for weight in model.denoiser.parameters()}
    own = [name for name, weight in model.denoisers[True].named_parameters() if id(weight) not in others]
    assert sorted(own) == sorted(fast_tensors(model))


def test_the_fast_network_follows_a_lora_and_goes_back_to_the_bit(model, tmp_path):
    before, lora = fast_tensors(model), write(tmp_path, model._pipeline, QUERY)
    model.loras.use([Lora(lora, 1.0)])
    merged = fast_tensors(model)
    fast, _ = fast_copy(model.denoiser)
    expected = dict(fast.named_parameters())
    changed = [name for name, value in merged.items() if not torch.equal(value, before[name])]
    assert sorted(changed) == [f"{QUERY}.scale", f"{QUERY}.weight"]
    assert all(torch.equal(value, expected[name]) for name, value in merged.items())
    model.loras.use([])
    assert all(torch.equal(value, before[name]) for name, value in fast_tensors(model).items())


def test_a_fast_network_alone_takes_no_lora(tmp_path, model):
    with pytest.raises(LoraError, match=f"{QUERY} is quantized"):
        load("only").loras.use([Lora(write(tmp_path, model._pipeline, QUERY), 1.0)])


def test_both_networks_are_compiled_and_warmed_up(model):
    assert [network for network, _ in model.networks()] == [model.denoiser, model.denoisers[True]]
    assert [inputs.go_fast for inputs in model.warm_up_inputs()] == [False, True]


def test_requests_choose_what_the_setting_allows():
    off, on, only = (load(go_fast) for go_fast in ("off", "on", "only"))
    assert [off.chooses_fast(None), on.chooses_fast(None), on.chooses_fast(False)] == [False, True, False]
    for model, asked, setting in ((off, True, "off"), (only, False, "only")):
        with pytest.raises(ValueError, match=f"GO_FAST={setting}"):
            model.chooses_fast(asked)


NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "FLUX": (diffusers.FluxTransformer2DModel, {"num_layers": 1, "num_single_layers": 1}),
    "SD 3": (diffusers.SD3Transformer2DModel, {"num_layers": 2}),
    "Qwen-Image": (diffusers.QwenImageTransformer2DModel, {"num_layers": 1}),
    "Chroma": (diffusers.ChromaTransformer2DModel, {"num_layers": 1, "num_single_layers": 1}),
    "Z-Image": (diffusers.ZImageTransformer2DModel, {"n_layers": 1, "n_refiner_layers": 1}),
    "Stable Diffusion": (diffusers.UNet2DConditionModel, {}),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_layers_of_every_token_in_blocks_are_taken_and_no_others(name):
    kind, sizes = NETWORKS[name]
    with torch.device("meta"):
        network = kind(**sizes)
        linear = {name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
        taken = set(make_fast(network))
    attention = {name for name in linear if name.endswith(("to_q", "to_k", "to_v", "to_out.0"))}
    assert attention <= taken < linear
    assert len(taken) > len(attention), "and those of the feed-forward parts"
    assert not [name for name in taken if "norm" in name or "_mod" in name or "emb" in name or "guidance" in name]


def test_a_network_without_such_layers_says_so():
    with pytest.raises(ValueError, match="no linear layers in blocks of Sequential"):
        make_fast(nn.Sequential(nn.Conv2d(3, 3, 3)))


def test_layers_that_share_a_weight_both_follow_it():
    block = nn.Module()
    block.a, block.b = nn.Linear(32, 32), nn.Linear(32, 32)
    block.b.weight = block.a.weight
    fast, layers = fast_copy(nn.ModuleList([block]))
    assert layers == {block.a.weight: [fast.get_submodule("0.a"), fast.get_submodule("0.b")]}


def test_rows_that_are_columns_of_the_input_are_multiplied():
    layer = nn.Linear(64, 48)
    fast = make_fast(nn.ModuleList([nn.ModuleList([layer])]))["0.0"]
    columns = torch.randn(1, 64, 24)
    with torch.inference_mode():
        expected = fast(columns.transpose(1, 2).contiguous())
        assert torch.equal(fast(columns.transpose(1, 2)), expected)
        torch.testing.assert_close(torch.compile(fast)(columns.transpose(1, 2)), expected)


def test_a_block_and_its_fast_copy_are_precompiled_and_found_by_the_next_boot(directory):
    rows = tensor(4, 32)
    for loaded in (0, 2):
        block = build(nn.Sequential, nn.Linear(32, 32), nn.Linear(32, 16)).requires_grad_(False)
        fast = fast_copy(nn.ModuleList([block]))[0].get_submodule("0")
        expected = [eager(one, rows) for one in (block, fast)]
        assert not torch.equal(*expected)
        compiler = boot(directory, block, fast)
        answers = warm_up(compiler, lambda both=(block, fast): [one(rows) for one in both])
        torch.testing.assert_close(answers, expected)
        report = only_report(compiler)
        assert (report.step, report.loaded, report.made) == ("precompiled", loaded, 2 - loaded)
        torch.testing.assert_close([eager(one, rows) for one in (block, fast)], expected)
        assert compiler.by_class[nn.Sequential].served["precompiled"] == 2


def test_each_row_has_a_scale_of_its_own():
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    rows[5] = 0
    values, scales = to_float8(rows)
    error = (values.float() * scales - rows).abs().amax(1)
    assert (error <= rows.abs().amax(1) / 16).all(), "half of the largest step of float8"
    assert not error[5]


def test_a_product_is_that_of_the_quantized_rows():
    generator = torch.Generator().manual_seed(0)
    inputs, bias = torch.randn(2, 24, 64, generator=generator), torch.randn(48, generator=generator)
    weight, scale = to_float8(torch.randn(48, 64, generator=generator))
    rows, scales = to_float8(inputs.view(-1, 64))
    expected = (rows.float() * scales) @ (weight.float() * scale).t() + bias
    found = scaled_linear(inputs, weight, scale.t(), bias)
    torch.testing.assert_close(found, expected.view(2, 24, 48), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [48, 3072, 15360])
def test_one_kernel_converts_as_torch_does(columns):
    rows = torch.randn(65, columns, device="cuda", dtype=torch.bfloat16)
    rows[7] = 0
    values, scales = to_float8_at_once(rows)
    expected, expected_scales = to_float8(rows)
    torch.testing.assert_close(scales, expected_scales)
    assert (values.float() != expected.float()).float().mean() < 1e-3, "the last bit of a division"
    torch.testing.assert_close(values.float(), expected.float(), rtol=0.13, atol=2**-9)
