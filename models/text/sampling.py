"""The choice of the next token: the processors of transformers' `generate`, in one function of fixed shapes.

Every option of a request is in a tensor on the device, so that one compiled step and one CUDA graph serve all requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor, nn

# Scores divided by a smaller temperature leave the range of float32. The likeliest token then has all the probability.
_LEAST_TEMPERATURE = 1e-4
_LEAST_TOP_P = 1e-9
# One program of a GPU compares this many probabilities.
_ROW = 1024


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of one request. Temperature 0 takes the likeliest token; `top_k` 0, `top_p` 1,
    `repetition_penalty` 1 and the other penalties 0 change nothing. None of the `ends` is chosen among the first
    `min_tokens`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the values that a model's own settings may have, too.

        Raises:
            ValueError: a value has no meaning. The message names it.
        """
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 or more")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be from 0 to 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 or more")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; it must be above 0")


@torch.library.custom_op("text::running_sum", mutates_args=())
def running_sum(values: Tensor) -> Tensor:
    """`values.cumsum(0)`, hidden from Inductor. values and result: [values].

    On a GPU, torch 2.11's Inductor would join it with a sum over the same values, and fail ("NYI TritonSplitDimKernel
    reductions").
    """
    return values.cumsum(0)


@running_sum.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


class Sampler(nn.Module):
    """Chooses `chosen` from logits, with the options of the last `set` and the tokens of every `see` since.

    It runs inside compiled steps, where repeating a call must give the same result. So `draw` draws the random numbers
    outside, and `count` counts the tokens of the answer there.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        def buffer(tensor: Tensor) -> nn.Buffer:
            return nn.Buffer(tensor.to(device), persistent=False)

        super().__init__()
        self.generator = torch.Generator(device)
        self._vocabulary = vocabulary
        self.temperature = buffer(torch.ones(1))
        self.top_p = buffer(torch.ones(1))
        # The place of the last of the top k. 0 is valid here: a process that only compiles has only zeros.
        self.last_kept = buffer(torch.full((1,), vocabulary - 1))
        self.repetition_penalty = buffer(torch.ones(1))
        self.is_greedy = buffer(torch.ones(1, dtype=torch.bool))
        self.seen = buffer(torch.zeros(vocabulary, dtype=torch.bool))
        # How often each token is in the answer, and how many are to come before it may end.
        self.counts = buffer(torch.zeros(vocabulary))
        self.missing = buffer(torch.zeros(1))
        self.ends = buffer(torch.zeros(vocabulary, dtype=torch.bool))
        self.presence_penalty = buffer(torch.zeros(1))
        self.frequency_penalty = buffer(torch.zeros(1))
        self.noise = buffer(torch.ones(vocabulary))
        self.chosen = buffer(torch.zeros(1, 1, dtype=torch.long))

    def set(self, sampling: Sampling, prompt: Tensor) -> None:
        """Take the options of a request. The tokens of its prompt, of shape [tokens], count as seen."""
        is_greedy = sampling.temperature < _LEAST_TEMPERATURE
        self.is_greedy.fill_(is_greedy)
        self.temperature.fill_(1.0 if is_greedy else sampling.temperature)
        # Because of rounding, sums of probabilities reach 1 before the last token. The first token always stays.
        self.top_p.fill_(max(sampling.top_p, _LEAST_TOP_P) if sampling.top_p < 1 else float("inf"))
        self.last_kept.fill_(min(sampling.top_k or self._vocabulary, self._vocabulary) - 1)
        self.repetition_penalty.fill_(sampling.repetition_penalty)
        self.generator.manual_seed(sampling.seed)
        self.seen.zero_()
        self.seen.index_fill_(0, prompt, True)
        self.presence_penalty.fill_(sampling.presence_penalty)
        self.frequency_penalty.fill_(sampling.frequency_penalty)
        self.counts.zero_()
        self.missing.fill_(sampling.min_tokens)
        self.ends.zero_()
        self.ends.index_fill_(0, torch.tensor(sampling.ends, dtype=torch.long, device=self.ends.device), True)

    def draw(self) -> None:
        """Draw random numbers for the next choice."""
        self.noise.exponential_(generator=self.generator)

    def see(self, token: Tensor) -> None:
        """Let `token`, of shape [1], count for the repetition penalty from now on."""
        self.seen.index_fill_(0, token, True)

    def count(self, token: Tensor) -> None:
        """Count `token`, of shape [1], as one of the answer."""
        self.counts.index_add_(0, token, torch.ones_like(token, dtype=self.counts.dtype))
        self.missing.sub_(1)

    def forward(self, logits: Tensor) -> None:
        """Choose from logits of shape [1, vocabulary], in transformers' order: penalties, temperature, top k, top p.

        The penalties for the answer's own tokens, and `min_tokens`, are vLLM's (vllm/model_executor/layers/utils.py).
        """
        scores = logits[0].float()
        penalty = self.repetition_penalty
        scores = torch.where(self.seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        scores = scores - self.frequency_penalty * self.counts - self.presence_penalty * (self.counts > 0)
        scores = torch.where(self.ends & (self.missing > 0), -torch.inf, scores)
        # A greedy request has temperature 1. Then the first token in this order is the first of the likeliest tokens.
        ordered, order = torch.sort(scores / self.temperature, descending=True, stable=True)
        # Ties with the last of the top k stay, as in TopKLogitsWarper.
        is_kept = ordered >= ordered.gather(0, self.last_kept)
        weights = torch.where(is_kept, torch.exp(ordered - ordered[0]), 0.0)
        sums = running_sum(weights)
        weights = torch.where(sums - weights < self.top_p * sums[-1], weights, 0.0)
        # The exponential race: with e from an exponential distribution, p / e is the largest with probability p.
        drawn = order.gather(0, _first_largest(weights / self.noise))
        self.chosen.copy_(torch.where(self.is_greedy, order[:1], drawn)[None])


def _first_largest(values: Tensor) -> Tensor:
    """`values.argmax(0, keepdim=True)`, of shape [1], for values that are not negative.

    It takes two steps, because Inductor gives the whole of one argmax to a single program of a GPU.
    """
    rows = F.pad(values, (0, -len(values) % _ROW), value=-1.0).view(-1, _ROW)
    largest, places = rows.max(dim=1)
    row = largest.argmax(0, keepdim=True)
    return row * _ROW + places.gather(0, row)
