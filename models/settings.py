"""Which model to serve, and how: read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.image.sizes import Size, parse_sizes

DEMO_MODEL = "demo/flux-digits"
DEMO_TEXT_MODEL = "demo/llama-adder"
QUANTIZATIONS = ("int8", "fp8")
# A prompt of one token would be taken for one that is decoded.
_LEAST_BUCKET = 2


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """`model` is a folder or `org/name@revision`. Without `image_sizes` they are those of the model's own resolution;
    without `warm_up_sizes`, the first of them is warmed up."""

    model: str = DEMO_MODEL
    image_sizes: tuple[Size, ...] = ()
    warm_up_sizes: tuple[Size, ...] = ()

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> ModelSettings:
        """Read `MODEL`, `IMAGE_SIZES` and `WARM_UP_SIZES`; an empty one counts as not set.

        Raises:
            ValueError: names the variable and what is wrong with it.
        """
        image_sizes = parse_sizes("IMAGE_SIZES", environ.get("IMAGE_SIZES", ""))
        warm_up_sizes = parse_sizes("WARM_UP_SIZES", environ.get("WARM_UP_SIZES", ""))
        unknown = [size for size in warm_up_sizes if image_sizes and size not in image_sizes]
        if unknown:
            raise ValueError(f"WARM_UP_SIZES has {unknown[0]}, which is not in IMAGE_SIZES: {listed(image_sizes)}")
        return cls(environ.get("MODEL", "").strip() or DEMO_MODEL, image_sizes, warm_up_sizes)


def listed(sizes: tuple[Size, ...]) -> str:
    """`1024x1024, 1344x768`."""
    return ", ".join(map(str, sizes))


@dataclass(frozen=True, slots=True)
class TextSettings:
    """`model` is a folder or `org/name@revision`. Without `cache_tokens` they are the model's own positions, up to
    4096; without `prompt_buckets`, 128, 512, 2048 … and the whole cache. With `quantize`, weights are int8 or fp8."""

    model: str = DEMO_TEXT_MODEL
    cache_tokens: int | None = None
    prompt_buckets: tuple[int, ...] = ()
    quantize: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TextSettings:
        """Read `MODEL`, `CACHE_TOKENS`, `PROMPT_BUCKETS` and `QUANTIZE`; an empty one counts as not set.

        Raises:
            ValueError: names the variable and what is wrong with it.
        """
        cache = _tokens("CACHE_TOKENS", environ.get("CACHE_TOKENS", ""))
        if len(cache) > 1:
            raise ValueError(f"CACHE_TOKENS has {len(cache)} numbers; give one")
        buckets = _tokens("PROMPT_BUCKETS", environ.get("PROMPT_BUCKETS", ""))
        quantize = environ.get("QUANTIZE", "").strip() or None
        if quantize not in (None, *QUANTIZATIONS):
            raise ValueError(f"QUANTIZE is {quantize!r}; give one of {', '.join(QUANTIZATIONS)}, or nothing")
        model = environ.get("MODEL", "").strip() or DEMO_TEXT_MODEL
        return cls(model, cache[0] if cache else None, buckets, quantize)


def _tokens(variable: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isascii() or not part.isdigit() or int(part) < _LEAST_BUCKET]
    if wrong:
        raise ValueError(f"{variable} has {wrong[0]!r}; give numbers of tokens from {_LEAST_BUCKET} on, as 128,2048")
    return tuple(sorted({int(part) for part in parts}))
