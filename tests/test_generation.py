"""Generation with a static cache, eager: the same tokens as transformers', and no trace of the request before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import random_texts
import torch
from random_texts import FAMILIES, greedy, make, prompt

from models.text.generation import Generator, Request
from models.text.layers import most_positions, use_token_layers
from models.text.sampling import Sampling

CACHE_TOKENS = 64
BUCKETS = (16, 48)


def generator(family: str = "llama") -> Generator:
    return Generator(make(family), CACHE_TOKENS, BUCKETS)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_generate(family):
    """Prompts shorter and longer than a sliding window, exactly of a bucket's length, and of one token."""
    expected = [greedy(make(family), prompt(length), 16) for length in (1, 16, 30)]
    made = generator(family)
    found = [list(made.tokens(Request(prompt(length), 16))) for length in (1, 16, 30)]
    assert found == expected
    assert all(len(set(tokens)) > 3 for tokens in expected), "a model that repeats itself shows little"


def test_looking_ahead_changes_no_token():
    """As on a GPU: two steps are queued before a token is looked at."""
    made = generator()
    made._steps_ahead = 2
    for length, new_tokens in ((20, 1), (20, 2), (20, 20), (40, 24)):
        expected = greedy(make("llama"), prompt(length), new_tokens)
        assert list(made.tokens(Request(prompt(length), new_tokens))) == expected


@pytest.mark.parametrize("length", [5, 16, 20])
def test_a_rope_that_would_change_with_the_padding_does_not(length):
    """Phi-3's long contexts: within the original positions the short factors hold, however long the bucket."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    changes = {"rope_parameters": {**rope, "original_max_position_embeddings": 24}}
    changes["original_max_position_embeddings"] = 24
    made = Generator(make("phi3", **changes), 24, (24,))
    assert most_positions(make("phi3", **changes).config) == 24
    assert list(made.tokens(Request(prompt(length), 4))) == greedy(make("phi3", **changes), prompt(length), 4)


def test_a_request_complete_or_stopped_leaves_nothing_for_the_next():
    made = generator()
    alone = list(made.tokens(Request(prompt(20), 20)))
    for stopped_after in (None, 0, 1, 5):
        tokens = made.tokens(Request(prompt(48, seed=2), 16, Sampling(1.0, 0.9, 50, 1.5, seed=3)))
        list(islice(tokens, stopped_after))
        tokens.close()
        assert list(made.tokens(Request(prompt(20), 20))) == alone


def test_a_request_that_another_one_has_replaced_says_so():
    made = generator()
    first = made.tokens(Request(prompt(5), 10))
    next(first)
    next(made.tokens(Request(prompt(6), 10)))
    with pytest.raises(RuntimeError, match="one at a time"):
        next(first)


def test_a_seed_gives_the_same_tokens_whatever_was_drawn_before():
    made = generator()
    first, _, again = (list(made.tokens(Request(prompt(10), 20, Sampling(1.0, seed=seed)))) for seed in (7, 8, 7))
    assert again == first


def test_the_penalty_reaches_the_tokens_that_were_generated():
    """With a heavy penalty, nothing comes twice."""
    found = list(generator().tokens(Request(prompt(5), 50, Sampling(repetition_penalty=1e6))))
    assert len(set(found)) == 50
    assert not set(found) & set(prompt(5))


def test_threads_may_take_turns():
    """Cog's do: neither inference mode nor anything else is left behind in one of them."""
    made = generator()
    expected = list(made.tokens(Request(prompt(20), 20)))
    tokens = made.tokens(Request(prompt(20), 20))
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        found = [(one, other)[number % 2].submit(next, tokens).result() for number in range(20)]
        assert not one.submit(torch.is_inference_mode_enabled).result()
    assert found == expected
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(
    ("request_", "limit"),
    [
        (Request((), 5), "empty"),
        (Request((3, 311), 5), "the token 311"),
        (Request(prompt(40), 25), "64 .CACHE_TOKENS"),
        (Request(prompt(49), 5), "48 .PROMPT_BUCKETS"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_and_the_limit_named(request_, limit):
    with pytest.raises(ValueError, match=limit):
        next(generator().tokens(request_))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("opt", {"word_embed_proj_dim": 64, "ffn_dim": 64}, "asks the cache for its length"),
        ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, "uses s_aux, which is not supported"),
        ("falcon", {}, "its own attention"),
        ("qwen3_next", {"head_dim": 16, "num_experts": 0}, "linear_attention"),
        ("phimoe", {"num_local_experts": 4, "sliding_window": 12}, "window of 12 tokens"),
        ("llama", {"is_causal": False}, "later tokens"),
        ("gemma3_text", {"head_dim": 16, "use_bidirectional_attention": True}, "later tokens"),
        ("recurrent_gemma", {"num_hidden_layers": 3, "attention_window_size": 32}, "recurrent"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_and_the_reason_given(family, changes, reason):
    with pytest.raises(ValueError, match=reason):
        Generator(random_texts.make(family, **changes), CACHE_TOKENS, BUCKETS)


def test_layers_that_a_gpu_would_have_generate_the_same():
    replaced = make("llama")
    use_token_layers(replaced)
    made = Generator(replaced, CACHE_TOKENS, BUCKETS)
    expected = greedy(make("llama"), prompt(20), 20)
    assert list(made.tokens(Request(prompt(20), 20))) == expected
    made.decode = torch.compile(made.decode, fullgraph=True, backend="aot_eager")
    assert list(made.tokens(Request(prompt(20), 20))) == expected


def gpu_generator() -> Generator:
    return Generator(make("llama").cuda(), CACHE_TOKENS, BUCKETS)


@pytest.mark.gpu
def test_a_recorded_step_gives_the_tokens_that_it_gave_before_from_any_thread():
    requests = [Request(prompt(20), 20), Request(prompt(9), 20, Sampling(1.0, 0.9, 50, 1.2, seed=3))]
    made = gpu_generator()
    before = list(made.tokens(requests[0]))
    made.record()
    assert list(made._recordings) == [*BUCKETS, 1]
    assert list(made.tokens(requests[0])) == before == greedy(make("llama"), prompt(20), 20)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: list(made.tokens(requests[0]))).result() == before
    first, again = (list(made.tokens(requests[1])) for _ in range(2))
    assert first == again
    other = Request(prompt(9), 20, Sampling(1.0, 0.9, 50, 1.2, seed=4))
    assert list(made.tokens(other)) != first


@pytest.mark.gpu
def test_what_any_thread_compiles_has_its_operators_joined():
    from torch._inductor import config

    made = gpu_generator()

    def setting() -> str:
        list(made.tokens(Request(prompt(5), 2)))
        return type(config.post_grad_custom_pre_pass).__name__

    with ThreadPoolExecutor(1) as other:
        assert other.submit(setting).result() == setting() == "JoinOperators"


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["step", "prompts"])
def test_what_cannot_be_recorded_is_launched_kernel_by_kernel(monkeypatch, what):
    request = Request(prompt(20), 20, Sampling(1.0, seed=3))
    made = gpu_generator()
    expected = list(made.tokens(request))
    sampler, see, forward = made.decode.sampler, made.decode.sampler.see, made.prefill.forward
    if what == "step":
        monkeypatch.setattr(sampler, "see", lambda token: (see(token), sampler.noise.sum().item()))
    else:
        monkeypatch.setattr(made.prefill, "forward", lambda tokens, last: (forward(tokens, last), last.item())[0])
    made.record()
    assert list(made._recordings) == ([] if what == "step" else [1])
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [list(made.tokens(request)) for _ in range(2)] == [expected] * 2
