"""What a process needs before it compiles the steps of a language model: the server, and the process that compiles."""

from __future__ import annotations

import logging

import torch
from transformers import AttentionInterface

from models.text.static_cache import ATTENTION, attend

log = logging.getLogger(__name__)


def prepare_process() -> None:
    """Register the attention of the static cache and, for a model on a GPU, join operators.

    The compiling process calls this first. The server finds its artifacts only if it has set the same passes.
    """
    AttentionInterface.register(ATTENTION, attend)
    if torch.cuda.is_available():
        join_operators()


def join_operators() -> None:
    """Join operators in whatever this thread compiles, where torch has the names for it. Imports torch's compiler."""
    try:
        from models.kernels.token_graph import join_operators as join
    except ImportError as error:  # the module needs private names of torch
        log.warning("operators of a step are not joined, which costs speed: %s", error)
        return
    join()
