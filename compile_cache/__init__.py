"""Cog models that boot compiled: torch.compile's artifacts, restored from an object store while the weights load.

import compile_cache                                  # before torch

with compile_cache.boot("org/model@commit") as boot:  # the restore starts here
    pipe = load()
    boot.compile(pipe.transformer)                    # its repeated blocks, found by class
    boot.warm_up(lambda: pipe("warm up"))             # READY at the end of the context
"""

from compile_cache.errors import CompileCacheError
from compile_cache.inductor.counters import CompileCounts
from compile_cache.lifecycle.boot import Boot, boot
from compile_cache.lifecycle.boot_report import BootReport
from compile_cache.lifecycle.model_thread import ModelThread
from compile_cache.settings import VERSION

__version__ = VERSION

__all__ = ["Boot", "BootReport", "CompileCacheError", "CompileCounts", "ModelThread", "__version__", "boot"]
