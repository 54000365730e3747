"""Lines of other libraries that the log of a setup does without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from transformers.utils.logging import set_tqdm_hook


def leave_out_foreign_lines() -> None:
    """Leave out transformers' bars for the loading of weights, and its warnings that torchvision is not installed.

    A pipeline of diffusers imports image processors that nothing here calls, and transformers warns of each. Bars of
    a download stay: they are those of the hub's library.
    """
    set_tqdm_hook(_without_bar)
    logging.getLogger("transformers.utils.import_utils").addFilter(_is_not_of_torchvision)


def _without_bar(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bar(*args, **{**kwargs, "disable": True})


def _is_not_of_torchvision(record: logging.LogRecord) -> bool:
    return "requires torchvision (not installed)" not in record.getMessage()
