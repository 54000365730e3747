"""The inputs of a text prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
