"""Checks whether the device still answers. After a failed kernel, no later call of the process can succeed."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger(__name__)


def device_answers() -> bool:
    """Whether CUDA reports no error. Does not wait for queued work. True without a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.current_stream().query()
    except RuntimeError as error:
        log.error("The GPU does not answer, and this process cannot use it again. Restart the container. %s", error)
        return False
    return True
