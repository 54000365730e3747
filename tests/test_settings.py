"""Settings: what each variable means, and how a wrong one is refused."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from signing_keys import make_keys

from compile_cache.errors import CompileCacheError, SettingsError
from compile_cache.settings import PREFIX, Settings
from compile_cache.storage.pack.signing import PRIVATE_PREFIX

PRIVATE, PUBLIC = make_keys("one")
_, OTHER_PUBLIC = make_keys("other")

GOOD = [
    *(("STORE", url, url) for url in ("s3://bucket/prefix", "gs://b/prefix", "az://container", "file:///packs", "off")),
    ("LAYERS", "/opt/packs", ("/opt/packs",)),
    ("LAYERS", "/a, s3://bucket/a ,https://mirror/packs,", ("/a", "s3://bucket/a", "https://mirror/packs")),
    ("LAYERS", "a", (str(Path("a").absolute()),)),
    ("SIGNING_KEY", PRIVATE, PRIVATE),
    ("TRUSTED_KEYS", f"{PUBLIC}, {OTHER_PUBLIC}", (PUBLIC, OTHER_PUBLIC)),
    # A C++ kernel was compiled in a folder of each.
    *(("DIR", path, path) for path in ("/var/cache", "/tmp/$HOME", "/tmp/a(b)[c];d&e", "/tmp/naïve")),
    ("MODEL_NAME", "org/name", "org/name"),
    ("MODEL_VERSION", "7", "7"),
    ("SCOPE", " whole ", "whole"),
    ("SCOPE", "off", "off"),
    ("MODE", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ("DYNAMIC", "true", True),
    ("DYNAMIC", "0", False),
    ("DYNAMIC", "auto", None),
    *(("COLD_START", value, value) for value in ("background", "block", "auto")),
    *(("UNSEEN", value, value) for value in ("eager", "background", "auto")),
    *(("REQUIRE", value, value) for value in ("hit", "off")),
    ("SETUP_BUDGET_S", "0", 0.0),
    ("SETUP_BUDGET_S", "120", 120.0),
    ("LEAVE_EAGER", "FluxTransformerBlock, models.mine.Block,", ("FluxTransformerBlock", "models.mine.Block")),
    ("PUBLISH", "false", False),
    ("PUBLISH", "1", True),
    ("PUBLISH", "False", False),
    ("WEIGHTS_TIMEOUT_S", "30", 30.0),
    ("RESTORE_TIMEOUT_S", "2.5", 2.5),
    ("EXIT_BUDGET_S", "0", 0.0),
    ("REPORT", "/tmp/report.json", "/tmp/report.json"),
]
OTHER_MODES = "give one of default, max-autotune-no-cudagraphs"
BAD = [
    ("SCOPE", "regionl", "give one of regional, whole, off"),
    ("MODE", "fast", "give one of default"),
    *(
        ("MODE", mode, f"{PREFIX}MODE={mode!r}: Invalid enum value {mode!r}; {OTHER_MODES}")
        for mode in ("reduce-overhead", "max-autotune")
    ),
    ("DYNAMIC", "maybe", "Expected `bool"),
    ("COLD_START", "warm", "give one of auto, background, block"),
    ("UNSEEN", "block", "give one of auto, background, eager"),
    *(("REQUIRE", value, "give one of off, hit") for value in ("true", "HIT", "null")),
    ("SETUP_BUDGET_S", "-1", "must be seconds between 0 and 86400"),
    ("SETUP_BUDGET_S", "5m", "5m"),
    ("PUBLISH", "yes please", "Expected `bool"),
    ("RESTORE_TIMEOUT_S", "soon", "soon"),
    ("RESTORE_TIMEOUT_S", "-1", "must be seconds between 0 and 86400"),
    ("RESTORE_TIMEOUT_S", "nan", "must be seconds between 0 and 86400"),
    ("EXIT_BUDGET_S", "inf", "must be seconds between 0 and 86400"),
    ("DIR", "some/folder", "absolute path that is the same in every container"),
    *(("DIR", f"/tmp/my{character}cache", "Give a path without them") for character in " \t\n'\"\\"),
    *(("STORE", url, "give a local folder") for url in ("ftp://a/b", "https://a/b", "s3://", "s3:/bucket", "gs:///b")),
    *(("REPORT", path, "is a folder: give a file's path") for path in ("/tmp", "/nowhere/")),
    *(
        ("LAYERS", url, "neither a local folder nor the URL")
        for url in ("ftp://a/b", "https://", "https://a/#b", "off")
    ),
]


def read(**variables: str) -> Settings:
    return Settings.from_env({PREFIX + name: value for name, value in variables.items()})


@pytest.mark.parametrize("name", ["STORE", "LAYERS"])
@pytest.mark.parametrize("scheme", ["s3", "gs", "ftp"])
@pytest.mark.parametrize("rest", ["key:SECRET@bucket", "key:S/SECRET@bucket/prefix", "key:S/SECRET@host/a?key=SECRET"])
def test_a_password_in_a_url_is_refused_and_not_repeated(name, scheme, rest):
    with pytest.raises(SettingsError) as caught:
        read(**{name: f"{scheme}://{rest}"})
    assert "@" not in str(caught.value)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_variable_sets_its_field(name, text, value):
    assert getattr(read(**{name: text}), name.lower()) == value


@pytest.mark.parametrize("name", sorted({name for name, _, _ in GOOD}))
@pytest.mark.parametrize("nothing", ["", "  "])
def test_an_empty_variable_counts_as_not_set(name, nothing):
    assert read(**{name: nothing}) == Settings()


def test_nothing_needs_to_be_set_and_empty_unknown_variables_and_those_of_others_are_no_problem():
    assert read() == Settings()
    assert read(STOER="") == Settings()
    assert Settings.from_env({"STORE": "/elsewhere", "MY_COMPILE_CACHE_STORE": "/elsewhere"}) == Settings()


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name, text, reason):
    with pytest.raises(SettingsError) as caught:
        read(**{name: text})
    message = str(caught.value)
    assert PREFIX + name in message
    assert text in message or repr(text) in message
    assert reason in message


@pytest.mark.parametrize(("unknown", "nearest"), [("STOR", "STORE"), ("EXIT_BUDGET", "EXIT_BUDGET_S")])
def test_an_unknown_variable_is_refused_with_the_nearest_one(unknown, nearest):
    with pytest.raises(SettingsError, match=rf"{PREFIX}{unknown} .*did you mean {PREFIX}{nearest}\?"):
        read(**{unknown: "x"})


def test_all_problems_are_in_one_message_of_the_librarys_tree_that_is_a_value_error():
    with pytest.raises(CompileCacheError) as caught:
        read(STOER="x", SCOPE="al", EXIT_BUDGET_S="long", PUBLISH="perhaps", DIR="some/folder")
    for name in ("STOER", "SCOPE", "EXIT_BUDGET_S", "PUBLISH", "DIR"):
        assert PREFIX + name in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("name", "value"), [("SCOPE", "off"), ("GRAPHS", "Block")])
def test_a_hit_cannot_be_required_where_none_can_be(name, value):
    with pytest.raises(SettingsError, match=f"{PREFIX}REQUIRE=hit, but {PREFIX}{name}"):
        read(REQUIRE="hit", **{name: value})


# Layers


@pytest.mark.parametrize("host", ["mirror.example", "127.0.0.1.example:80", "localhost.example", "10.0.0.1:8000"])
def test_a_layer_over_http_needs_trusted_keys(host):
    """What comes over it is executed."""
    with pytest.raises(SettingsError, match=rf"{PREFIX}LAYERS: .*Use https://, or set {PREFIX}TRUSTED_KEYS"):
        read(LAYERS=f"/baked,http://{host}/packs")
    layers = ("/baked", f"http://{host}/packs")
    assert read(LAYERS=",".join(layers), TRUSTED_KEYS=PUBLIC).layers == layers


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
def test_a_layer_over_http_on_this_machine_needs_none(host):
    for layer in (f"http://{host}", f"http://{host}/packs"):
        assert read(LAYERS=layer).layers == (layer,)


@pytest.mark.parametrize("user", ["localhost:80", "127.0.0.1:", "localhost"])
def test_a_user_named_as_this_machine_is_not_this_machine(user):
    with pytest.raises(SettingsError, match="anybody on the network can change code"):
        read(LAYERS=f"http://{user}@mirror.example/packs")


def test_every_layer_with_a_problem_is_named_without_its_password():
    with pytest.raises(SettingsError, match=f"{PREFIX}LAYERS") as caught:
        read(LAYERS="ftp://user:secret@one,/two,http://user:secret@three/packs")
    told = [word in str(caught.value) for word in ("one", "three", "/two", "secret")]
    assert told == [True, True, False, False]


def test_neither_a_layers_password_nor_the_signing_key_is_shown_with_the_settings():
    shown = repr(read(LAYERS="https://user:secret@mirror.example/packs", SIGNING_KEY=PRIVATE, TRUSTED_KEYS=PUBLIC))
    assert "secret" not in shown
    assert PRIVATE.removeprefix(PRIVATE_PREFIX) not in shown


# Publishing


@pytest.mark.parametrize(
    ("variables", "may_publish"),
    [
        ({}, True),
        ({"PUBLISH": "false"}, False),
        ({"STORE": "off"}, False),
        ({"STORE": "off", "LAYERS": "/baked"}, False),
        ({"LAYERS": "/baked"}, True),
        ({"SIGNING_KEY": PRIVATE}, True),
        ({"TRUSTED_KEYS": PUBLIC}, False),
        ({"TRUSTED_KEYS": PUBLIC, "SIGNING_KEY": PRIVATE}, True),
        ({"TRUSTED_KEYS": PUBLIC, "SIGNING_KEY": PRIVATE, "PUBLISH": "0"}, False),
    ],
)
def test_a_boot_publishes_where_it_may_and_what_it_would_trust(variables, may_publish):
    assert read(**variables).may_publish is may_publish
