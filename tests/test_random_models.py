"""The benchmarks' models with random weights: the tiny shapes, which are built as the large ones are."""

from __future__ import annotations

import llama
import pytest
import sdxl_shape
import torch
from cog_server import PROJECT
from random_pipeline import check_picture, networks, save

from models.diffusion import DiffusionModel, ImageInputs
from models.sizes import Size


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl")
    pipeline = sdxl_shape.build_pipeline(sdxl_shape.TINY, PROJECT / "demo/flux-digits", torch.device("cpu"))
    check_picture(pipeline, sdxl_shape.TINY.checked_size)
    save(pipeline, folder, sdxl_shape.TINY.max_shard_size)
    return pipeline, folder


def test_saved_sdxl_pipeline_loads_with_its_weights_and_draws(sdxl):
    written, folder = sdxl
    model = DiffusionModel.load(str(folder), None, [Size(64, 64)])
    for name, network in networks(written).items():
        loaded = networks(model._pipeline)[name].state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in network.state_dict().items()), name
    inputs = ImageInputs("a check", Size(64, 64), seed=0, num_inference_steps=2)
    assert len(model.run(inputs).getcolors(maxcolors=64 * 64)) > 1


def test_sdxl_warm_up_draws_with_guidance_and_without(sdxl):
    _, folder = sdxl
    model = DiffusionModel.load(str(folder), None, [Size(64, 64)])
    assert [inputs.guidance_scale for inputs in model.warm_up_inputs()] == [None, 1.0]


def test_sdxl_has_blocks_of_two_widths(sdxl):
    pipeline, _ = sdxl
    blocks = [part for part in pipeline.unet.modules() if type(part).__name__ in pipeline.unet._repeated_blocks]
    assert {block.norm1.normalized_shape[0] for block in blocks} == set(sdxl_shape.TINY.unet["block_out_channels"][1:])


@pytest.fixture(scope="module")
def llama_step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama.write(llama.TINY, folder)
    return llama.DecodeStep(llama.load(str(folder)))


def test_decoding_with_the_cache_finds_what_a_forward_without_one_finds(llama_step):
    prompt = llama.make_prompt(llama.TINY["vocab_size"], 16)
    first = llama_step.prefill(prompt)
    decoded = llama_step.decode(first, 16, 8)
    with torch.inference_mode():
        logits = llama_step.model(torch.cat([prompt, first, decoded], dim=1), use_cache=False).logits
    assert torch.equal(logits[:, 15:-1].argmax(dim=-1), torch.cat([first, decoded], dim=1))


def test_a_step_repeated_at_the_same_position_gives_the_same(llama_step):
    prompt = llama.make_prompt(llama.TINY["vocab_size"], 16)
    token, position = llama_step.prefill(prompt), torch.tensor([16])
    with torch.inference_mode():
        assert torch.equal(llama_step(token, position), llama_step(token, position))
