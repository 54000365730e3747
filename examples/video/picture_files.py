"""Picture files, as requests have them."""

from cog import Path
from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MOST_PIXELS = 50_000_000


def read_picture(path: Path) -> Image.Image:
    """A picture, turned as its camera was held. Its transparent parts are white.

    Raises:
        ValueError: the file is no picture of a usual format, has 16 bits a channel, or has too many pixels.
    """
    try:
        with Image.open(str(path), formats=FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS or picture.mode.startswith(("I", "F")):
                raise ValueError("a picture must have at most 50 million pixels, of 8 bits a channel")
            turned = ImageOps.exif_transpose(picture)
            if not turned.has_transparency_data:
                return turned.convert("RGB")
            seen = Image.new("RGBA", turned.size, "white")
            seen.alpha_composite(turned.convert("RGBA"))
            return seen.convert("RGB")
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"a picture cannot be read: {error}") from error
