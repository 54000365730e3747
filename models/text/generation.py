"""Generation, one sequence at a time: a prefill for each size of prompt, and a decode step.

On a GPU, each step is recorded as one CUDA graph, with sampling. Any thread can replay these graphs; torch.compile's
own graphs belong to one thread. The host queues steps before it reads the tokens of earlier steps, so the GPU never
waits for the host.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from compile_cache import Boot
from models.kernels.operators import is_compiler_imported
from models.text.layers import settle_rope, use_token_layers
from models.text.sampling import Sampler, Sampling
from models.text.schemas import Guide
from models.text.static_cache import StaticCache, check_windows, use_static_cache, watch_windows
from models.text.steps import DecodeStep, Prefill, call_model, join_operators

log = logging.getLogger(__name__)

# The number of steps queued while the host reads a token. After the last token, they are wasted.
_STEPS_AHEAD = {"cuda": 2, "cpu": 0}
# One token for the prompt, and one for the answer.
_LEAST_TOKENS = 2
# The decode step's place among the buckets, which are larger.
_DECODE = 1


@dataclass(frozen=True, slots=True)
class Request:
    """A tokenized prompt, and how to continue it."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    guide: Guide | None = None


class Generator:
    """A model, its cache and its two steps. Serves one request at a time."""

    def __init__(self, model: PreTrainedModel, cache_tokens: int, buckets: Sequence[int]) -> None:
        """Change `model` in place: replace its attention, and on a GPU also its linear layers, norms and feed-forward
        parts. The cache and each bucket have room for two tokens or more.

        Raises:
            ValueError: the model cannot be served with a static cache.
        """
        use_static_cache(model)
        settle_rope(model)
        self.device = device = model.device
        if device.type == "cuda":  # on a CPU, Inductor's code for the original layers is faster
            use_token_layers(model)
        # The most tokens that a prompt and its answer may have together.
        self.cache_tokens = cache_tokens
        self._cache = StaticCache(model.config, cache_tokens, device)
        self.vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._sampler = Sampler(self.vocabulary, device)
        self._token = torch.zeros(1, 1, dtype=torch.long, device=device)
        self._join_operators()
        # By bucket, and the decode step's.
        self._recordings: dict[int, _Recording] = {}
        self._is_to_record = True
        self._steps_ahead = _STEPS_AHEAD[device.type]
        self._readings = [_Reading(device) for _ in range(max(_STEPS_AHEAD.values()) + 2)]
        self._requests = 0
        self.buckets = tuple(sorted(buckets))
        self._prompts = {bucket: torch.zeros(1, bucket, dtype=torch.long, device=device) for bucket in self.buckets}
        self._last = torch.zeros(1, dtype=torch.long, device=device)
        self.prefill = Prefill(model, self._cache, self._sampler)
        self.decode = DecodeStep(model, self._cache, self._sampler)
        self._allocate(model)

    @torch.no_grad()  # tensors allocated in inference mode cannot be written in other modes
    def _allocate(self, model: PreTrainedModel) -> None:
        """Run a short prompt, so that each layer of the cache learns its shapes and allocates its keys and values.

        A decoded token would do the same, but needs kernels that the restore may not have delivered yet.
        """
        tokens = torch.zeros(1, _LEAST_TOKENS, dtype=torch.long, device=model.device)
        try:
            with watch_windows() as windows, sdpa_kernel(SDPBackend.MATH):  # cuDNN plans each shape for 60 ms
                places = torch.arange(_LEAST_TOKENS, device=model.device)[None]
                call_model(model, tokens, places, self._cache, 1)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"{type(model).__name__} cannot be served with a static cache: {error}") from error
        check_windows(model, self.cache_tokens, windows)

    def tokens(self, request: Request) -> Iterator[int]:
        """Generate the tokens that follow a prompt: `max_new_tokens` of them, unless the caller stops earlier.

        Each step sets the thread-local state that it needs, so that another thread may take the next token.

        Raises:
            ValueError: the prompt is empty, longer than the largest bucket, or does not fit the cache. When a token is
                asked for: the model has none that the guide allows.
            RuntimeError: when a token is asked for: another request has begun.
        """
        self.check(request)
        return self._tokens(request)

    def _tokens(self, request: Request) -> Iterator[int]:
        self._begin(request)
        mine = self._requests
        most = request.max_new_tokens
        for token in self._queued(most) if request.guide is None else self._guided(request.guide, most):
            yield token
            if self._requests != mine:
                raise RuntimeError("another request has begun: a Generator serves one at a time")

    def _queued(self, most: int) -> Iterator[int]:
        queued: deque[_Reading] = deque()
        chosen = 0
        for number in range(most):
            while chosen <= min(number + self._steps_ahead, most - 1):
                if chosen:
                    self._run(_DECODE)
                queued.append(self._read(chosen))
                chosen += 1
            yield queued.popleft().wait()

    def _guided(self, guide: Guide, most: int) -> Iterator[int]:
        """Tokens that a guide allows. Which may come depends on the last one, so no step is queued ahead: a step's own
        choice is dropped, and another one made of its logits.

        Raises:
            ValueError: the model has no token that the guide allows.
        """
        for number in range(most):
            if number:
                self._run(_DECODE)
            token = self._choose(guide.allowed())
            goes_on = guide.take(token)
            yield token
            if not goes_on:
                return

    @torch.inference_mode()
    def _choose(self, allowed: torch.Tensor) -> int:
        """Choose again from the last step's logits, among these tokens."""
        self._sampler(self._logits.masked_fill(~allowed, -torch.inf))
        self._token.copy_(self._sampler.chosen)
        return int(self._token)

    def check(self, request: Request) -> None:
        """Check that a request can be served.

        Raises:
            ValueError: the request exceeds a limit. The message names it.
        """
        prompt = len(request.prompt)
        if not prompt:
            raise ValueError("the prompt is empty")
        if (largest := max(request.prompt)) >= self.vocabulary:
            raise ValueError(
                f"the prompt has the token {largest}, but the model has embeddings for {self.vocabulary} tokens"
            )
        if prompt > self.buckets[-1]:
            raise ValueError(f"the prompt has {prompt} tokens; it may have {self.buckets[-1]} (PROMPT_BUCKETS)")
        if prompt + request.max_new_tokens > self.cache_tokens:
            raise ValueError(
                f"the prompt has {prompt} tokens, and max_tokens is {request.max_new_tokens}: together they may be "
                f"{self.cache_tokens} (CACHE_TOKENS)"
            )

    @torch.inference_mode()
    def _begin(self, request: Request) -> None:
        """Prefill and choose the first token."""
        self._requests += 1
        prompt = torch.tensor(request.prompt, device=self._token.device)
        tokens = len(prompt)
        bucket = self.buckets[bisect_left(self.buckets, tokens)]
        self._prompts[bucket].zero_()[0, :tokens] = prompt
        self._last.fill_(tokens - 1)
        self._sampler.set(request.sampling, prompt)
        self._run(bucket)
        self._cache.position.fill_(tokens)

    @torch.inference_mode()
    def _run(self, bucket: int) -> None:
        """Fill the cache with the prompt in a bucket, or decode; choose a token. A GPU only queues the work."""
        if bucket in self._recordings:
            self._recordings[bucket].replay()
            self._logits = self._recordings[bucket].logits
        else:
            self._call(bucket)

    def _call(self, bucket: int) -> None:
        self._join_operators()
        self._sampler.draw()
        if bucket == _DECODE:
            self._sampler.count(self._token[0])
            self._logits = self.decode(self._token)
            self._cache.position.add_(1)
        else:
            self._logits = self.prefill(self._prompts[bucket], self._last)
        self._token.copy_(self._sampler.chosen)

    def _join_operators(self) -> None:
        """Join operators in the graphs that this thread compiles, if the compiler is imported."""
        if self._token.is_cuda and is_compiler_imported():
            join_operators()

    @torch.inference_mode()
    def _read(self, number: int) -> _Reading:
        reading = self._readings[number % len(self._readings)]
        reading.start(self._token)
        return reading

    @torch.inference_mode()
    def renew(self, counter: Boot) -> None:
        """Call each step like a prediction, so that new code for it is compared and serves, and drop the recordings of
        other code. `counter` knows what served a call.

        The steps compute with the remains of the last request, in a cache that counts as full. Call it while no request
        is served. It may be broken off, and called again.
        """
        self._is_to_record = True
        prediction = counter.prediction()
        for bucket in self.buckets:
            self._last.fill_(bucket - 1)
            self._call(bucket)
        self._cache.position.fill_(self.cache_tokens - 1)
        self._call(_DECODE)
        for served in (prediction.served(), *(one.served for one in self._recordings.values())):
            if {step for steps in served.values() for step in steps} != {"eager"}:
                self._recordings = {}

    @torch.inference_mode()
    def record(self, counter: Boot | None = None, *, prompts: bool = True) -> None:
        """Record the step and the prefill of each bucket as CUDA graphs, if they are not recorded yet. `counter` counts
        the calls by the code that serves them. Without `prompts`, the prefills are left to the next call.

        Without a GPU, this does nothing. If the step cannot be recorded, nothing is recorded. If one prefill cannot be
        recorded, no prefill is. Failed recordings are tried again after `renew` has called a step. Call it while no
        request is served.
        """
        if not self._token.is_cuda or not self._is_to_record:
            return
        # The last request's values may exceed the smallest bucket, or point behind the end of the cache.
        self._last.zero_()
        self._cache.position.zero_()
        if prompts:
            self._record("prompts", self.buckets, counter)
        self._record("the decode step", [_DECODE], counter)
        self._is_to_record = not prompts

    def _record(self, what: str, buckets: Sequence[int], counter: Boot | None) -> None:
        if not self._recordings:  # without recordings, there is no memory to share
            self._stream, self._pool = torch.cuda.Stream(self._token.device), torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream()
        try:
            for bucket in buckets:
                if bucket not in self._recordings:
                    self._recordings[bucket] = self._recorded(bucket, counter)
        except BaseException as error:  # the request that waits for a recording may be cancelled
            # A failed recording leaves its stream current and its generator in recording mode. All recordings draw
            # from that generator.
            torch.cuda.set_stream(stream)
            self._sampler.generator = torch.Generator(self._token.device)
            self._recordings = {}
            if not isinstance(error, RuntimeError):
                raise
            log.warning("%s cannot be recorded as a CUDA graph, so answers are slower: %s", what, error)

    def _recorded(self, bucket: int, counter: Boot | None) -> _Recording:
        """Record one call. All recordings share their memory: only one at a time may be replayed, and its results must
        be outside that memory.

        Raises:
            RuntimeError: CUDA cannot record a part of the call.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # the first call allocates memory, and that must not be recorded
            self._call(bucket)
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self._sampler.generator)
        counted = counter.prediction() if counter else None
        # Other threads may use the GPU during the recording.
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            self._call(bucket)
        return _Recording(graph, self._logits, counted.served() if counted else {}, counter)


@dataclass(frozen=True, slots=True)
class _Recording:
    """A call as a CUDA graph, its logits until the next replay of any, and the code that served its modules when it was
    recorded."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    served: Mapping[str, Mapping[str, int]]
    counter: Boot | None

    def replay(self) -> None:
        """Queue the call. A replay calls no module, so it is counted here."""
        self.graph.replay()
        if self.counter is not None:
            self.counter.count_again(self.served)


class _Reading:
    """One token on its way from the device to the host."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._token = torch.zeros(1, 1, dtype=torch.long, pin_memory=self._is_cuda)
        self._arrived = torch.cuda.Event() if self._is_cuda else None

    def start(self, token: torch.Tensor) -> None:
        """Queue the copy behind the work of the device."""
        self._token.copy_(token, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def wait(self) -> int:
        """Wait for the token, but not for work that was queued after it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._token)
