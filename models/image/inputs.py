"""The inputs of one picture."""

from __future__ import annotations

from dataclasses import dataclass

from models.image.sizes import Size


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """One picture to draw, with a bar for its steps in the log or without. None is the pipeline's own default."""

    prompt: str
    size: Size
    seed: int
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    shows_progress: bool = True
