"""In place of vLLM: an engine in this process, which makes a token at a time."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

AsyncEngineArgs = SamplingParams = SimpleNamespace


@dataclass
class Text:
    """What was made so far."""

    text: str
    token_ids: list
    finish_reason: str | None = None


@dataclass
class Answer:
    """As vLLM's RequestOutput."""

    prompt_token_ids: list
    outputs: list = field(default_factory=list)


class AsyncLLMEngine:
    """Greedy, without a cache: each token is another length."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.engine = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(folder))

    @classmethod
    def from_engine_args(cls, arguments):
        """Load the folder `model`."""
        return cls(arguments.model)

    async def generate(self, prompt, sampling, request):
        """Answers, each a token longer than the last."""
        tokenizer = self.engine.tokenizer
        tokens = tokenizer(prompt).input_ids
        made = []
        while len(made) < sampling.max_tokens:
            made.append(await asyncio.to_thread(self._next, [*tokens, *made]))
            yield Answer(tokens, [Text(tokenizer.decode(made), made)])

    def _next(self, tokens):
        with torch.inference_mode():
            return int(self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
