"""The demo text model in a real Cog server: compiled while it serves, then restored, streamed, cancelled, and asked
many things."""

from __future__ import annotations

import contextlib
import json
import urllib.error
from typing import Any

import pytest
from boots import python_path, run_boot
from cog_server import PROJECT
from demo_servers import Demo, DemoTests, environment, is_compiled, metrics
from sums import answer, prompt, unseen_sums

from models.text.model import TextInputs, TextModel
from models.text.settings import TextSettings

pytest_plugins = ["demo_servers"]  # its fixtures

XGRAMMAR = PROJECT / ".venv" / "schemas"
CACHE_TOKENS, BUCKETS = 64, (16, 64)
SUMS = unseen_sums(25)
RAMBLING = {"prompt": "ab", "temperature": 3.0, "seed": 4}
# Prompts of several lengths, greedy and sampled with all that can be asked for.
MIXED: list[dict[str, Any]] = [
    {"prompt": "1", "max_new_tokens": 1},
    {"prompt": "é中" * 9, "temperature": 0.1, "top_p": 0.3, "top_k": 0, "repetition_penalty": 0.8, "seed": 1},
    {"prompt": "=" * 15, "temperature": 2.0, "top_k": 1, "stop_sequences": ["1", "22"]},
    {"prompt": "7+" * 8, "temperature": 0.7, "top_p": 1.0, "top_k": 60, "repetition_penalty": 1.5, "max_new_tokens": 8},
]
# The first two have a bucket each.
DEMO = Demo(
    "predict.py:TextPredictor",
    {"MODEL": "demo/llama-adder", "CACHE_TOKENS": str(CACHE_TOKENS), "PROMPT_BUCKETS": ",".join(map(str, BUCKETS))}
    | {"PYTHONPATH": python_path(XGRAMMAR)},
    ({"prompt": "23+45="}, {"prompt": "1+" * 20 + "1="}, RAMBLING),
    frozenset({"Prefill"}),
)
# The weights wait until the restored functions are loaded.
LATE_WEIGHTS = """
import contextlib, compile_cache, predict
importing = compile_cache.Boot.importing
@contextlib.contextmanager
def preload_all(boot):
    with importing(boot):
        yield
        boot._restore._fetching.done.wait()
    boot._preloading.join()
compile_cache.Boot.importing = preload_all
predictor = predict.TextPredictor()
predictor.setup()
print(predictor.boot.report.fully_precompiled)
"""


def test_functions_load_before_there_is_a_model(first):
    """They need its class registered with transformers. A function that fails would be loaded again in the warm-up.

    Comes first: the restored server has the same cache directory.
    """
    environ = environment(first.server.log.with_name("late.log"), DEMO) | {"COMPILE_CACHE_UNSEEN": "eager"}
    done = run_boot(environ, LATE_WEIGHTS, program="run_source", folder=PROJECT)
    assert done.stdout.endswith("True\n"), done.stderr
    assert "precompiled.not_loaded_ahead" not in done.stderr


@pytest.fixture
def rambling(restored) -> str:
    return text(restored.answers[2][0])


def text(prediction: dict[str, Any]) -> str:
    return "".join(prediction["output"])


class TestBothBoots(DemoTests):
    """See there."""


def test_ready_waits_for_the_step_and_not_for_the_prefill(restored):
    loaded = {region["name"]: region["loaded"] for region in restored.at_ready["regions"]}
    assert loaded == {"Prefill": 0, "DecodeStep": 1}


def test_no_text_changes_at_the_swap_and_in_the_next_boot(first, restored):
    for before, after in zip(first.answers, restored.answers, strict=True):
        (said,) = set(map(text, before + after))
        assert len(set(said)) > 1


def test_a_bucket_that_was_not_asked_for_is_compared_before_its_first_request(first):
    """Once code has arrived, the model makes its own requests of all buckets."""
    assert is_compiled(first.answers[1][0])
    assert metrics(first.answers[1][0])["compiling"] == 0


def test_answers_are_right_and_those_of_eager_code(restored, server):
    said = [text(server.predict(prompt=prompt(a, b))) for a, b in SUMS]
    assert said == [answer(a, b) for a, b in SUMS]
    model = TextModel.load("demo/llama-adder", None, TextSettings(cache_tokens=CACHE_TOKENS, prompt_buckets=BUCKETS))
    assert said == ["".join(model.answer(TextInputs(prompt(a, b)))) for a, b in SUMS]
    assert text(restored.answers[0][0]) == "68"


def test_no_prediction_compiles_anything(server):
    for inputs in MIXED:
        prediction = server.predict(**inputs)
        assert is_compiled(prediction)
        assert metrics(prediction)["compiled_now"] == 0


def test_text_is_streamed_as_it_is_generated(server, rambling):
    events = list(server.stream(**RAMBLING))
    pieces = [data["chunk"] for kind, data in events if kind == "output"]
    assert len(pieces) > 5
    assert "".join(pieces) == rambling
    assert events[-1][0] == "completed"


