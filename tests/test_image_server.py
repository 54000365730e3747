"""The demo image model in a real Cog server: compiled while it serves, then restored, drawing what it is asked for."""

from __future__ import annotations

import base64
import io
import shutil
from typing import Any

import numpy as np
import pytest
from cog_server import files
from demo_servers import Demo, DemoTests, metrics
from families import LORA
from PIL import Image, ImageChops, ImageStat
from read_digits import DIGIT_WORDS, share_read

pytest_plugins = ["demo_servers"]  # its fixtures

SKETCH = {
    "prompt": "a handwritten seven",
    "seed": 7,
    "num_inference_steps": 1,
    "go_fast": False,
    "output_format": "png",
}
# Square, which is not the first size, but the one that is warmed up.
PICTURE = {**SKETCH, "num_inference_steps": 4, "aspect_ratio": "1:1"}
# A pixel of 8 bits, where two sums of floats fall on different sides of a half.
ROUNDING = 1
DEMO = Demo(
    "predict.py:Predictor",
    {
        "MODEL": "demo/flux-digits",
        "IMAGE_SIZES": "96x64,64x64,64x96",
        "WARM_UP_SIZES": "64x64",
        "LORA_LOCAL": str(LORA.parent),
    },
    (PICTURE,),
)


@pytest.fixture
def drawn(restored) -> dict[str, Any]:
    """The answer to `PICTURE`."""
    return restored.answers[0][0]


def picture(answer: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(files(answer)[0]))


def pixels(answer: dict[str, Any]) -> np.ndarray:
    return np.asarray(picture(answer).convert("RGB"), dtype=np.int16)


class TestBothBoots(DemoTests):
    """See there."""


def test_no_picture_changes_by_more_than_rounding_at_the_swap_and_in_the_next_boot(first, restored):
    for before, after in zip(first.answers, restored.answers, strict=True):
        eager, *later = map(pixels, before + after)
        assert eager.max() > eager.min()
        assert all(abs(picture - eager).max() <= ROUNDING for picture in later)


def test_compiled_model_draws_the_digits_it_is_asked_for(server):
    answers = [server.predict(**{**PICTURE, "prompt": f"a handwritten {word}"}) for word in DIGIT_WORDS]
    assert share_read(list(map(picture, answers)), list(range(10))) >= 0.9


def test_aspect_ratio_and_exact_size_choose_the_bucket(server, drawn):
    assert picture(drawn).size == (64, 64)
    assert picture(server.predict(**SKETCH, width=64, height=64)).size == (64, 64)


def test_negative_prompt_changes_the_picture(server, drawn):
    steered = server.predict(**PICTURE, negative_prompt="a handwritten one", guidance_scale=2.0)
    assert steered["status"] == "succeeded"
    assert files(steered) != files(drawn)


def test_a_request_that_the_model_cannot_draw_fast_says_how_it_runs(server):
    assert (
        "go_fast=true is not available: this model runs with GO_FAST=off"
        in server.predict(**{**PICTURE, "go_fast": True})["error"]
    )
    default = {name: value for name, value in PICTURE.items() if name != "go_fast"}
    assert server.predict(**default)["status"] == "succeeded"


def test_a_strength_near_0_keeps_the_image_and_the_server(server, drawn):
    start = "data:image/png;base64," + base64.b64encode(files(drawn)[0]).decode()
    answer = server.predict(**PICTURE, image=start, prompt_strength=1e-9)
    assert answer["status"] == "succeeded"
    difference = ImageChops.difference(picture(answer).convert("RGB"), picture(drawn).convert("RGB"))
    assert ImageStat.Stat(difference).mean[0] < 20


def test_a_path_names_a_lora_below_the_local_folders_alone(server, drawn, tmp_path):
    assert files(server.predict(**PICTURE, lora_weights=str(LORA))) != files(drawn)
    outside = server.predict(**PICTURE, lora_weights=str(shutil.copy(LORA, tmp_path)))
    assert "in a folder of LORA_LOCAL" in outside["error"]


def test_omitted_seed_is_random_and_reported(server):
    answer = server.predict(**{name: value for name, value in PICTURE.items() if name != "seed"})
    assert f"seed: {answer['metrics']['seed']}" in answer["logs"]
    assert answer["metrics"]["seed"] != PICTURE["seed"]


def test_prediction_logs_its_steps(drawn):
    assert "4/4" in drawn["logs"]


@pytest.mark.parametrize(
    ("inputs", "file_format"),
    [({"output_format": "webp", "output_quality": 50}, "WEBP"), ({"output_format": "jpg"}, "JPEG"), ({}, "PNG")],
)
def test_output_format_is_the_one_asked_for(server, inputs, file_format):
    assert picture(server.predict(**{**PICTURE, **inputs})).format == file_format


def test_integers_may_be_written_with_a_point(server):
    """By Cog's schema, 7.0 is one."""
    given = {**SKETCH, "width": 64, "height": 64, "num_outputs": 2, "output_format": "webp", "output_quality": 70}
    with_points = {name: float(value) if type(value) is int else value for name, value in given.items()}
    assert files(server.predict(**with_points)) == files(server.predict(**given))


def test_several_outputs_count_up_from_the_seed(server, drawn):
    one, two = files(server.predict(**PICTURE, num_outputs=2))
    assert one == files(drawn)[0]
    assert two != one


def test_a_size_that_was_not_warmed_up_is_eager_at_once_and_ordered(server):
    """Comes last: the server ends before the second process has taken CPU from other tests."""
    answer = server.predict(**SKETCH, width=96, height=64)
    assert picture(answer).size == (96, 64)
    assert set(metrics(answer)["served"].values()) == {"eager"}
    assert metrics(answer)["compiling"] > 0
