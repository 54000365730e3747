"""Model families. Each folder loads any model of its family, names the modules to compile, and runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from compile_cache import Boot


def load_to_device(load: Callable[..., Any], boot: Boot | None) -> Any:
    """What `load`, a `from_pretrained`, returns: in bf16 on the GPU, or in fp32 without one. Where `boot` has no copies
    of weights, `device_map` is faster.

    Raises:
        Exception: any of `load`.
    """
    import torch

    if not torch.cuda.is_available():
        return load(dtype=torch.float32)
    if boot is not None and boot.weights.has_copies:
        return boot.to_gpu(load(dtype=torch.bfloat16))
    return load(dtype=torch.bfloat16, device_map="cuda")


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
