"""The demo image model in a Cog server with an empty store: READY at once, compiled after it, then restored."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from cog_server import files
from demo_servers import Demo, DemoTests, metrics, serving
from PIL import Image

SKETCH = {"prompt": "a handwritten seven", "seed": 7, "num_inference_steps": 2, "output_format": "png"}
# A pixel of 8 bits, where two sums of floats fall on different sides of a half.
ROUNDING = 1
# The warm-up makes no call of the second request's size.
DEMO = Demo(
    "predict.py:Predictor",
    {"MODEL": "demo/flux-digits", "IMAGE_SIZES": "64x64,96x64", "WARM_UP_SIZES": "64x64"},
    ({**SKETCH, "width": 64, "height": 64}, {**SKETCH, "width": 96, "height": 64}),
)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("image") / "first.log", DEMO, until_compiled=True) as served:
        pass
    return served


@pytest.fixture(scope="module")
def restored(first):
    with serving(first.server.log.with_name("restored.log"), DEMO) as served:
        yield served


class TestBothBoots(DemoTests):
    """See there."""


def pixels(prediction: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(files(prediction)[0])).convert("RGB"), dtype=np.int16)


def test_no_picture_changes_by_more_than_rounding_at_the_swap_and_in_the_next_boot(first, restored):
    for before, after in zip(first.answers, restored.answers, strict=True):
        eager, *later = map(pixels, before + after)
        assert eager.max() > eager.min()
        assert all(abs(picture - eager).max() <= ROUNDING for picture in later)


def test_a_size_that_was_not_warmed_up_is_eager_at_once_and_compiled_meanwhile(first):
    told = metrics(first.answers[1][0])
    assert set(told["served"].values()) == {"eager"}
    assert told["compiling"] > 0
