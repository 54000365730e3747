"""Settings: what each variable means, and how a wrong one is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from compile_cache.errors import CompileCacheError, SettingsError
from compile_cache.settings import PREFIX, Settings

GOOD = [
    ("STORE", "s3://bucket/prefix", "s3://bucket/prefix"),
    ("S3_ENDPOINT_URL", "https://example.com", "https://example.com"),
    ("DIR", "/var/cache", "/var/cache"),
    ("MODEL_NAME", "org/name", "org/name"),
    ("MODEL_VERSION", "7", "7"),
    ("SCOPE", "whole", "whole"),
    ("SCOPE", "off", "off"),
    ("MODE", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ("DYNAMIC", "true", True),
    ("DYNAMIC", "0", False),
    ("DYNAMIC", "auto", None),
    ("PUBLISH", "false", False),
    ("PUBLISH", "1", True),
    ("PUBLISH", "False", False),
    ("RESTORE_TIMEOUT_S", "2.5", 2.5),
    ("EXIT_BUDGET_S", "0", 0.0),
    ("MAX_RESTORE_BYTES", "1024", 1024),
    ("REPORT", "/tmp/report.json", "/tmp/report.json"),
]
BAD = [
    ("SCOPE", "regionl", "must be one of regional, whole, off"),
    ("MODE", "fast", "must be one of default"),
    ("DYNAMIC", "maybe", "must be true or false"),
    ("PUBLISH", "yes please", "must be true or false"),
    ("RESTORE_TIMEOUT_S", "soon", "soon"),
    ("RESTORE_TIMEOUT_S", "-1", "must be seconds between 0 and 86400"),
    ("RESTORE_TIMEOUT_S", "nan", "must be seconds between 0 and 86400"),
    ("EXIT_BUDGET_S", "inf", "must be seconds between 0 and 86400"),
    ("MAX_RESTORE_BYTES", "0", "must be a positive number of bytes"),
    ("MAX_RESTORE_BYTES", "4GB", "4GB"),
    ("DIR", "some/folder", "is relative"),
]


def read(**variables: str) -> Settings:
    return Settings.from_env({PREFIX + name: value for name, value in variables.items()})


def test_nothing_needs_to_be_set():
    assert read() == Settings()


def test_the_defaults_are_those_of_the_readme():
    assert Settings() == Settings(
        store=".compile-cache",
        s3_endpoint_url=None,
        dir="/tmp/compile-cache",
        model_name=None,
        model_version=None,
        scope="regional",
        mode="default",
        dynamic=False,
        publish=True,
        restore_timeout_s=60.0,
        exit_budget_s=7.0,
        max_restore_bytes=4 * 1024**3,
        report=None,
    )


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_variable_sets_its_field(name, text, value):
    assert getattr(read(**{name: text}), name.lower()) == value


def test_every_setting_has_a_variable_that_is_tested():
    assert {name.lower() for name, _, _ in GOOD} == {field.name for field in fields(Settings)}


@pytest.mark.parametrize("name", sorted({name for name, _, _ in GOOD}))
@pytest.mark.parametrize("nothing", ["", "  "])
def test_an_empty_variable_counts_as_not_set(name, nothing):
    assert read(**{name: nothing}) == Settings()


def test_an_empty_unknown_variable_is_no_problem():
    assert read(STOER="") == Settings()


def test_spaces_around_a_value_do_not_count():
    assert read(SCOPE=" whole ").scope == "whole"


def test_variables_of_others_do_not_count():
    assert Settings.from_env({"STORE": "/elsewhere", "MY_COMPILE_CACHE_STORE": "/elsewhere"}) == Settings()


@pytest.mark.parametrize(("name", "text", "reason"), BAD)
def test_a_bad_value_is_refused_by_the_name_of_its_variable(name, text, reason):
    with pytest.raises(SettingsError) as caught:
        read(**{name: text})
    message = str(caught.value)
    assert PREFIX + name in message
    assert text in message
    assert reason in message


@pytest.mark.parametrize(
    ("unknown", "nearest"),
    [("STOR", "STORE"), ("MODELVERSION", "MODEL_VERSION"), ("RESTORE_TIMEOUT", "RESTORE_TIMEOUT_S")],
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(unknown, nearest):
    with pytest.raises(SettingsError, match=rf"{PREFIX}{unknown} .*did you mean {PREFIX}{nearest}\?"):
        read(**{unknown: "x"})


def test_all_problems_are_in_one_message():
    with pytest.raises(SettingsError) as caught:
        read(STOER="x", SCOPE="al", EXIT_BUDGET_S="long", PUBLISH="perhaps")
    for name in ("STOER", "SCOPE", "EXIT_BUDGET_S", "PUBLISH"):
        assert PREFIX + name in str(caught.value)


def test_a_relative_folder_is_in_the_same_message_as_other_problems():
    with pytest.raises(SettingsError) as caught:
        read(DIR="some/folder", PUBLISH="perhaps")
    assert PREFIX + "DIR" in str(caught.value)
    assert PREFIX + "PUBLISH" in str(caught.value)


@pytest.mark.parametrize(
    ("scope", "mode", "reason", "instead"),
    [
        ("regional", "reduce-overhead", "every instance of a region", "default"),
        ("regional", "max-autotune", "every instance of a region", "max-autotune-no-cudagraphs"),
        ("whole", "reduce-overhead", "on the thread that warms up", "default"),
        ("whole", "max-autotune", "on the thread that warms up", "max-autotune-no-cudagraphs"),
    ],
)
def test_a_mode_with_cuda_graphs_is_refused_with_the_reason_and_another_mode(scope, mode, reason, instead):
    with pytest.raises(SettingsError) as caught:
        read(SCOPE=scope, MODE=mode)
    message = str(caught.value)
    assert f"{PREFIX}MODE={mode} does not suit {PREFIX}SCOPE={scope}" in message
    assert reason in message
    assert message.endswith(f"Use {PREFIX}MODE={instead}.")


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("scope", ["regional", "whole"])
def test_a_mode_without_cuda_graphs_suits_every_scope(scope, mode):
    assert read(SCOPE=scope, MODE=mode).mode == mode


def test_a_boot_that_compiles_nothing_takes_any_mode():
    assert not read(SCOPE="off", MODE="max-autotune").enabled


def test_a_relative_cache_folder_is_refused_because_code_is_looked_up_by_path():
    with pytest.raises(SettingsError, match="absolute path that is the same in every container"):
        read(DIR="cache")


def test_a_settings_error_is_of_the_librarys_tree_and_a_value_error():
    with pytest.raises(CompileCacheError) as caught:
        read(SCOPE="x")
    assert isinstance(caught.value, ValueError)
