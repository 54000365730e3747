"""Picture files: those that a prediction starts from, and those that it draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageOps

from models.image.sizes import Size

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MOST_PIXELS = 50_000_000
# Cog reads the files after run() has returned. So the folders of this prediction and of the one before stay.
_KEPT_FOLDERS = 2


def open_picture(path: str, background: str) -> Image.Image:
    """A picture, turned as its camera was held. Its transparent parts show the background, `white` or `black`.

    Raises:
        ValueError: the file is no picture of a usual format, or has too many pixels.
    """
    try:
        with Image.open(path, formats=_FORMATS) as picture:
            if picture.width * picture.height > _MOST_PIXELS:
                raise ValueError("a picture has more than 50 million pixels; give a smaller one")
            if picture.mode.startswith("I") or picture.mode == "F":
                raise ValueError("a picture has more than 8 bits a channel; give one of 8 bits")
            turned = ImageOps.exif_transpose(picture)
            if not turned.has_transparency_data:
                return turned.convert("RGB")
            seen = Image.new("RGBA", turned.size, background)
            seen.alpha_composite(turned.convert("RGBA"))
            return seen.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"an input is no picture that Pillow can read: {error}") from error


def fit(picture: Image.Image, size: Size, as_large_as: tuple[int, int] = (0, 0)) -> Image.Image:
    """The middle of a picture, as large as possible, in this size. A mask is made `as_large_as` its picture first, so
    that both are cut alike, and has one channel."""
    picture = picture.resize(as_large_as).convert("L") if any(as_large_as) else picture.convert("RGB")
    return ImageOps.fit(picture, (size.width, size.height), Image.Resampling.LANCZOS)


class PictureFiles:
    """A folder for each prediction. A new prediction deletes the folders older than its predecessor's."""

    def __init__(self) -> None:
        self._folders: deque[TemporaryDirectory[str]] = deque()

    def save(self, pictures: Iterable[Image.Image], file_format: str, quality: int) -> list[Path]:
        """Write the pictures of one prediction. Pillow ignores the quality of a png."""
        while len(self._folders) >= _KEPT_FOLDERS:
            self._folders.popleft().cleanup()
        self._folders.append(TemporaryDirectory(prefix="pictures-", ignore_cleanup_errors=True))
        folder = Path(self._folders[-1].name)
        paths = []
        for number, picture in enumerate(pictures):
            paths.append(folder / f"{number}.{file_format}")
            picture.save(paths[-1], quality=quality)
        return paths
