"""The inputs of an image prediction, and of each of its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from models.image.sizes import ASPECT_RATIOS, Size, choose_size
from models.inputs import LARGEST_SEED, Bounds, check_inputs

# Cog reads the same bounds from literals in predict.py; a test compares the two.
BOUNDS = {
    "prompt": Bounds(str),
    "negative_prompt": Bounds(str),
    "aspect_ratio": Bounds(str, choices=ASPECT_RATIOS, is_optional=True),
    "width": Bounds(int, 1, is_optional=True),
    "height": Bounds(int, 1, is_optional=True),
    "num_outputs": Bounds(int, 1, 8),
    "num_inference_steps": Bounds(int, 1, 200, is_optional=True),
    "guidance_scale": Bounds(float, 0, 50, is_optional=True),
    "seed": Bounds(int, 0, LARGEST_SEED),
    "output_format": Bounds(str, choices=("png", "webp", "jpg")),
    "output_quality": Bounds(int, 1, 100),
}


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


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """One prediction: `num_outputs` pictures with seeds counting up."""

    prompt: str
    negative_prompt: str = ""
    aspect_ratio: str | None = None
    width: int | None = None
    height: int | None = None
    num_outputs: int = 1
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    output_format: str = "webp"
    output_quality: int = 90

    def __post_init__(self) -> None:
        """Check every input.

        Raises:
            ValueError: an input is out of its bounds. The message names each such input.
        """
        check_inputs(self, BOUNDS)

    def pictures(self, sizes: Sequence[Size]) -> list[ImageInputs]:
        """The pictures, in one of the model's `sizes`.

        Raises:
            ValueError: the model has no such size.
        """
        size = choose_size(sizes, self.aspect_ratio, self.width, self.height)
        return [
            ImageInputs(
                self.prompt,
                size,
                (self.seed + number) % (LARGEST_SEED + 1),
                self.negative_prompt,
                self.num_inference_steps,
                self.guidance_scale,
            )
            for number in range(self.num_outputs)
        ]
