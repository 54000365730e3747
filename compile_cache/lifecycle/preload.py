"""Preloading: a thread imports modules of torch's compiler while the weights load."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable

from compile_cache.lifecycle.import_order import can_order_imports, ordered_imports, wait_for_begun_imports
from compile_cache.timeline import noted
from compile_cache.torch_threads import end_at_exit

log = logging.getLogger("compile_cache")

# The thread that loads weights releases the GIL at each tensor. It waits this long to get it back.
_SWITCH_S = 0.0005
_LONGEST_WAIT_S = 60.0
# The imports of loading a precompiled region, and those of generated code.
_TO_LOAD = (
    "torch._dynamo.aot_compile",
    "torch._functorch._aot_autograd.aot_autograd_result",
    "torch._inductor.output_code",
    "torch._inductor.async_compile",
    "torch._inductor.hooks",
    "torch._inductor.runtime.triton_heuristics",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.fx.experimental.validator",
)
# The further imports of compiling a region.
_TO_COMPILE = ("torch._inductor.compile_fx",)


class Preloading:
    """A thread that imports the modules for loading, and calls `load_precompiled`.

    If there is nothing to load, it imports the modules for compiling, and computes the digests of torch and Triton with
    which each lookup begins. If this process compiles nothing (`is_to_compile`), it first asks `has_precompiled`, and
    imports nothing if the answer is no.

    Other threads may import anything meanwhile: see import_order.py. `failure` is the error of an import of torch's
    compiler. Such an import cannot be repeated in the same process.
    """

    def __init__(
        self, has_precompiled: Callable[[], bool], load_precompiled: Callable[[], bool], is_to_compile: bool
    ) -> None:
        self.failure: Exception | None = None
        self._has_precompiled = has_precompiled
        self._is_to_compile = is_to_compile
        self._load_precompiled = load_precompiled
        self._imports = contextlib.ExitStack()
        self._ending = threading.Event()
        # torch 2.13 keeps settings in context variables. The thread gets its caller's.
        run = functools.partial(contextvars.copy_context().run, self._run)
        self._thread = threading.Thread(target=run, name="compile-cache-preload", daemon=True)

    def start(self) -> None:
        """Begin."""
        if not can_order_imports():
            log.info(
                "preload.skipped python=%s This Python does not let imports be ordered; the boot imports torch's "
                "compiler later.",
                sys.version,
            )
            return
        self._imports.enter_context(ordered_imports())
        end_at_exit(self._thread, self._ending.set)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the thread is done: two threads that import the same modules slow each other down. The wait is
        bounded, because the thread may need a module that the caller is importing."""
        if self._thread.ident is not None:
            self._thread.join(_LONGEST_WAIT_S)

    def _run(self) -> None:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        try:
            with self._imports:
                wait_for_begun_imports()
                self._import_and_load()
        except Exception as error:
            log.info("preload.failed error=%r", error)
            # Any other error comes again, and is reported, where the module is needed.
            self.failure = None if "torch._dynamo" in sys.modules else error
        finally:
            if interval_s != _SWITCH_S:  # another preload, still running, has set it
                sys.setswitchinterval(interval_s)

    def _import_and_load(self) -> None:
        if not self._is_to_compile and not self._has_precompiled():
            return
        with noted("preload", "import torch's loader"):
            self._import(_TO_LOAD)
        with noted("preload", "load"):
            has_loaded = self._load_precompiled()
        if has_loaded or not self._is_to_compile:
            return
        with noted("preload", "import torch's compiler"):
            self._import(_TO_COMPILE)
            importlib.import_module("torch._inductor.codecache").torch_key()
            with contextlib.suppress(ImportError):  # no Triton: a CPU
                importlib.import_module("triton.runtime.cache").triton_key()

    def _import(self, names: Iterable[str]) -> None:
        for name in names:
            if self._ending.is_set():
                raise InterruptedError("the process ends")
            importlib.import_module(name)
