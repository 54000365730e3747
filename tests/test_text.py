"""The text family on the demo model, eager: prompts, defaults, ends, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from random_texts import VOCABULARY, make
from sums import answer, prompt, unseen_sums
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from models.text.model import TextInputs, TextModel, default_buckets
from models.text.sampling import Sampling
from models.text.settings import DEMO_MODEL, TextSettings

PROJECT = Path(__file__).parent.parent
DEMO = PROJECT / "demo" / "llama-adder"
SETTINGS = TextSettings(cache_tokens=64, prompt_buckets=(16, 64))
# A prompt that is no sum is answered at random, and goes on to the end of the cache.
RAMBLING = TextInputs("ab", temperature=3.0, seed=4)


@pytest.fixture(scope="module")
def model():
    return TextModel.load(str(DEMO), None, SETTINGS)


@pytest.fixture
def changed(tmp_path):
    """A copy of the demo model, and a function that changes one of its JSON files."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)

    def change(name: str, **values: object) -> TextModel:
        path = folder / name
        content = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        return TextModel.load(str(folder), None, SETTINGS)

    return change


def text(model: TextModel, inputs: TextInputs) -> str:
    return "".join(model.answer(inputs))


def test_at_least_99_percent_of_unseen_sums_are_right(model):
    right = sum(text(model, TextInputs(prompt(a, b))) == answer(a, b) for a, b in unseen_sums(300))
    assert right >= 297


def test_a_text_comes_in_pieces_of_whole_characters_and_may_fill_the_cache(model):
    pieces = list(model.answer(replace(RAMBLING, max_new_tokens=40)))
    assert len(pieces) > 5
    assert all(piece for piece in pieces)
    assert model.request(RAMBLING).max_new_tokens == 64 - len(model.request(RAMBLING).prompt)


def test_a_stop_sequence_ends_the_answer_and_what_only_begins_one_is_part_of_it(model):
    whole = text(model, RAMBLING)
    assert text(model, replace(RAMBLING, stop_sequences=(whole[5:8],))) == whole[: whole.index(whole[5:8])]
    assert text(model, replace(RAMBLING, stop_sequences=(f"{whole[-2:]} and more",))) == whole


def test_a_stop_sequence_may_have_the_token_in_it_that_ends_the_answer(model):
    for stop, said in (("8<eos>", "6"), ("<eos>", "68"), ("9<eos>", "68")):
        assert text(model, TextInputs("23+45=", stop_sequences=(stop,))) == said


def test_special_tokens_in_a_stop_sequence_end_the_answer_as_they_end_generate():
    names = [f"<{number}>" if number % 2 else f"▁{number}" for number in range(VOCABULARY - 1)] + ["abcdef"]
    backend = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<1>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Metaspace()
    backend.add_special_tokens(names[1::2])
    tokenizer, asked = PreTrainedTokenizerFast(tokenizer_object=backend), "▁4 ▁6"
    plain, served = (make("llama", eos_token_id=None) for _ in range(2))
    served = TextModel(served, tokenizer, SETTINGS)
    tokens = tokenizer(asked, return_tensors="pt")["input_ids"]
    options = {"do_sample": False, "max_new_tokens": 20, "tokenizer": tokenizer}
    marked = tokenizer.decode(plain.generate(tokens, **options)[0, 2:])
    assert marked.count("<") > 5
    for begin in range(0, len(marked) - 9, 3):
        stop = marked[begin : begin + 3 + begin % 7]
        answer = served.answer(TextInputs(asked, max_new_tokens=20, stop_sequences=(stop,)))
        said = "".join(answer)
        found = plain.generate(tokens, stop_strings=[stop], **options)[0]
        assert answer.new_tokens == len(found) - 2
        assert tokenizer.decode(found, skip_special_tokens=True).startswith("4 6" + said)


def test_what_a_request_leaves_open_comes_from_the_models_own_defaults(changed, caplog):
    values = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "min_p": 0.1}
    model = changed("generation_config.json", **values)
    assert "sets min_p, which is ignored here" in caplog.text
    assert model.request(TextInputs("1+1=")).sampling == replace(Sampling(0.6, 0.9, 20, 1.1, 0), ends=(257,))
    given = TextInputs("1+1=", temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=9)
    assert model.request(given).sampling == replace(Sampling(0.0, 1.0, 0, 1.0, 9), ends=(257,))


