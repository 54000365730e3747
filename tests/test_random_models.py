"""A pipeline with a U-Net and random weights, as the benchmarks build it: the tiny shape."""

from __future__ import annotations

import torch
from cog_server import PROJECT
from pipelines import SHAPES, build_pipeline, check_picture, networks, save

from models.image.pipeline import DiffusionModel, ImageInputs
from models.image.settings import ImageSettings, Size

TINY = SHAPES["tiny-sdxl"]


def test_saved_sdxl_pipeline_loads_with_its_weights_and_draws_with_guidance_and_without(tmp_path):
    written = build_pipeline(TINY, PROJECT / "demo/flux-digits", torch.device("cpu"))
    check_picture(written, TINY.checked_size)
    save(written, tmp_path, TINY.max_shard_size)
    model = DiffusionModel.load(str(tmp_path), None, ImageSettings(image_sizes=(Size(64, 64),)))
    for name, network in networks(written).items():
        loaded = networks(model._pipeline)[name].state_dict()
        assert all(torch.equal(loaded[key], value.float()) for key, value in network.state_dict().items()), name
    inputs = ImageInputs("a check", Size(64, 64), seed=0, num_inference_steps=2)
    assert len(model.run(inputs).getcolors(maxcolors=64 * 64)) > 1
    planned = [[inputs.guidance_scale for inputs in model.warm_up_inputs((), is_so)] for is_so in (False, True)]
    assert planned == [[None, 1.0], [None]]
