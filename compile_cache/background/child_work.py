"""The second process's side: its work, which is to build a call anew and to make its code.

This module imports torch and its compiler. The server never imports it.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from compile_cache.calls.pickling import receive
from compile_cache.calls.shadow import Shadow
from compile_cache.calls.spec import on_gpu
from compile_cache.calls.torch_call import Call
from compile_cache.errors import ArtifactError, NotHandedOver
from compile_cache.inductor.function_file import PRECOMPILED
from compile_cache.inductor.make import Answer, Dimensions, Graphs, forget_graphs, import_compiler, make
from compile_cache.inductor.stored_functions import Artifacts
from compile_cache.inductor.toolchain import configure_torch, surround_measurements, unread_files
from compile_cache.inductor.torch_state import ServerState
from compile_cache.settings import Settings
from compile_cache.storage.directory import scan_folder

# The length of a pause, in lengths of the measurement before it.
_PAUSE = 2.0
# All pauses of one order: its time is limited (`_LIMIT_S` in orders.py).
_MOST_S = 60.0


class Maker:
    """Compiles in one folder, and tells after each order which files are new."""

    def __init__(self, setup: bytes) -> None:
        """`setup` has the pickled settings, the folder, whether the process hurries, and the main program's file."""
        settings, path, hurries, main = pickle.loads(setup)
        if main is not None:  # the source of the classes that it has, which travel by value
            sys.modules["__main__"].__file__ = main
        configure_torch()
        import_compiler()  # while there may be no order yet
        self._pace = Pace(0.0 if hurries else _MOST_S)
        surround_measurements(self._pace.measurement)
        self._path = Path(path)
        self._settings: Settings = settings
        self._told = {path for path, _ in scan_folder(self._path)}

    def __call__(self, order: bytes) -> bytes:
        """Compile one kind of call. An order is a pickled call, `ServerState`, `Dimensions` and record; the result is a
        pickled `Answer`."""
        started = time.perf_counter()
        self._pace.begin_order()
        try:
            answer = self._made(*pickle.loads(order))
        except (NotHandedOver, ArtifactError) as error:
            answer = Answer(reason=str(error))
        finally:
            forget_graphs()
            gc.collect()
            torch.cuda.empty_cache()
        files = self._new_files(answer.path) if answer.path else ()
        return pickle.dumps(replace(answer, files=files, seconds=time.perf_counter() - started))

    def _made(self, content: bytes, state: ServerState, dynamic: Dimensions, record: str) -> Answer:
        state.place()
        call = receive(content)
        with state.applied():
            settings = replace(self._settings, dynamic=None) if dynamic else self._settings
            # New for each order, so that no artifact of an earlier order is found.
            artifacts = Artifacts(settings, self._path)
            graphs = Graphs(type(call[0]).__name__, settings.mode, bool(settings.dynamic))
            shadow = Shadow(call)
            pause = self._pace.measurement if on_gpu(call) else contextlib.nullcontext

            def copies() -> Call:
                torch.cuda.empty_cache()  # the server and its predictions may need that memory
                return shadow.copied()

            answer = make(artifacts, graphs, copies, dynamic, pause, record)
        if answer.is_precompiled:
            return answer
        later = "; its graphs are in the store" if answer.path else ""
        return replace(answer, reason=f"not compiled ahead of time: {answer.reason}{later}")

    def _new_files(self, record: str) -> tuple[str, ...]:
        files = {path for path, _ in scan_folder(self._path)}
        others = {path for path in files if path.startswith(f"{PRECOMPILED}/")} - {record}
        new = files - self._told - unread_files(files) - others
        self._told |= new
        return tuple(sorted(new | {record}))


class Pace:
    """Pauses after measurements on the GPU, so that predictions get most of it, in one order after another.

    A GPU shares its time equally among processes, whatever their priority. While this process measures the candidates
    for a kernel, predictions have half of the GPU.
    """

    def __init__(self, most_s: float = _MOST_S) -> None:
        self._measuring = threading.Lock()
        self._most_s = self._left_s = most_s

    def begin_order(self) -> None:
        """Let the pauses take their time again."""
        self._left_s = self._most_s

    @contextlib.contextmanager
    def measurement(self) -> Iterator[None]:
        """A measurement, and then a pause. A measurement inside another has no pause of its own."""
        if self._measuring.locked():
            yield
            return
        with self._measuring:
            started = time.monotonic()
            yield
            pause_s = min(_PAUSE * (time.monotonic() - started), self._left_s)
        self._left_s -= pause_s
        time.sleep(pause_s)
