"""Text generation: any causal language model of transformers that can use a static cache, by folder or hub id."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from compile_cache import Boot
from models import leave_out_foreign_lines, load_to_device
from models.text.chats import rendered
from models.text.generation import Generator, Request
from models.text.layers import most_positions
from models.text.quantization import quantize
from models.text.sampling import Sampling
from models.text.schemas import Schemas
from models.text.settings import TextSettings
from models.text.steps import register
from models.text.stream import TextStream

log = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 512
# The default of transformers' `generate`.
_DEFAULT_TOP_K = 50
_WARM_UP_TOKENS = 4
# Settings of generation_config.json that are followed, and those that change no text here.
_FOLLOWED = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "stop_strings", "eos_token_id")
_WITHOUT_EFFECT = ("bos_token_id", "pad_token_id", "cache_implementation", "transformers_version", "_from_model_config")


def import_model(model: str, revision: str | None) -> None:
    """Import and register the class of `model`, so that loading it imports next to nothing, and logs no progress.

    Restored functions that load beside the weights need the class registered.

    Raises:
        OSError: there is no such folder or repository.
    """
    leave_out_foreign_lines()
    config = AutoConfig.from_pretrained(model, revision=revision)
    with contextlib.suppress(Exception):  # loading the model has the better message
        register(config, AutoModelForCausalLM.from_config)


@dataclass(frozen=True, slots=True)
class TextInputs:
    """One text to continue. None leaves a value to the model's own generation_config.json."""

    prompt: str | None = None
    system_prompt: str = ""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    # A text is split at its commas.
    stop_sequences: Sequence[str] | str | None = None
    seed: int = 0
    messages: Sequence[Any] | None = None
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # A text keeps the order of its keys.
    json_schema: str | Mapping[str, Any] | None = None


class Answer:
    """An answer: iterating over it, once, generates its text in pieces of whole characters, and counts its tokens.
    `finish_reason` says how it ended: `stop` (an end token, or a stop sequence), `schema` (the JSON is complete),
    `length`, or until then `cancelled`.
    """

    def __init__(self, request: Request, tokens: Iterator[int], stream: TextStream, ends: frozenset[int]) -> None:
        self.prompt_tokens, self._guide = len(request.prompt), request.guide
        self.new_tokens = 0
        self.finish_reason = "cancelled"
        self._tokens, self._stream, self._ends = tokens, stream, ends

    def __iter__(self) -> Iterator[str]:
        for token in self._tokens:
            self.new_tokens += 1
            if piece := self._stream.add(token):
                yield piece
            if self._stream.has_stopped or token in self._ends:
                reason = "stop"
                break
        else:
            reason = "length"
        if self._guide and self._guide.is_complete and not self._stream.has_stopped:
            reason = "schema"
        if piece := self._stream.end():
            yield piece
        self.finish_reason = reason


