"""Model families. Each folder loads any model of its family, names the modules to compile, and runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from compile_cache import Boot


def load_to_gpu(load: Callable[..., Any], boot: Boot | None) -> Any:
    """What `load`, a `from_pretrained`, returns, on the GPU, with the copies of weights that `boot` has. Without any,
    weights that need a cast load faster by `device_map`.

    Raises:
        Exception: any of `load`.
    """
    return boot.to_gpu(load()) if boot is not None and boot.copies_weights else load(device_map="cuda")


def leave_out_foreign_lines() -> None:
    """Leave out transformers' bars for the loading of weights, and its warnings that torchvision is not installed.

    A pipeline of diffusers imports image processors that nothing here calls, and transformers warns of each. Bars of
    a download stay: they are those of the hub's library.
    """
    from transformers.utils.logging import set_tqdm_hook

    set_tqdm_hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    unwanted = "requires torchvision (not installed)"
    imports = logging.getLogger("transformers.utils.import_utils")
    imports.addFilter(lambda record: unwanted not in record.getMessage())
