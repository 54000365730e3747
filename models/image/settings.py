"""The settings of the image predictor, read once from the environment."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

from models.image.sizes import Size, parse_sizes

DEMO_MODEL = "demo/flux-digits"
DEFAULT_LORA_FOLDER = os.path.join(tempfile.gettempdir(), "loras")
GO_FAST = ("off", "on", "only")


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """`model` is a folder or `org/name@revision`.

    Without `image_sizes`, the model draws its own resolution in all aspect ratios. Without `warm_up_sizes`, the warm-up
    draws the first size; with `warms_up_all`, each. Downloaded LoRAs are kept in `lora_folder`, up to `lora_bytes`.
    Requests may name the LoRAs below `local_loras` by their paths. `go_fast` is one of `off`, `on` (requests choose)
    and `only`. A request may give as many as `images`.
    """

    model: str = DEMO_MODEL
    image_sizes: tuple[Size, ...] = ()
    warm_up_sizes: tuple[Size, ...] = ()
    warms_up_all: bool = False
    lora_folder: str = DEFAULT_LORA_FOLDER
    lora_bytes: int = 20_000_000_000
    go_fast: str = "off"
    local_loras: tuple[str, ...] = ()
    images: int = 1

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> ImageSettings:
        """Read `MODEL`, `IMAGE_SIZES`, `WARM_UP_SIZES` (sizes, or `all`), `LORA_DIR`, `LORA_GB`, `LORA_LOCAL`,
        `GO_FAST` and `IMAGES`. An empty variable counts as not set.

        Raises:
            ValueError: a value is invalid. The message names the variable and its mistake.
        """
        image_sizes = parse_sizes("IMAGE_SIZES", environ.get("IMAGE_SIZES", ""))
        warm_up = environ.get("WARM_UP_SIZES", "").strip()
        warms_up_all = warm_up.lower() == "all"
        warm_up_sizes = () if warms_up_all else parse_sizes("WARM_UP_SIZES", warm_up)
        unknown = [size for size in warm_up_sizes if image_sizes and size not in image_sizes]
        if unknown:
            listed = ", ".join(map(str, image_sizes))
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}, which is not in IMAGE_SIZES: {listed}")
        go_fast = environ.get("GO_FAST", "").strip().lower() or "off"
        if go_fast not in GO_FAST:
            raise ValueError(f"GO_FAST is {environ['GO_FAST']!r}; give one of {', '.join(GO_FAST)}")
        images = environ.get("IMAGES", "").strip() or "1"
        if images not in ("1", "2"):
            raise ValueError(f"IMAGES is {images!r}; give 1 or 2")
        gigabytes = environ.get("LORA_GB", "").strip() or "20"
        if not re.fullmatch(r"\d+(\.\d+)?", gigabytes) or not float(gigabytes):
            raise ValueError(f"LORA_GB is {gigabytes!r}; give gigabytes, such as 20")
        return cls(
            environ.get("MODEL", "").strip() or DEMO_MODEL,
            image_sizes,
            warm_up_sizes,
            warms_up_all,
            environ.get("LORA_DIR", "").strip() or DEFAULT_LORA_FOLDER,
            max(1, round(float(gigabytes) * 1e9)),
            go_fast,
            tuple(part.strip() for part in environ.get("LORA_LOCAL", "").split(",") if part.strip()),
            int(images),
        )
