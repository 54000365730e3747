"""The key: its parts make object paths, whatever a model is called."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile_cache.key.cache_key import key_for, object_name
from compile_cache.settings import Settings


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/FLUX.1-schnell", "org--FLUX.1-schnell"),
        ("plain", "plain"),
        ("a b\tc", "a--b--c"),
        ("../../etc/passwd", "etc--passwd"),
        ("..", "unnamed"),
        (".", "unnamed"),
        ("", "unnamed"),
        ("/", "unnamed"),
        ("모델", "unnamed"),
        (".hidden", "hidden"),
    ],
)
def test_a_name_becomes_one_readable_path_segment(text, name):
    assert object_name(text) == name


@given(st.text(max_size=150))
def test_any_text_becomes_a_safe_path_segment(text):
    name = object_name(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name)


@given(st.text(max_size=150))
def test_a_path_segment_stays_as_it_is(text):
    assert object_name(object_name(text)).rstrip(".-") == object_name(text).rstrip(".-")


def test_a_key_says_where_its_packs_are_and_the_environments_record_is_above(environment):
    key = key_for(Settings(model_version="7"), environment, "org/model", ())
    assert key.prefix == f"v2/{environment.digest}/org--model/7/"
    assert key.environment_prefix == f"v2/{environment.digest}/"