def test_a_cancelled_answer_ends_early_and_leaves_nothing_behind(server, rambling):
    """On a busy machine an answer can be complete before its cancellation arrives, which is then refused: it does not
    count."""
    for _ in range(50):
        for kind, data in server.stream(prompt="ab", temperature=3.0, seed=2):
            if kind == "start":
                with contextlib.suppress(urllib.error.HTTPError):
                    server.cancel(data["id"])
            last = data
        if last["status"] == "canceled":
            break
    assert last["status"] == "canceled"
    assert text(server.predict(**RAMBLING)) == rambling


def test_a_prediction_counts_its_tokens(restored):
    told = restored.answers[0][0]["metrics"]
    assert (told["token_input_count"], told["token_output_count"]) == (7, 3)


def test_what_does_not_fit_is_refused_and_the_limit_named(server):
    refused = server.predict(prompt="1+1=", max_new_tokens=100)
    assert refused["status"] == "failed"
    assert "max_tokens is 100" in refused["error"]
    for inputs in ({"prompt": "1" * 30_000_000}, {"prompt": "1+1=", "stop_sequences": ["1" * 30_000_000]}):
        assert "characters; it may have 320 (64 tokens" in server.predict(**inputs)["error"]


def test_integers_may_be_written_with_a_point(server, rambling):
    """By Cog's schema, 4.0 is one."""
    assert text(server.predict(**{**RAMBLING, "seed": 4.0})) == rambling
    assert text(server.predict(prompt="23+45=", max_new_tokens=1.0, top_k=3.0, seed=1.0, temperature=0)) == "6"


def test_a_stop_sequence_ends_the_answer(server):
    assert text(server.predict(prompt="23+45=", stop_sequences=["8"])) == "6"


def test_a_chat_is_answered_as_its_prompt_is(server):
    """Keys of objects come sorted. Parts of type text are one text."""
    parts = [{"type": "text", "text": "23+45="}]
    for content in ("23+45=", parts):
        prediction = server.predict(messages=[{"role": "user", "content": content}])
        assert text(prediction) == "68"
        assert is_compiled(prediction)
        assert metrics(prediction)["compiled_now"] == 0


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ({}, "give a prompt, or messages"),
        ({"prompt": "1+1=", "messages": [{"role": "user", "content": "1"}]}, "but not both"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "1+1="}, {}]}, r"messages[1] has no role"),
        ({"messages": [{"role": "user"}]}, r"messages[0] has no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "a part of type image_url"),
        ({"messages": [{"role": "user", "content": "1" * 400}]}, "the prompt has 405 characters; it may have 320"),
        ({"messages": [{"role": "user", "content": "1"}], "system_prompt": "Add."}, "the first of the messages"),
        ({"prompt": "1+1=", "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "has chat_template, which is no"),
        ({"prompt": "1+1=", "max_tokens": 3, "max_new_tokens": 3}, "one input with two names"),
        ({"prompt": "1+1=", "max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, more than the 3 tokens"),
    ],
)
def test_what_a_chat_cannot_be_is_refused_and_named(server, inputs, reason):
    refused = server.predict(**inputs)
    assert refused["status"] == "failed"
    assert reason in refused["error"]


@pytest.mark.skipif(not XGRAMMAR.is_dir(), reason="xgrammar is not in .venv/schemas: make test puts it there")
def test_an_answer_follows_a_schema_and_the_next_one_is_free_again(server, rambling):
    schema = {"type": "object", "properties": {"sum": {"enum": [68, "é"]}}, "required": ["sum"]}
    events = list(server.stream(prompt="23+45=", json_schema=schema))
    told = json.loads("".join(data["chunk"] for kind, data in events if kind == "output"))
    assert told in ({"sum": 68}, {"sum": "é"})
    assert events[-1][1]["metrics"]["finish_reason"] == "schema"
    assert is_compiled(events[-1][1])
    for wrong in ("{", {"type": "object", "oneOf": []}, "x" * 20_000):
        assert "json_schema" in server.predict(prompt="1+1=", json_schema=wrong)["error"]
    assert text(server.predict(**RAMBLING)) == rambling


def test_an_answer_says_how_it_ended(server):
    ends = {"stop": {}, "length": {"max_tokens": 1}}
    ends |= {"stop ": {"stop_sequences": "7,8"}, "length ": {"min_tokens": 5, "max_tokens": 5}}
    for reason, inputs in ends.items():
        prediction = server.predict(prompt="23+45=", **inputs)
        assert prediction["metrics"]["finish_reason"] == reason.strip()
    assert prediction["metrics"]["token_output_count"] == 5


def test_penalties_for_tokens_of_the_answer_change_it_and_compile_nothing(server, rambling):
    prediction = server.predict(**RAMBLING, frequency_penalty=2.0, presence_penalty=2.0)
    assert text(prediction) != rambling
    assert metrics(prediction)["compiled_now"] == 0


def test_a_seed_that_was_not_given_is_told(server):
    prediction = server.predict(prompt="ab", temperature=3.0)
    assert f"seed: {prediction['metrics']['seed']}" in prediction["logs"]
