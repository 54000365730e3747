"""The ways to boot that peers.py compares: how each compiles, when it stores that, and what its documentation says.
Imports no torch.

Read on 2026-11-22: fal 1.83.0 (`fal/toolkit/compilation.py`), b10-transfer 0.4.1, torch 2.13.0
(`torch/compiler/_cache.py`), diffusers 0.42.1 (`compile_repeated_blocks`), and copies of Replicate's cog-flux-kontext
(`generate_torch_compile_cache.py`, `predict.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

EAGER = "eager"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to boot.

    `compiles` is what torch.compile is applied to: nothing, `whole`, `dynamic` (whole, for all sizes), `regional`, or
    `ours`. `keeps` is how that is stored: nothing, `zip`, `mega`, `committed`, or `ours`. The rest is for the tables.
    """

    name: str
    title: str
    compiles: str
    keeps: str
    given: str
    stores_at: str = "never"
    verified: str = "nothing is stored"

    @property
    def is_ours(self) -> bool:
        """Whether the library boots it."""
        return self.compiles == "ours"

    @property
    def suits_text(self) -> bool:
        """Whether it is for language models too: diffusers' regional compilation is for its own models."""
        return self.compiles != "regional"


_ZIP_VERIFIED = (
    "nothing; the file's name has the GPU's name, at Baseten also the CUDA version. Baseten refuses absolute paths, "
    "`..` and more than 1 GB"
)
_MEGA_VERIFIED = "nothing; torch looks each graph up by a key that has its own version and settings"
_OURS_VERIFIED = (
    "signature (if keys are set), key, environment, the SHA-256 of each file, paths and sizes; outputs were compared "
    "with eager ones before they were stored"
)

WAYS = (
    Way(EAGER, "eager", "", "", "warm-up, no compilation"),
    Way(
        "compile",
        "`torch.compile`",
        "whole",
        "",
        "`model.compile()`, default mode; a directory that ends with the container",
    ),
    Way(
        "zip",
        "zip of the directory (fal, Baseten)",
        "whole",
        "zip",
        "as fal's `synchronized_inductor_cache`: `model.compile()`, warm-up, zip of `TORCHINDUCTOR_CACHE_DIR` if a "
        "file's name is new",
        "in setup, after the warm-up",
        _ZIP_VERIFIED,
    ),
    Way(
        "mega",
        "Mega-Cache",
        "whole",
        "mega",
        "`model.compile()`, `load_cache_artifacts` before and `save_cache_artifacts` after the warm-up",
        "in setup, after the warm-up",
        _MEGA_VERIFIED,
    ),
    Way(
        "regional",
        "diffusers' regional compilation, zip",
        "regional",
        "zip",
        "`compile_repeated_blocks(fullgraph=True)` over the directory, kept as above",
        "in setup, after the warm-up",
        "as the zip above",
    ),
    Way(
        "committed",
        "committed cache file (Replicate)",
        "dynamic",
        "committed",
        "`model.compile(dynamic=True)`; a build step made the file with `save_cache_artifacts`, boots only load it",
        "by a build step",
        "as Mega-Cache; the file comes with the image",
    ),
    Way(
        "background",
        "this project, `background`",
        "ours",
        "ours",
        "`predict.py`, `COMPILE_CACHE_COLD_START=background`",
        "after READY, and after each new size",
        _OURS_VERIFIED,
    ),
    Way(
        "block",
        "this project, `block`",
        "ours",
        "ours",
        "`predict.py`, `COMPILE_CACHE_COLD_START=block`",
        "from READY on, and after each new size",
        "as `background`",
    ),
)
BY_NAME = {way.name: way for way in WAYS}
