"""Generation, one sequence at a time: a prefill for each size of prompt, and a decode step.

On a GPU each of them is recorded whole, sampling included, as a CUDA graph, which any thread can replay; what
torch.compile itself records belongs to the thread that recorded it. The host runs some steps ahead of the tokens it
has looked at, so that looking at them costs the GPU nothing.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from models.text.rotary_table import use_rotary_tables
from models.text.sampling import Sampler, Sampling
from models.text.static_cache import StaticCache, use_static_cache, watch_windows
from models.text.supported import check_windows, settle_rope
from models.text.token_graph import join_operators
from models.text.token_layers import use_token_layers

log = logging.getLogger(__name__)

# Steps that are queued on the GPU while the host looks at a token: what is thrown away after the last one.
_STEPS_AHEAD = 2
# One of the prompt, and one after it.
_LEAST_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenized prompt, and how to go on from it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)


class Prefill(nn.Module):
    """A whole prompt through the model, padded to a bucket: what to compile, once for each bucket."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, sampler: Sampler) -> None:
        super().__init__()
        self.model, self.sampler = model, sampler
        self._cache = cache

    def forward(self, tokens: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Fill the cache, choose the next token; the logits it was chosen from.

        tokens: [1, bucket], last: [1], the index of the last token that is no padding; logits: [1, vocabulary].
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        logits = _call(self.model, tokens, places, self._cache, last)
        self.sampler(logits)
        return logits


class DecodeStep(nn.Module):
    """One token through the model: what to compile. It moves nothing on, so that the same call twice does the same."""

    def __init__(self, model: PreTrainedModel, cache: StaticCache, sampler: Sampler) -> None:
        super().__init__()
        self.model, self.sampler = model, sampler
        self._cache = cache

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        """Write `token` at the cache's position, choose the next one; the logits it was chosen from.

        token: [1, 1], logits: [1, vocabulary].
        """
        logits = _call(self.model, token, self._cache.position[None], self._cache, 1)
        self.sampler.see(token[0])
        self.sampler(logits)
        return logits


def _call(
    model: PreTrainedModel, tokens: torch.Tensor, places: torch.Tensor, cache: StaticCache, keep: int | torch.Tensor
) -> torch.Tensor:
    output = model(
        tokens,
        position_ids=places,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
        position=cache.position,
    )
    logits: torch.Tensor = output.logits
    return logits[:, 0]


class Generator:
    """A model, its cache and its two steps. One sequence at a time; each request begins anew."""

    def __init__(self, model: PreTrainedModel, cache_tokens: int, buckets: Sequence[int]) -> None:
        """Take `model` over: its attention and rotary embeddings are replaced, and on a GPU its linear layers, norms
        and feed-forward parts.

        Raises:
            ValueError: the model cannot be served with a static cache, or the cache or a bucket is too small.
        """
        if cache_tokens < _LEAST_TOKENS:
            raise ValueError(f"CACHE_TOKENS is {cache_tokens}; a prompt and an answer take at least {_LEAST_TOKENS}")
        if min(buckets) < _LEAST_TOKENS:  # one token is taken for the next one of a text
            raise ValueError(f"a bucket has room for {min(buckets)} tokens; it takes at least {_LEAST_TOKENS}")
        use_static_cache(model)
        settle_rope(model)
        use_rotary_tables(model, cache_tokens)
        device = model.device
        if device.type == "cuda":  # on a CPU, what Inductor makes of the layers is faster
            use_token_layers(model)
        self._cache = StaticCache(model.config, cache_tokens, device)
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._sampler = Sampler(self._vocabulary, device)
        self._token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._join_operators()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._prompt_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._steps_ahead = _STEPS_AHEAD if device.type == "cuda" else 0
        self._readings = [_Reading(device) for _ in range(self._steps_ahead + 2)]
        self._requests = 0
        self.buckets = tuple(sorted(buckets))
        self._prompts = {bucket: torch.zeros(1, bucket, dtype=torch.long, device=device) for bucket in self.buckets}
        self._last = torch.zeros(1, dtype=torch.long, device=device)
        self.prefill = Prefill(model, self._cache, self._sampler)
        self.decode = DecodeStep(model, self._cache, self._sampler)
        self._allocate(model)

    @torch.no_grad()  # in inference mode, they would be tensors that no other mode may write to
    def _allocate(self, model: PreTrainedModel) -> None:
        """Let the layers allocate their keys and values, which only their own states tell the shapes of. A step of
        decoding would do as well, but it launches kernels that may still be on their way from the store."""
        tokens = torch.zeros(1, _LEAST_TOKENS, dtype=torch.long, device=model.device)
        try:
            with watch_windows() as windows:
                _call(model, tokens, torch.arange(_LEAST_TOKENS, device=model.device)[None], self._cache, 1)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{type(model).__name__} cannot be served with a static cache: {error}") from error
        check_windows(model, self.cache_tokens, windows)

    @property
    def cache_tokens(self) -> int:
        """The most tokens of a prompt and what is generated together."""
        return self._cache.tokens

    @property
    def is_recorded(self) -> bool:
        """Whether the prefill of each bucket and the step are CUDA graphs."""
        return self._graph is not None and len(self._prompt_graphs) == len(self.buckets)

    def tokens(self, request: Request) -> Iterator[int]:
        """Generate the tokens that follow a prompt, `max_new_tokens` of them unless the caller stops before.

        Sets all the thread-local state it needs in each step: between two of them another thread may go on.

        Raises:
            ValueError: the prompt is empty, or longer than the largest bucket, or does not fit the cache.
            RuntimeError: another request has begun before this one has ended.
        """
        self.check(request)
        self._begin(request)
        mine = self._requests
        queued: deque[_Reading] = deque()
        chosen = 0
        for number in range(request.max_new_tokens):
            while chosen <= min(number + self._steps_ahead, request.max_new_tokens - 1):
                if chosen:
                    self._advance()
                queued.append(self._read(chosen))
                chosen += 1
            yield queued.popleft().wait()
            if self._requests != mine:
                raise RuntimeError("another request has begun: a Generator serves one at a time")

    def check(self, request: Request) -> None:
        """Whether a request can be served.

        Raises:
            ValueError: says which limit it passes.
        """
        prompt = len(request.prompt)
        if not prompt:
            raise ValueError("the prompt is empty")
        if (largest := max(request.prompt)) >= self._vocabulary:
            raise ValueError(f"the prompt has the token {largest}, and the model has embeddings for {self._vocabulary}")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}; it must be 1 or more")
        if prompt + request.max_new_tokens > self.cache_tokens:
            raise ValueError(
                f"the prompt has {prompt} tokens, and max_new_tokens is {request.max_new_tokens}: together they may be "
                f"{self.cache_tokens} (CACHE_TOKENS)"
            )
        if prompt > self.buckets[-1]:
            raise ValueError(f"the prompt has {prompt} tokens; it may have {self.buckets[-1]} (PROMPT_BUCKETS)")

    @torch.inference_mode()
    def _begin(self, request: Request) -> None:
        """Prefill, and choose the first token."""
        self._requests += 1
        self._join_operators()
        prompt = torch.tensor(request.prompt, device=self._token.device)
        tokens = len(prompt)
        bucket = self.buckets[bisect_left(self.buckets, tokens)]
        self._prompts[bucket].zero_()[0, :tokens] = prompt
        self._last.fill_(tokens - 1)
        self._sampler.set(request.sampling, prompt)
        self.fill(bucket)
        self._cache.position.fill_(tokens)

    @torch.inference_mode()
    def fill(self, bucket: int) -> None:
        """Fill the cache with the prompt that is in a bucket, and choose the first token. On a GPU, queue it."""
        if bucket in self._prompt_graphs:
            self._prompt_graphs[bucket].replay()
        else:
            self._prompt(bucket)

    def _prompt(self, bucket: int) -> None:
        self._sampler.draw()
        self.prefill(self._prompts[bucket], self._last)
        self._token.copy_(self._sampler.chosen)

    @torch.inference_mode()
    def _advance(self) -> None:
        """Choose the next token. On a GPU, queue it."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step()

    def _step(self) -> None:
        self._join_operators()
        self._sampler.draw()
        self.decode(self._token)
        self._token.copy_(self._sampler.chosen)
        self._cache.position.add_(1)

    def _join_operators(self) -> None:
        """In what this thread compiles, if it compiles anything."""
        if self._token.is_cuda:
            join_operators()

    @torch.inference_mode()
    def _read(self, number: int) -> _Reading:
        reading = self._readings[number % len(self._readings)]
        reading.start(self._token)
        return reading

    @torch.inference_mode()
    def record(self) -> None:
        """Record the prompts of each bucket and the step, as they are compiled now, as CUDA graphs; nothing without a
        GPU, or if something in the step cannot be recorded, and no prompts if one of them cannot. Call it when nothing
        is generated."""
        if not self._token.is_cuda:
            return
        self._graph, self._prompt_graphs = None, {}
        # Of the requests before, they need not fit the smallest bucket, and the cache may be full.
        self._last.zero_()
        self._cache.position.zero_()
        prompts = [functools.partial(self._prompt, bucket) for bucket in self.buckets]
        prompt_graphs = self._recorded("prompts", prompts)
        step_graphs = self._recorded("the decode step", [self._step])
        if step_graphs:  # otherwise what prompts were recorded with is replaced
            self._graph = step_graphs[0]
            self._prompt_graphs = dict(zip(self.buckets, prompt_graphs, strict=False))

    def _recorded(self, what: str, calls: Sequence[Callable[[], None]]) -> list[torch.cuda.CUDAGraph]:
        stream, recorder = torch.cuda.current_stream(), _Recorder(self._token.device)
        try:
            return [recorder.record(call, self._sampler.generator) for call in calls]
        except RuntimeError as error:
            log.warning("what cannot be recorded is launched kernel by kernel: %s (%s)", what, error)
            # A recording that fails leaves its stream current, and its generator as if it were still recorded.
            torch.cuda.set_stream(stream)
            self._sampler.generator = torch.Generator(self._token.device)
            return []


class _Recorder:
    """Records calls as CUDA graphs that share their memory: one at a time is replayed, and its results are outside."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], None], generator: torch.Generator) -> torch.cuda.CUDAGraph:
        """One call, which draws random numbers from `generator`.

        Raises:
            RuntimeError: something in it cannot be recorded.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # what is allocated at first use is not part of a recording
            call()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            call()
        return graph


class _Reading:
    """One token on its way from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._token = torch.zeros(1, 1, dtype=torch.long, pin_memory=self._is_cuda)
        self._arrived = torch.cuda.Event() if self._is_cuda else None

    def start(self, token: torch.Tensor) -> None:
        """Queue the copy after what the device has to do."""
        self._token.copy_(token, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> int:
        """The token; waits for it, and for nothing that was queued later."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._token)
