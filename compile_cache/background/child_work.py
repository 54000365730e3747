"""The work of the second process: build a call anew, and make its code.

This module imports torch and its compiler. The server never imports it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compile_cache.background.orders import Making, Order
from compile_cache.calls.pickling import receive
from compile_cache.calls.shadow import Shadow
from compile_cache.calls.spec import on_gpu
from compile_cache.errors import ArtifactError, NotHandedOver, StateNotMade
from compile_cache.inductor.function_file import PRECOMPILED
from compile_cache.inductor.make import Graphs, Made, forget_graphs, make
from compile_cache.inductor.stored_functions import Artifacts
from compile_cache.inductor.switches import configure_torch
from compile_cache.inductor.toolchain import remember_toolchain
from compile_cache.inductor.tuning import Pace, unread_files
from compile_cache.settings import Settings
from compile_cache.storage.directory import compilers_folder, scan_folder


def start_making(setup: bytes) -> Callable[[bytes], bytes]:
    """A function that takes a pickled `Order` and returns a pickled `Making`. `setup` has the pickled settings, and the
    folder in which the process compiles."""
    maker = _Maker(*pickle.loads(setup))
    return lambda order: pickle.dumps(maker.make(pickle.loads(order)))


class _Maker:
    """Compiles in one folder, and tells after each order which files are new."""

    def __init__(self, settings: Settings, path: str) -> None:
        configure_torch()
        self._pace = Pace()
        self._pace.apply_to_inductor()
        self._path = Path(path)
        # A killed compiler leaves its temporary files. The next boot empties this folder.
        os.environ["TMPDIR"] = str(compilers_folder(self._path))
        remember_toolchain(self._path)
        self._settings = settings
        self._told = set(scan_folder(self._path))

    def make(self, order: Order) -> Making:
        """Compile one kind of call."""
        started = time.perf_counter()
        self._pace.begin_order()
        try:
            made = self._make(order)
        except (NotHandedOver, StateNotMade, ArtifactError) as error:
            return Making(reason=str(error), seconds=time.perf_counter() - started)
        finally:
            forget_graphs()
            gc.collect()
            _free()
        seconds, reason = time.perf_counter() - started, f"not compiled ahead of time: {made.reason}"
        if not made.path:
            return Making(reason=reason, seconds=seconds)
        files = self._new_files(made.path)
        if made.function is None:
            reason += "; the next boot takes its graphs from the store"
            return Making(files=files, reason=reason, seconds=seconds)
        return Making(made.path, files, seconds=seconds, speed=made.speed)

    def _make(self, order: Order) -> Made:
        module, args, kwargs = receive(order.call)
        with order.state.applied():
            settings = replace(self._settings, dynamic=None) if order.dynamic else self._settings
            # New for each order, so that no artifact of an earlier order is found.
            artifacts = Artifacts(settings, self._path)
            graphs = Graphs(type(module).__name__, settings.mode, settings.dynamic)
            call = Shadow(module, args, kwargs)
            pause = self._pace.measurement if on_gpu(module, args, kwargs) else contextlib.nullcontext

            def copies() -> tuple[Any, Any, Any]:
                _free()
                return call.copied()

            return make(artifacts, graphs, copies, order.dynamic, pause, serves=False)

    def _new_files(self, record: str) -> tuple[str, ...]:
        files = set(scan_folder(self._path))
        others = {path for path in files if path.startswith(f"{PRECOMPILED}/")} - {record}
        new = files - self._told - unread_files(files) - others
        self._told |= new
        return tuple(sorted(new | {record}))


def _free() -> None:
    """Free the GPU memory that torch keeps for later. The server and its predictions may need it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
