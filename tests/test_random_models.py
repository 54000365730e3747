"""The benchmarks' models with random weights: the tiny shapes, which are built as the large ones are."""

from __future__ import annotations

import llama
import pytest
import torch
from cog_server import PROJECT
from pipelines import SHAPES, build_pipeline, check_picture, networks, save
from transformers import AutoTokenizer

from models.image.pipeline import DiffusionModel, ImageInputs
from models.image.settings import Size
from models.text.generation import Request
from models.text.model import TextInputs, TextModel
from models.text.sampling import Sampling
from models.text.settings import TextSettings

TINY = SHAPES["tiny-sdxl"]


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdxl")
    pipeline = build_pipeline(TINY, PROJECT / "demo/flux-digits", torch.device("cpu"))
    check_picture(pipeline, TINY.checked_size)
    save(pipeline, folder, TINY.max_shard_size)
    return pipeline, folder


def test_saved_sdxl_pipeline_loads_with_its_weights_and_draws_with_guidance_and_without(sdxl):
    written, folder = sdxl
    model = DiffusionModel.load(str(folder), None, [Size(64, 64)])
    for name, network in networks(written).items():
        loaded = networks(model._pipeline)[name].state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in network.state_dict().items()), name
    inputs = ImageInputs("a check", Size(64, 64), seed=0, num_inference_steps=2)
    assert len(model.run(inputs).getcolors(maxcolors=64 * 64)) > 1
    assert [inputs.guidance_scale for inputs in model.warm_up_inputs()] == [None, 1.0]


def test_sdxl_has_blocks_of_two_widths(sdxl):
    pipeline, _ = sdxl
    blocks = [part for part in pipeline.unet.modules() if type(part).__name__ in pipeline.unet._repeated_blocks]
    assert {block.norm1.normalized_shape[0] for block in blocks} == set(TINY.network["block_out_channels"][1:])


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    llama.write(llama.TINY, folder)
    return str(folder)


@pytest.fixture(scope="module")
def llama_model(llama_folder):
    return TextModel.load(llama_folder, None, TextSettings(cache_tokens=64, prompt_buckets=(32,)))


PROMPT = llama.make_prompt(llama.TINY["vocab_size"], 16)


def test_a_step_repeated_at_the_same_position_gives_the_same(llama_model):
    tokens = llama_model.run(Request(PROMPT, 4))
    with torch.inference_mode():
        token = torch.tensor([[tokens[-1]]])
        assert torch.equal(llama_model.generator.decode(token), llama_model.generator.decode(token))


def test_llamas_tokenizer_has_a_word_for_each_token_of_the_model(llama_folder, llama_model):
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    assert len(tokenizer) == llama.TINY["vocab_size"]
    assert llama_model.request(TextInputs(llama.text_of(PROMPT))).prompt == PROMPT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_of_a_random_llama_is_streamed_as_text_and_none_ends_it(llama_model, temperature):
    answer = llama_model.answer(TextInputs(llama.text_of(PROMPT), max_new_tokens=48, temperature=temperature))
    pieces = list(answer)
    assert len(pieces) == answer.new_tokens == 48
    request = Request(PROMPT, 48, Sampling(temperature, top_k=50))
    assert "".join(pieces).strip() == llama.text_of(llama_model.run(request))
