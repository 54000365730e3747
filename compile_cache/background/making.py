"""The work of the compiling process: build a call anew, compile it ahead of time, run it and time it.

This module imports torch and its compiler. The server never imports it.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compile_cache.aot.artifacts import Artifacts, Made
from compile_cache.aot.files import PRECOMPILED
from compile_cache.aot.switches import on_gpu
from compile_cache.aot.toolchain import remember_toolchain
from compile_cache.background.call import receive
from compile_cache.background.order import Making, Order, Place
from compile_cache.background.pacing import Pace
from compile_cache.errors import CompileCacheError, NotHandedOver, StateNotMade
from compile_cache.regions.autotuner import unread_files
from compile_cache.regions.border import Failure, attempt
from compile_cache.regions.speed import Speed, compare_speed
from compile_cache.regions.torch_settings import configure_torch
from compile_cache.storage.directory import scan_folder


def start_making(setup: bytes) -> Callable[[bytes], bytes]:
    """A function that takes a pickled `Order` and returns a pickled `Making`."""
    place: Place = pickle.loads(setup)
    maker = _Maker(place)
    return lambda order: pickle.dumps(maker.make(pickle.loads(order)))


class _Maker:
    """Compiles in one folder, and tells after each order which files are new."""

    def __init__(self, place: Place) -> None:
        configure_torch()
        self._pace = Pace()
        self._pace.apply_to_inductor()
        self._path = Path(place.path)
        remember_toolchain(self._path)
        self._settings = place.settings
        self._speed: Speed | None = None
        self._told = set(scan_folder(self._path))

    def make(self, order: Order) -> Making:
        """Compile one kind of call."""
        started = time.perf_counter()
        self._speed = None
        self._pace.begin_order()
        try:
            made = self._make_anew(order)
        except (NotHandedOver, StateNotMade) as error:
            return Making(reason=str(error))
        torch._dynamo.reset()
        gc.collect()
        _free()
        seconds = time.perf_counter() - started
        if isinstance(made, str):
            return Making(reason=made, seconds=seconds)
        return Making(made.path, self._new_files(made.path), seconds=seconds, speed=self._speed)

    def _make_anew(self, order: Order) -> Made | str:
        module, args, kwargs = receive(order.call)
        with order.state.applied():
            return self._make(module, args, kwargs, order.dynamic)

    def _make(self, module: nn.Module, args: Any, kwargs: Any, dynamic: tuple[tuple[int, int], ...]) -> Made | str:
        settings = replace(self._settings, dynamic=None) if dynamic else self._settings
        # New for each order, so that no artifact of an earlier order is found.
        artifacts = Artifacts(settings, self._path)
        made = artifacts.make(module, *_left_open(dynamic, args, kwargs))
        if isinstance(made, str):
            return f"not compiled ahead of time: {made}"
        _free()
        if reason := self._run(made, module, args, kwargs):
            return reason
        # Tuning's choice is now on record. Made again, the artifact has only the kernels that won.
        return artifacts.make(module, *_left_open(dynamic, args, kwargs)) if on_gpu(module, args, kwargs) else made

    def _run(self, made: Made, module: nn.Module, args: Any, kwargs: Any) -> str:
        """Load an artifact, run it, which records tuning's choice, and time it. Returns why that failed; empty if it
        did not."""
        try:
            function = made.load()
            if misfit := function.misfit(module, args, kwargs):
                return f"it does not fit its own call: {misfit}"
            function(module, args, kwargs)
        except CompileCacheError as error:
            return str(error)
        _free()
        with self._pace.measurement() if on_gpu(module, args, kwargs) else contextlib.nullcontext():
            speed = attempt(compare_speed, function, module, args, kwargs)
            _free()
        self._speed = None if isinstance(speed, Failure) else speed
        return ""

    def _new_files(self, artifact: str) -> tuple[str, ...]:
        files = set(scan_folder(self._path))
        others = {path for path in files if path.startswith(f"{PRECOMPILED}/")} - {artifact}
        new = files - self._told - unread_files(files) - others
        self._told |= new
        return tuple(sorted(new | {artifact}))


def _left_open(dynamic: tuple[tuple[int, int], ...], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The inputs, with marks on the dimensions whose size is left open.

    Marks stay on a tensor, and code for marked tensors does not fit others. So the marked tensors are aliases.
    """
    if not dynamic:
        return args, kwargs
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for number, dimension in dynamic:
        place = tensors[number]
        leaves[place] = leaves[place].detach()
        torch._dynamo.mark_dynamic(leaves[place], dimension)
    marked: tuple[Any, Any] = pytree.tree_unflatten(leaves, spec)
    return marked


def _free() -> None:
    """Free the GPU memory that torch keeps for later. The server and its predictions may need it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
