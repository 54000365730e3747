"""The inputs of a text prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.inputs import LARGEST_SEED, Bounds, check_inputs

# Cog reads the same bounds from literals in predict.py; a test compares the two.
BOUNDS = {
    "prompt": Bounds(str),
    "system_prompt": Bounds(str),
    "max_new_tokens": Bounds(int, 1, is_optional=True),
    "temperature": Bounds(float, 0, 5, is_optional=True),
    "top_p": Bounds(float, 0, 1, is_optional=True),
    "top_k": Bounds(int, 0, is_optional=True),
    "repetition_penalty": Bounds(float, 0.1, 10, is_optional=True),
    "seed": Bounds(int, 0, LARGEST_SEED),
}


@dataclass(frozen=True, slots=True)
class TextInputs:
    """One text to continue. None leaves a value to the model's own generation_config.json."""

    prompt: str
    system_prompt: str = ""
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    stop_sequences: Sequence[str] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every input.

        Raises:
            ValueError: an input is out of its bounds. The message names each such input.
        """
        check_inputs(self, BOUNDS)
        if not isinstance(self.stop_sequences, list | tuple):
            raise ValueError(f"stop_sequences is {self.stop_sequences!r}; give a list of texts")
        if wrong := [text for text in self.stop_sequences if not isinstance(text, str) or not text]:
            raise ValueError(f"stop_sequences has {wrong[0]!r}; give texts that are not empty")
