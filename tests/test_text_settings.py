"""The settings of the text family: read once, strictly, and named where they are wrong."""

from __future__ import annotations

import pytest

from models.text.settings import DEMO_MODEL, TextSettings


@pytest.mark.parametrize("environ", [{}, {"MODEL": " ", "CACHE_TOKENS": "", "PROMPT_BUCKETS": "", "QUANTIZE": ""}])
def test_nothing_set_is_the_demo_model_with_its_own_lengths(environ):
    assert TextSettings.from_env(environ) == TextSettings(DEMO_MODEL, None, (), None)


def test_buckets_are_sorted_and_each_is_there_once():
    environ = {"MODEL": "org/name@main", "CACHE_TOKENS": "4096", "PROMPT_BUCKETS": "2048, 128,128", "QUANTIZE": "int8"}
    assert TextSettings.from_env(environ) == TextSettings("org/name@main", 4096, (128, 2048), "int8")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CACHE_TOKENS", "4k", "CACHE_TOKENS has '4k'"),
        ("CACHE_TOKENS", "128,256", "CACHE_TOKENS has 2 numbers"),
        ("PROMPT_BUCKETS", "128;256", "PROMPT_BUCKETS has '128;256'"),
        ("PROMPT_BUCKETS", "-5", "PROMPT_BUCKETS has '-5'"),
        ("PROMPT_BUCKETS", "1", "from 2 on"),
        ("QUANTIZE", "int4", "QUANTIZE is 'int4'; give one of int8, fp8"),
    ],
)
def test_a_value_that_cannot_be_is_refused_and_named(variable, value, reason):
    with pytest.raises(ValueError, match=reason):
        TextSettings.from_env({variable: value})
