"""The settings of the text predictor, read once from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEMO_MODEL = "demo/llama-adder"
QUANTIZATIONS = ("int8", "fp8")
# A prompt of one token would look like a token to decode.
_LEAST_BUCKET = 2


@dataclass(frozen=True, slots=True)
class TextSettings:
    """`model` is a folder or `org/name@revision`.

    By default, `cache_tokens` is the model's number of positions, at most 4096. `prompt_buckets` are 128, 512, 2048 …
    and the whole cache. Weights are not quantized.
    """

    model: str = DEMO_MODEL
    cache_tokens: int | None = None
    prompt_buckets: tuple[int, ...] = ()
    quantize: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> TextSettings:
        """Read `MODEL`, `CACHE_TOKENS`, `PROMPT_BUCKETS` and `QUANTIZE`. An empty variable counts as not set.

        Raises:
            ValueError: a value is invalid. The message names the variable and its mistake.
        """
        cache = _tokens("CACHE_TOKENS", environ.get("CACHE_TOKENS", ""))
        if len(cache) > 1:
            raise ValueError(f"CACHE_TOKENS has {len(cache)} numbers; give one")
        buckets = _tokens("PROMPT_BUCKETS", environ.get("PROMPT_BUCKETS", ""))
        quantize = environ.get("QUANTIZE", "").strip() or None
        if quantize not in (None, *QUANTIZATIONS):
            raise ValueError(f"QUANTIZE is {quantize!r}; give one of {', '.join(QUANTIZATIONS)}, or nothing")
        model = environ.get("MODEL", "").strip() or DEMO_MODEL
        return cls(model, cache[0] if cache else None, buckets, quantize)


def _tokens(variable: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not part.isascii() or not part.isdigit() or int(part) < _LEAST_BUCKET]
    if wrong:
        raise ValueError(f"{variable} has {wrong[0]!r}; give numbers of tokens from {_LEAST_BUCKET} on, as 128,2048")
    return tuple(sorted({int(part) for part in parts}))