def test_what_a_model_sets_and_generate_would_follow_is_followed_or_named(changed, caplog):
    unset = GenerationConfig._get_default_generation_params()
    named = {"max_time": 5.0, "token_healing": True, "forced_bos_token_id": 0, "encoder_repetition_penalty": 1.2}
    named |= {"encoder_no_repeat_ngram_size": 2, "watermarking_config": {"bias": 2.0}, "of_a_later_release": "on"}
    model = changed("generation_config.json", **{**unset, "suppress_tokens": [], "min_p": 0.0})
    assert "generation_config" not in caplog.text
    model = changed("generation_config.json", **named, stop_strings="8")
    assert f"sets {', '.join(sorted(named))}, which is ignored here" in caplog.text
    assert text(model, TextInputs("23+45=")) == "6"
    assert text(model, TextInputs("23+45=", stop_sequences=())) == "68"


def test_a_model_that_samples_by_itself_is_sampled_as_generate_would(changed):
    """`generate` takes the 50 likeliest tokens at a temperature of 1, if a configuration does not say otherwise."""
    sampling = changed("generation_config.json", do_sample=True).request(TextInputs("1+1=")).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 50, 1.0)


def test_any_of_several_end_tokens_ends_the_answer(changed):
    eight = AutoTokenizer.from_pretrained(DEMO)("8", add_special_tokens=False)["input_ids"][0]
    end = json.loads((DEMO / "generation_config.json").read_text())["eos_token_id"]
    assert text(changed("generation_config.json", eos_token_id=[end, eight]), TextInputs("23+45=")) == "6"


def test_a_system_prompt_goes_through_the_chat_template(model):
    plain = model.request(TextInputs("23+45=")).prompt
    assert model.request(TextInputs("23+45=", system_prompt="Add.")).prompt != plain
    assert plain == tuple(AutoTokenizer.from_pretrained(DEMO)("23+45=")["input_ids"])


def test_a_system_prompt_is_refused_where_there_is_no_chat_template(changed):
    model = changed("tokenizer_config.json", chat_template=None)
    assert text(model, TextInputs("23+45=")) == "68"
    with pytest.raises(ValueError, match="no chat template"):
        text(model, TextInputs("23+45=", system_prompt="Add."))


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(model):
    """64 tokens of at most five characters, which are <bos>, <eos> and <pad>."""
    longest = model.request(TextInputs("<bos>" * 63))
    assert len(longest.prompt) == 64
    for inputs in ({"prompt": "1" * 321}, {"system_prompt": "1" * 321}, {"stop_sequences": ["1"] * 321}):
        name = "stop_sequences" if "stop_sequences" in inputs else "the prompt"
        with pytest.raises(ValueError, match=rf"{name} has 3\d\d characters; it may have 320 .*BUCKETS"):
            model.request(TextInputs(**{"prompt": "1+1=", **inputs}))


def test_every_bucket_is_warmed_up_and_so_is_decoding(model):
    requests = model.warm_up_inputs()
    assert [len(request.prompt) for request in requests] == [16, 60]
    assert all(request.max_new_tokens == 4 for request in requests)
    for request in requests:
        model.generator.check(request)


@pytest.mark.parametrize("tokens", [(2, (2,)), (5, (4, 5)), (64, (63, 64)), (7, (7,))])
def test_a_warm_up_fits_the_smallest_caches(tokens):
    model = TextModel.load(str(DEMO), None, TextSettings(cache_tokens=tokens[0], prompt_buckets=tokens[1]))
    for request in model.warm_up_inputs():
        assert len(model.run(request)) == request.max_new_tokens


def test_default_buckets_grow_by_four_up_to_the_cache_which_has_the_models_positions():
    assert default_buckets(4096) == (128, 512, 2048, 4096)
    assert default_buckets(128) == (128,)
    assert default_buckets(40) == (40,)
    generator = TextModel.load(str(DEMO), None, TextSettings()).generator
    assert (generator.cache_tokens, generator.buckets) == (256, (128, 256))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (TextSettings(cache_tokens=10**6), "CACHE_TOKENS is 1000000; the model has 256 positions"),
        (TextSettings(cache_tokens=64, prompt_buckets=(128,)), "PROMPT_BUCKETS has 128, more than CACHE_TOKENS"),
    ],
)
def test_settings_that_do_not_suit_the_model_are_refused(settings, reason):
    with pytest.raises(ValueError, match=reason):
        TextModel.load(str(DEMO), None, settings)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_checkpoint_that_is_quantized_already_is_refused(changed, method):
    with pytest.raises(ValueError, match=rf"quantized already \({method}\).*QUANTIZE"):
        changed("config.json", quantization_config={"quant_method": method, "bits": 4})


def test_quantizing_without_torchao_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install '.\[quantize\]' in a checkout"):
        TextModel.load(str(DEMO), None, replace(SETTINGS, quantize="int8"))


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