class TextModel:
    """A loaded model with its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, settings: TextSettings) -> None:
        """Allocate the cache.

        Raises:
            ValueError: the model or the tokenizer cannot be served, or the settings do not fit the model.
        """
        if not tokenizer.is_fast:
            raise ValueError(f"{type(tokenizer).__name__} cannot stream text: the model needs a tokenizer.json")
        self._tokenizer = tokenizer
        self._defaults = model.generation_config
        _check_defaults(model.generation_config)
        ends = _given(model.generation_config.eos_token_id, tokenizer.eos_token_id, ())
        self._ends = frozenset([ends] if isinstance(ends, int) else ends)
        cache_tokens = _cache_tokens(model, settings)
        buckets = settings.prompt_buckets or default_buckets(cache_tokens)
        if wrong := [bucket for bucket in buckets if bucket > cache_tokens]:
            raise ValueError(f"PROMPT_BUCKETS has {wrong[0]}, more than CACHE_TOKENS, which is {cache_tokens}")
        self.generator = Generator(model, cache_tokens, buckets)

    @classmethod
    def load(cls, model: str, revision: str | None, settings: TextSettings, boot: Boot | None = None) -> TextModel:
        """Load a folder or hub id: bf16 on the GPU where there is one, else fp32 on the CPU.

        Raises:
            OSError: there is no such folder or repository.
            ValueError: the model cannot be served.
        """
        # The model comes first, because making it fills registries of transformers. Precompiled regions load at the
        # same time, and need them.
        loaded = load_model(model, revision, boot)
        if settings.quantize:
            quantize(loaded, settings.quantize)
        return cls(loaded, AutoTokenizer.from_pretrained(model, revision=revision), settings)

    def warm_up_inputs(self) -> list[Request]:
        """A request for each bucket. Greedy and sampled requests take the same steps."""
        cache, buckets = self.generator.cache_tokens, self.generator.buckets
        requests = []
        for shorter, bucket in zip((0, *buckets), buckets, strict=False):
            length = min(bucket, max(shorter + 1, cache - _WARM_UP_TOKENS), cache - 1)
            requests.append(Request((0,) * length, min(_WARM_UP_TOKENS, cache - length)))
        return requests

    def run(self, request: Request) -> list[int]:
        """Generate the tokens that follow a tokenized prompt."""
        return list(self.generator.tokens(request))

    def answer(self, inputs: TextInputs) -> Answer:
        """The answer to a prompt or chat. Iterating over it generates the text.

        Raises:
            ValueError: the model cannot take an input.
        """
        request = self.request(inputs)
        stop = self._stop_sequences(inputs)
        backend, least = self._tokenizer.backend_tokenizer, request.sampling.min_tokens
        stream = TextStream(backend, stop, request.prompt, self._ends, least)
        return Answer(request, self.generator.tokens(request), stream, self._ends)

    def _stop_sequences(self, inputs: TextInputs) -> list[str]:
        given = inputs.stop_sequences
        if isinstance(given, str):  # as cog-vllm does
            return [part for part in given.split(",") if part]
        given = _given(given, self._defaults.stop_strings, ())
        return [given] if isinstance(given, str) else list(given)

    def request(self, inputs: TextInputs) -> Request:
        """Tokenize the prompt, and take the model's defaults for inputs that are None.

        Raises:
            ValueError: the model cannot take an input.
        """
        if inputs.max_tokens is not None and inputs.max_new_tokens is not None:
            raise ValueError("max_tokens and max_new_tokens are one input with two names; give one of them")
        prompt = self._tokenize(inputs)
        room = self.generator.cache_tokens - len(prompt)
        new_tokens = _given(inputs.max_tokens, inputs.max_new_tokens, max(1, min(_DEFAULT_NEW_TOKENS, room)))
        sampling = _sampling(inputs, self._defaults, tuple(sorted(self._ends)))
        if sampling.min_tokens > new_tokens:
            raise ValueError(f"min_tokens is {sampling.min_tokens}, more than the {new_tokens} tokens of max_tokens")
        guide = None
        if inputs.json_schema is not None:
            if sampling.min_tokens:
                raise ValueError("min_tokens cannot be given with json_schema, which says when the answer ends")
            guide = self._schemas.guide(inputs.json_schema)
        return Request(prompt, new_tokens, sampling, guide)

    @cached_property
    def _schemas(self) -> Schemas:
        return Schemas(self._tokenizer, self.generator.vocabulary, self._ends, self.generator.device)

    def _check_length(self, name: str, text: str) -> None:
        """Check that a text has no more characters than the longest token, as often as a prompt may have tokens.

        Tokenizing takes some 200 bytes for each character. The limit holds even where a tokenizer drops characters.

        Raises:
            ValueError: it has more. The message names it, and its limit.
        """
        length, tokens = len(text), self.generator.buckets[-1]
        if length > tokens and length > (most := tokens * self._longest_token):
            raise ValueError(f"{name} has {length} characters; it may have {most} ({tokens} tokens, PROMPT_BUCKETS)")

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()))

    def _tokenize(self, inputs: TextInputs) -> tuple[int, ...]:
        """The tokens of a prompt, or of a chat.

        Raises:
            ValueError: there are both or none, or one is too long, or wrong.
        """
        if (inputs.prompt is None) == (inputs.messages is None):
            raise ValueError("give a prompt, or messages" + ("" if inputs.prompt is None else ", but not both"))
        if inputs.messages is not None and inputs.system_prompt:
            raise ValueError("give the system_prompt as the first of the messages, with the role system")
        text, messages = inputs.prompt, inputs.messages
        is_chat = messages is not None or self._tokenizer.chat_template is not None
        if is_chat or inputs.system_prompt or inputs.tools or inputs.chat_template_kwargs:
            if messages is None:
                messages = [{"role": "system", "content": inputs.system_prompt}] if inputs.system_prompt else []
                messages.append({"role": "user", "content": text})
            text = rendered(self._tokenizer, messages, inputs.tools, inputs.chat_template_kwargs)
        self._check_length("the prompt", text)
        self._check_length("stop_sequences", "".join(self._stop_sequences(inputs)))
        return tuple(self._tokenizer(text, add_special_tokens=not is_chat)["input_ids"])


def load_model(model: str, revision: str | None, boot: Boot | None = None) -> PreTrainedModel:
    """Load a model in bf16 to the GPU, or in fp32 without one, as `AutoModelForCausalLM.from_pretrained` does.

    Raises:
        OSError: there is no such folder or repository, or a file is missing or damaged.
        ValueError: the weights are quantized already.
    """
    config = AutoConfig.from_pretrained(model, revision=revision)
    if quantized := getattr(config, "quantization_config", None):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ValueError(
            f"{model} is quantized already ({method}), for kernels that cannot be compiled here. Serve the original "
            "model with QUANTIZE=int8 or fp8."
        )
    if boot is not None and _is_converted(config):
        boot.weights.drop()
    return load_to_device(partial(AutoModelForCausalLM.from_pretrained, model, revision=revision), boot)


def _is_converted(config: Any) -> bool:
    """Whether `from_pretrained` makes weights, such as those of experts, from several stored weights.

    On a CPU, this is slow and takes memory.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    mapping = get_checkpoint_conversion_mapping(config.model_type) or ()
    return any(isinstance(entry, WeightConverter) for entry in mapping)


