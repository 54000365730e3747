"""The sampler against transformers' own processors."""

from __future__ import annotations

import pytest
import torch
import transformers
from scipy.stats import chisquare

from models.text.sampling import Sampler, Sampling

VOCABULARY = 40
DRAWS = 4000
CPU = torch.device("cpu")
# A wrong distribution is found with near certainty; a right one is refused once in ten thousand seeds.
LEAST_P = 1e-4

REQUESTS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=7),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=1.0, top_p=0.01),
    Sampling(temperature=1.0, repetition_penalty=1.8),
    Sampling(temperature=1.0, repetition_penalty=0.6),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.3),
]


def logits() -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2


def prompt() -> torch.Tensor:
    return torch.tensor([3, 4, 5, 6, 17, 18, 3])


def expected(sampling: Sampling) -> torch.Tensor:
    """The distribution that `generate` draws from, with the same arguments."""
    processors = transformers.LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(transformers.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(transformers.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(sampling.top_p))
    return processors(prompt()[None], logits()).softmax(dim=-1)[0]


def by_vllms_formulas(sampling: Sampling, answer: list[int]) -> torch.Tensor:
    """The scores after vLLM's penalties for the tokens of an answer, written out."""
    scores = logits()[0]
    counts = torch.tensor([answer.count(token) for token in range(VOCABULARY)])
    for token in {*prompt().tolist(), *answer}:
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    scores -= sampling.frequency_penalty * counts
    scores -= sampling.presence_penalty * (counts > 0)
    if len(answer) < sampling.min_tokens:
        scores[[*sampling.ends]] = -torch.inf
    return scores


@pytest.mark.parametrize("answer", [[], [7], [7, 3, 7, 21, 7, 21]], ids=len)
@pytest.mark.parametrize("presence", [0.0, 0.7, -1.5])
@pytest.mark.parametrize("frequency", [0.0, 0.4, -2.0])
@pytest.mark.parametrize("min_tokens", [0, 2, 6])
def test_penalties_and_the_least_number_of_tokens_are_vllms(answer, presence, frequency, min_tokens):
    """The likeliest tokens, one after another, are held back, so that all scores are seen in their order."""
    sampling = Sampling(
        repetition_penalty=1.3,
        presence_penalty=presence,
        frequency_penalty=frequency,
        min_tokens=min_tokens,
        ends=(11, 12, 13),
    )
    made = sampler(sampling)
    for token in answer:
        made.see(torch.tensor([token]))
        made.count(torch.tensor([token]))
    wanted, rest = by_vllms_formulas(sampling, answer), logits()
    for _ in range(VOCABULARY - len(sampling.ends)):
        made(rest)
        assert made.chosen.item() == wanted.argmax().item()
        wanted[made.chosen] = rest[0, made.chosen] = -torch.inf


def sampler(sampling: Sampling) -> Sampler:
    made = Sampler(VOCABULARY, CPU)
    made.set(sampling, prompt())
    return made


def draw(made: Sampler, draws: int) -> torch.Tensor:
    found = []
    for _ in range(draws):
        made.draw()
        made(logits())
        found.append(made.chosen.item())
    return torch.tensor(found)


@pytest.mark.parametrize("sampling", REQUESTS, ids=str)
def test_tokens_are_drawn_as_transformers_draws_them(sampling):
    probabilities = expected(sampling)
    counts = torch.bincount(draw(sampler(sampling), 400 if 1 in probabilities else DRAWS), minlength=VOCABULARY)
    assert not counts[probabilities == 0].any()
    likely = probabilities * DRAWS >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]]).double()
    wanted = torch.cat([probabilities[likely], probabilities[~likely].sum()[None]]).double() * DRAWS
    kept = wanted > 0
    if kept.sum() > 1:
        assert chisquare(observed[kept], wanted[kept] / wanted[kept].sum() * observed[kept].sum()).pvalue > LEAST_P


def chosen(sampling: Sampling, values: list[float]) -> int:
    """The token that is drawn from these logits, after a prompt of token 0."""
    made = Sampler(len(values), CPU)
    made.set(sampling, torch.tensor([0]))
    made.draw()
    made(torch.tensor([values]))
    assert made.chosen.shape == (1, 1)
    return made.chosen.item()


def test_ties_with_the_last_of_the_top_k_stay_as_in_transformers():
    requests = [Sampling(temperature=1.0, top_k=2, seed=seed) for seed in range(200)]
    assert {chosen(request, [2.0, 1.0, 1.0, 0.0]) for request in requests} == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-5, 1e-36, 1e-38, 1e-40])
def test_the_smallest_temperatures_take_the_likeliest_and_0_the_first_of_them(temperature):
    assert chosen(Sampling(temperature=temperature), [1.0, 5.0, 30.0, 20.0]) == 2
    assert chosen(Sampling(), [0.0, 5.0, 5.0, 1.0]) == 1


def test_a_top_p_of_0_takes_the_likeliest_as_in_transformers():
    assert set(draw(sampler(Sampling(temperature=1.0, top_p=0.0)), 50).tolist()) == {logits().argmax().item()}


def test_the_penalty_counts_for_the_likeliest_token_as_well():
    made = Sampler(3, CPU)
    made.set(Sampling(repetition_penalty=2.0), torch.tensor([0]))
    made(torch.tensor([[3.0, 2.0, 1.0]]))
    assert made.chosen.item() == 1
    made.see(torch.tensor([1]))
    made(torch.tensor([[3.0, 2.0, 1.6]]))
    assert made.chosen.item() == 2


def test_a_request_forgets_what_the_one_before_has_seen():
    made = Sampler(3, CPU)
    made.set(Sampling(repetition_penalty=2.0), torch.tensor([0, 1, 2]))
    made.set(Sampling(repetition_penalty=2.0, top_k=10**6), torch.tensor([2]))
    assert made.last_kept.item() == 2, "a top k beyond the vocabulary is all of it"
    assert made.seen.tolist() == [False, False, True]


def test_the_same_seed_draws_the_same_tokens_and_another_one_others():
    first, again, other = (draw(sampler(Sampling(temperature=1.0, seed=seed)), 50).tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_the_same_call_twice_does_the_same():
    made = sampler(Sampling(temperature=1.0))
    made.draw()
    made(logits())
    before = {name: buffer.clone() for name, buffer in made.named_buffers()}
    made(logits())
    assert all(torch.equal(buffer, before[name]) for name, buffer in made.named_buffers())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_a_value_without_meaning_is_refused_and_named(values, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**values)
