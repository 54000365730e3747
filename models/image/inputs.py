"""What one picture is drawn from, and how a request's inputs say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from PIL import Image

from models.image.pictures import open_picture
from models.image.sizes import Size, choose_size, nearest_size, sizes_of

_File = PathLike[str] | None


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """One picture to draw, with a bar for its steps in the log or without. None is the pipeline's own default.

    It starts from `image`, if given, and changes it by `strength`, 0 to 1; with a `mask`, only where that is white.
    `image_2` is a second one, for pipelines that take two. With `go_fast`, products are in float8.
    """

    prompt: str
    size: Size
    seed: int
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    image: Image.Image | None = None
    image_2: Image.Image | None = None
    mask: Image.Image | None = None
    strength: float | None = None
    go_fast: bool = False
    shows_progress: bool = True


def inputs_of(
    sizes: Sequence[Size],
    *,
    is_editing: bool,
    aspect_ratio: str | None,
    megapixels: str | None,
    width: int | None,
    height: int | None,
    image: _File,
    image_2: _File,
    mask: _File,
    **others: Any,
) -> ImageInputs:
    """A request's inputs for a model that draws `sizes`; `others` are those of `ImageInputs` itself.

    An image decides the size, unless the model edits it (`is_editing`) and the request asks for a shape.

    Raises:
        ValueError: a file is no picture, or the model draws no such size.
    """
    start = open_picture(str(image), "white") if image else None
    offered = sizes_of(sizes, megapixels) if megapixels and not (width or height) else sizes
    if start is not None and not (is_editing and (aspect_ratio or width or height)):
        size = nearest_size(offered, *start.size)
    else:
        size = choose_size(offered, aspect_ratio, width, height)
    return ImageInputs(
        size=size,
        image=start,
        image_2=open_picture(str(image_2), "white") if image_2 else None,
        mask=open_picture(str(mask), "black") if mask else None,
        **others,
    )
