"""Prepares a process to compile the steps of a language model: the server, and the compiling process."""

from __future__ import annotations

import logging

import torch
from transformers import AttentionInterface

from models.text.static_cache import ATTENTION, attend

log = logging.getLogger(__name__)


def prepare_process() -> None:
    """Register the attention of the static cache and, for a model on a GPU, join operators.

    The compiling process calls this first. The server finds its artifacts only with the same passes set.
    """
    AttentionInterface.register(ATTENTION, attend)
    if torch.cuda.is_available():
        join_operators()


def join_operators() -> None:
    """Join operators in the graphs that this thread compiles, if torch has the names for it. Imports torch's
    compiler."""
    try:
        from models.kernels.token_graph import join_operators as join
    except ImportError as error:  # the module needs private names of torch
        log.warning("Operators of a step are not joined, so answers are slower: %s", error)
        return
    join()
