"""Predictors with what torch.compile or a second process finds hard. hard_predictors.py serves them."""

import json
import logging

import torch
from cog import BaseRunner, Input
from torch import nn

import compile_cache

logging.basicConfig(level=logging.INFO)

WIDTH = 64


class Block(nn.Module):
    """Mixes tokens: [1, tokens, 64] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the class says."""
        return x + torch.softmax(self.mix(self.norm(x)) @ x.transpose(1, 2), -1) @ x


class BreakingBlock(Block):
    """Calls code that torch.compile cannot trace."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As its base, in two graphs."""
        x = super().forward(x)
        torch._dynamo.graph_break()
        return torch.tanh(x)


class Model(nn.Module):
    """Six blocks."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All blocks in turn."""
        for block in self.blocks:
            x = block(x)
        return x


class Predictor(BaseRunner):
    """Embeds as many tokens as it is asked for."""

    block: type[nn.Module] = Block

    def setup(self) -> None:
        """Boot, with one length warmed up."""
        with compile_cache.boot(f"hard/{type(self).__name__}@{'0' * 40}", sources=[__file__]) as self.boot:
            self.model = Model(self.block).eval()
            self.boot.compile(self.model)
            self.boot.warm_up(lambda: self.embed(16))

    def embed(self, tokens: int) -> torch.Tensor:
        """The blocks' answer to so many tokens."""
        with torch.inference_mode():
            return self.model(torch.arange(tokens * WIDTH).sin().view(1, tokens, WIDTH) / 4).float()

    def run(self, tokens: int = Input(description="How many tokens", default=16)) -> str:
        """The answer as JSON."""
        with self.boot.prediction() as prediction:
            answer = self.embed(tokens)
        for name, value in prediction.metrics().items():
            self.record_metric(name, value)
        return json.dumps(answer.flatten().tolist())


class Lengths(Predictor):
    """Its requests have another length each."""


class Breaking(Predictor):
    """Its block breaks the graph."""

    block = BreakingBlock


class Autocast(Predictor):
    """Calls its blocks under autocast."""

    def embed(self, tokens: int) -> torch.Tensor:
        """As its base, mostly in bfloat16."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().embed(tokens)


class Hooked(Predictor):
    """Keeps the answer of each block by a hook that no other process can import, as Whisper's cache does."""

    def setup(self) -> None:
        """Boot, with nothing kept yet."""
        self.kept: dict[nn.Module, torch.Tensor] = {}
        super().setup()

    def embed(self, tokens: int) -> torch.Tensor:
        """As its base, with hooks for the time of the call."""
        hooks = [
            block.register_forward_hook(lambda *call: self.kept.update({call[0]: call[2]}))
            for block in self.model.blocks
        ]
        try:
            return super().embed(tokens) + sum(answer.mean() for answer in self.kept.values())
        finally:
            for hook in hooks:
                hook.remove()
            self.kept.clear()
