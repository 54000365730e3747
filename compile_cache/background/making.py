"""The work of the compiling process: build a call anew, compile it ahead of time, run it and time it.

This module imports torch and its compiler. The server never imports it.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from compile_cache.background.call import receive
from compile_cache.background.order import Making, Order, Place
from compile_cache.background.pacing import Pace
from compile_cache.background.shadow import Shadow
from compile_cache.errors import CompileCacheError, NotHandedOver, StateNotMade
from compile_cache.inductor.artifacts import Artifacts, CachedRecord, Made
from compile_cache.inductor.autotuner import unread_files
from compile_cache.inductor.border import Failure, attempt
from compile_cache.inductor.files import PRECOMPILED
from compile_cache.inductor.graphs import Graphs, trace
from compile_cache.inductor.spec import on_gpu
from compile_cache.inductor.speed import Speed, compare_speed
from compile_cache.inductor.toolchain import remember_toolchain
from compile_cache.inductor.torch_settings import configure_torch
from compile_cache.storage.directory import scan_folder


def start_making(setup: bytes) -> Callable[[bytes], bytes]:
    """A function that takes a pickled `Order` and returns a pickled `Making`."""
    place: Place = pickle.loads(setup)
    maker = _Maker(place)
    return lambda order: pickle.dumps(maker.make(pickle.loads(order)))


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The path of a record of graphs, and why nothing better was made."""

    path: str
    reason: str


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
        if isinstance(made, _Graphs):
            return Making(files=self._new_files(made.path), reason=made.reason, seconds=seconds)
        return Making(made.path, self._new_files(made.path), seconds=seconds, speed=self._speed)

    def _make_anew(self, order: Order) -> Made | _Graphs | str:
        module, args, kwargs = receive(order.call)
        with order.state.applied():
            return self._make(module, args, kwargs, order.dynamic)

    def _make(
        self, module: nn.Module, args: Any, kwargs: Any, dynamic: tuple[tuple[int, int], ...]
    ) -> Made | _Graphs | str:
        settings = replace(self._settings, dynamic=None) if dynamic else self._settings
        # New for each order, so that no artifact of an earlier order is found.
        artifacts = Artifacts(settings, self._path)
        made = artifacts.make(module, *_left_open(dynamic, args, kwargs))
        if isinstance(made, str):
            reason = f"not compiled ahead of time: {made}"
            return reason if dynamic else self._trace(artifacts, module, args, kwargs, reason)
        _free()
        if reason := self._run(made, module, args, kwargs):
            return reason
        # Tuning's choice is now on record. Made again, the artifact has only the kernels that won.
        return artifacts.make(module, *_left_open(dynamic, args, kwargs)) if on_gpu(module, args, kwargs) else made

    def _trace(self, artifacts: Artifacts, module: nn.Module, args: Any, kwargs: Any, reason: str) -> _Graphs | str:
        """Fill Inductor's caches for a call that cannot be compiled ahead of time."""
        call = Shadow(module, args, kwargs)
        graphs = Graphs(type(module).__name__, self._settings.mode, self._settings.dynamic)
        traced = attempt(trace, graphs, lambda: _copied(call))
        if isinstance(traced, Failure):
            return f"{reason}; {traced.reason}"
        if traced.depends_on_data:
            return f"{reason}; a branch depends on the values of tensors, which this process does not know"
        record = CachedRecord(traced.is_whole, traced.seconds, reason)
        path = attempt(artifacts.write_cached, module, args, kwargs, record)
        if isinstance(path, Failure):
            return f"{reason}; {path.reason}"
        return _Graphs(path, f"{reason}; the next boot takes its graphs from the store")

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
            call = Shadow(module, args, kwargs)
            speed = attempt(compare_speed, function, lambda: _copied(call))
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


def _copied(call: Shadow) -> tuple[nn.Module, Any, Any]:
    copy = call.copy()
    return copy.module, copy.args, copy.kwargs


def _free() -> None:
    """Free the GPU memory that torch keeps for later. The server and its predictions may need it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