def default_buckets(cache_tokens: int) -> tuple[int, ...]:
    """128, 512, 2048 … below the length of the cache, and the length of the cache."""
    buckets = []
    size = 128
    while size < cache_tokens:
        buckets.append(size)
        size *= 4
    return (*buckets, cache_tokens)


def _cache_tokens(model: PreTrainedModel, settings: TextSettings) -> int:
    positions = most_positions(model.config)
    if settings.cache_tokens is None:
        return min(4096, positions or 4096)
    if positions is not None and settings.cache_tokens > positions:
        raise ValueError(f"CACHE_TOKENS is {settings.cache_tokens}; the model has {positions} positions")
    return settings.cache_tokens


def _check_defaults(defaults: Any) -> None:
    """Log which of a model's settings are ignored.

    Raises:
        ValueError: another setting is out of its range.
    """
    _sampling(TextInputs(temperature=defaults.temperature), defaults)
    unset = defaults._get_default_generation_params()
    given = {name for name, value in defaults.to_diff_dict().items() if value not in (unset.get(name, False), [], {})}
    if ignored := sorted(given - {*_FOLLOWED, *_WITHOUT_EFFECT}):
        log.warning("generation_config.json sets %s, which is ignored here: answers may differ", ", ".join(ignored))


def _sampling(inputs: TextInputs, defaults: Any, ends: tuple[int, ...] = ()) -> Sampling:
    """The inputs, and the model's defaults for those that are None.

    Raises:
        ValueError: a value is out of its range.
    """
    temperature = defaults.temperature if defaults.do_sample else 0.0
    return Sampling(
        temperature=_given(inputs.temperature, temperature, 1.0),
        top_p=_given(inputs.top_p, defaults.top_p, 1.0),
        top_k=_given(inputs.top_k, defaults.top_k, _DEFAULT_TOP_K),
        repetition_penalty=_given(inputs.repetition_penalty, defaults.repetition_penalty, 1.0),
        seed=inputs.seed,
        presence_penalty=_given(inputs.presence_penalty, 0.0),
        frequency_penalty=_given(inputs.frequency_penalty, 0.0),
        min_tokens=_given(inputs.min_tokens, 0),
        ends=ends,
    )


def _given(*values: Any) -> Any:
    return next(value for value in values if value is not None)
