"""Preloading: restored functions are loaded on a thread while the weights load."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from collections.abc import Callable

from compile_cache.timeline import noted
from compile_cache.torch_threads import end_at_exit

log = logging.getLogger("compile_cache")

_LONGEST_WAIT_S = 60.0


class Preloading:
    """Imports torch's loader on the caller's thread, and then calls `load` on a thread of its own.

    torch's compiler is a cycle of imports. If two threads began with different modules of it, one of them would find a
    half-made module. So the thread imports none of its modules.
    """

    def __init__(self, load: Callable[[], object]) -> None:
        self._load = load
        # torch 2.13 keeps settings in context variables. The thread gets its caller's.
        run = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="compile-cache-preload", daemon=True)

    def start(self) -> None:
        """Import the loader, and begin.

        Raises:
            ImportError: this torch has other modules.
        """
        with noted("preload", "import torch's loader"):
            from compile_cache.inductor.lean_loading import import_loader

            import_loader()
        end_at_exit(self._thread, lambda: None)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the functions are loaded."""
        self._thread.join(_LONGEST_WAIT_S)

    def _run(self) -> None:
        try:
            with noted("preload", "load"):
                self._load()
        except Exception as error:  # it comes again, and is reported, where the function is needed
            log.info("preload.failed error=%r", error)
