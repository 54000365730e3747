"""Picture sizes and the model's settings: parsing, the native buckets, and the choice of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.image.settings import DEMO_MODEL, ImageSettings
from models.image.sizes import (
    ASPECT_RATIOS,
    Size,
    choose_size,
    native_sizes,
    nearest_size,
    offered_sizes,
    parse_sizes,
    sizes_of,
)

SIZES = (Size(1024, 1024), Size(1344, 768), Size(768, 1344))


@pytest.mark.parametrize("wrong", ["1024", "1024x", "x768", "0x64", "-64x64", "64X64", "64x64x64", "64 x 64", "a"])
def test_what_is_not_a_size_is_named_with_its_variable(wrong):
    with pytest.raises(ValueError, match="IMAGE_SIZES has ") as caught:
        parse_sizes("IMAGE_SIZES", f"512x512,{wrong}")
    assert repr(wrong) in str(caught.value)


@given(st.lists(st.builds(Size, st.integers(1, 10_000), st.integers(1, 10_000)), max_size=5).map(tuple))
def test_sizes_are_parsed_in_their_order(sizes):
    assert parse_sizes("IMAGE_SIZES", " ,".join(map(str, sizes))) == sizes


@given(st.integers(1, 4096))
def test_native_sizes_are_whole_steps_of_64_pixels_and_have_about_the_models_own_number_of_pixels(resolution):
    for size in native_sizes(resolution):
        assert size.width % 64 == size.height % 64 == 0
        assert min(size.width, size.height) >= 64
        assert not 512 <= resolution <= 2048 or size.width * size.height == pytest.approx(resolution**2, rel=0.25)


@pytest.mark.parametrize("resolution", [512, 768, 1024])
def test_there_is_a_native_size_for_each_aspect_ratio(resolution):
    sizes = native_sizes(resolution)
    assert (len(sizes), sizes[0]) == (len(ASPECT_RATIOS), Size(resolution, resolution))
    for aspect_ratio in ASPECT_RATIOS:
        size = choose_size(sizes, aspect_ratio, None, None)
        width, height = map(int, aspect_ratio.split(":"))
        assert size.width / size.height == pytest.approx(width / height, rel=0.05)


@pytest.mark.parametrize(
    ("aspect_ratio", "width", "height", "chosen"),
    [
        (None, None, None, SIZES[0]),
        (None, 768, 1344, Size(768, 1344)),
        ("1:1", 768, 1344, Size(768, 1344)),
        ("16:9", None, None, Size(1344, 768)),  # 7:4
    ],
)
def test_the_size_is_the_one_named_else_the_nearest_in_shape_else_the_first(aspect_ratio, width, height, chosen):
    assert choose_size(SIZES, aspect_ratio, width, height) == chosen


@pytest.mark.parametrize(
    ("aspect_ratio", "width", "height", "reason"),
    [
        (None, 1024, None, "both width and height"),
        (None, None, 1024, "both width and height"),
        (None, 1000, 1000, "is not available"),
        ("21:9", None, None, "is not available"),
    ],
)
def test_one_side_or_a_size_that_there_is_not_is_refused_with_those_that_there_are(aspect_ratio, width, height, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        choose_size(SIZES, aspect_ratio, width, height)
    assert "1024x1024, 1344x768, 768x1344" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ImageSettings(DEMO_MODEL, (), ())),
        ({"MODEL": "", "IMAGE_SIZES": "", "WARM_UP_SIZES": " ", "LORA_GB": "", "LORA_LOCAL": " ,"}, ImageSettings()),
        (
            {"MODEL": "org/name@main", "IMAGE_SIZES": "64x64,96x64", "WARM_UP_SIZES": "96x64", "GO_FAST": "On"},
            ImageSettings("org/name@main", (Size(64, 64), Size(96, 64)), (Size(96, 64),), go_fast="on"),
        ),
        (
            {"IMAGES": "2", "WARM_UP_SIZES": "all", "LORA_DIR": "/loras", "LORA_GB": "0.5", "LORA_LOCAL": "/a, b"},
            ImageSettings(
                warms_up_all=True, lora_folder="/loras", lora_bytes=500_000_000, local_loras=("/a", "b"), images=2
            ),
        ),
    ],
)
def test_variables_set_the_model_its_sizes_and_its_loras(environ, expected):
    assert ImageSettings.from_env(environ) == expected
    assert ImageSettings().lora_bytes == 20_000_000_000


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"IMAGE_SIZES": "64x64,96x64", "WARM_UP_SIZES": "64x64,32x32"}, "32x32, which is not in .*64x64, 96x64"),
        *(({"LORA_GB": wrong}, "") for wrong in ("0", "-1", "many", "1e3")),
        *(({"IMAGES": wrong}, f"is '{wrong}'; give 1 or 2") for wrong in ("0", "3", "two")),
        ({"GO_FAST": "maybe"}, "is 'maybe'; give one of off, on, only"),
    ],
    ids=str,
)
def test_a_value_that_a_variable_cannot_have_is_named_with_it(environ, reason):
    with pytest.raises(ValueError, match=f"{[*environ][-1]} .*{reason}"):
        ImageSettings.from_env(environ)


FEW = parse_sizes("IMAGE_SIZES", "64x64,128x128,96x64,64x96")


@pytest.mark.parametrize(
    ("sizes", "picture", "expected"),
    [
        *((FEW, *case) for case in (((80, 80), "64x64"), ((640, 660), "128x128"), ((300, 100), "96x64"))),
        *((offered_sizes(1024), *case) for case in (((3440, 1440), "1472x640"), ((512, 288), "704x384"))),
        *((offered_sizes(1024), *case) for case in (((1000, 1000), "1024x1024"), ((300, 310), "512x512"))),
        (FEW, (90, 200), "64x96"),
    ],
)
def test_a_picture_is_drawn_in_the_size_of_its_shape_and_then_of_its_pixels(sizes, picture, expected):
    assert str(nearest_size(sizes, *picture)) == expected


def test_a_quarter_of_the_pixels_is_offered_where_the_sides_stay_whole_steps():
    offered = offered_sizes(1024)
    assert len(offered) == 2 * len(ASPECT_RATIOS)
    assert Size(1024, 1024) in sizes_of(offered, "1")
    assert Size(512, 512) in sizes_of(offered, "0.25")
    assert {*sizes_of(offered, "1"), *sizes_of(offered, "0.25")} == {*sizes_of(offered, "match_input")} == {*offered}
    assert offered_sizes(64) == native_sizes(64)


def test_megapixels_that_no_size_has_are_refused():
    with pytest.raises(ValueError, match=r"megapixels 0\.25 is not available; this model draws 1024x1024"):
        sizes_of(SIZES, "0.25")
