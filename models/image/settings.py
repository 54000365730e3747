"""The settings of the image predictor, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.image.sizes import Size, parse_sizes

DEMO_MODEL = "demo/flux-digits"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`model` is a folder or `org/name@revision`.

    Without `image_sizes`, the model draws its own resolution in all aspect ratios. Without `warm_up_sizes`, the warm-up
    draws the first size.
    """

    model: str = DEMO_MODEL
    image_sizes: tuple[Size, ...] = ()
    warm_up_sizes: tuple[Size, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> ImageSettings:
        """Read `MODEL`, `IMAGE_SIZES` and `WARM_UP_SIZES`. An empty variable counts as not set.

        Raises:
            ValueError: a value is invalid. The message names the variable and its mistake.
        """
        image_sizes = parse_sizes("IMAGE_SIZES", environ.get("IMAGE_SIZES", ""))
        warm_up_sizes = parse_sizes("WARM_UP_SIZES", environ.get("WARM_UP_SIZES", ""))
        unknown = [size for size in warm_up_sizes if image_sizes and size not in image_sizes]
        if unknown:
            listed = ", ".join(map(str, image_sizes))
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}, which is not in IMAGE_SIZES: {listed}")
        return cls(environ.get("MODEL", "").strip() or DEMO_MODEL, image_sizes, warm_up_sizes)
