"""The server's side: orders code for calls, and takes the files of answers into the cache directory.

The second process writes into a folder of its own, beside the cache directory: torch takes a library that exists for a
finished one, and g++ writes it in place. The folder's path is as long as the cache directory's. Inductor pickles the
paths of kernels, and looks up tuning's results by them (`AutotuneCache`); no setting makes them relative. Because both
paths have the same length, one can replace the other in any file, pickles included.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from compile_cache.background.child import CompilingProcess
from compile_cache.background.queue import Order, OrderQueue
from compile_cache.calls.pickling import hand_over
from compile_cache.calls.spec import Call, on_gpu
from compile_cache.files import replacing
from compile_cache.inductor.function_file import PRECOMPILED, SUFFIX, copy_artifact
from compile_cache.inductor.make import Answer, Dimensions
from compile_cache.inductor.state import ServerState
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory, make_empty

_HANDLER = "compile_cache.background.child_work:start_making"
# A whole transformer with tuning takes two minutes on a fast machine.
_LIMIT_S = 900.0
_IDLE_S = 30.0
_LETTERS = str.maketrans("0123456789", "abcdefghij")
# torch rewrites these files in place.
_REWRITTEN = (".best_config",)


class Orders:
    """The orders of a boot: `queue`. They begin once `released` is set, at READY. The second process's folder is
    `workshop`, beside the cache directory."""

    def __init__(self, settings: Settings, directory: CacheDirectory, released: threading.Event) -> None:
        self._settings = settings
        self._directory = directory
        self.workshop = directory.path.with_name(directory.path.name.translate(_LETTERS))
        self._log = directory.logs / "compiling.log"
        self.queue = OrderQueue(self._start, _LIMIT_S, _IDLE_S, released)

    def pack(self, name: str, call: Call, dynamic: Dimensions, rank: int, shares_weights: bool) -> Order:
        """An order of code for a call that is not served yet.

        Raises:
            NotHandedOver: no other process can build this call.
        """
        content = hand_over(call, _is_shared if shares_weights else None)
        return Order(name, rank, content, on_gpu(*call), dynamic)

    def submit(self, order: Order) -> None:
        """Queue an order whose call this thread has just served eager.

        Raises:
            NotHandedOver: another process cannot have the state that the call depends on.
        """
        order.state = ServerState.take(order.is_on_gpu)
        self.queue.put(order)

    def take(self, answer: Answer) -> None:
        """Copy an answer's files into the cache directory: kernels first, then the artifacts that need them.

        Raises:
            ArtifactError: an artifact is damaged.
            OSError: a file is missing, or the cache directory cannot be written.
        """
        self._directory.outgoing.expect(answer.files)  # before they exist: another thread may be looking
        files = sorted(answer.files, key=lambda path: path.startswith(PRECOMPILED))
        _copy(files, self.workshop, self._directory.path)

    def _start(self) -> CompilingProcess:
        """Start the process in its folder, with a copy of the cache directory, so that nothing is compiled twice.

        Raises:
            OSError: the folder cannot be written, or no process can be started.
        """
        path = str(self.workshop)
        make_empty(self.workshop)
        _copy(self._directory.scan(), self._directory.path, self.workshop)
        environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": path, "TRITON_CACHE_DIR": f"{path}/triton"}
        # A killed compiler leaves its temporary files. The next boot empties this folder.
        environ["TMPDIR"] = str(self._directory.compilers)
        return CompilingProcess(_HANDLER, pickle.dumps((self._settings, path)), self._log, environ)


def _is_shared(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_cuda


def _copy(paths: Iterable[str], source: Path, target: Path) -> None:
    """Copy files, and replace the path of the one folder by the other's in each. Files that exist stay, unless torch
    rewrites them."""
    old, new = os.fsencode(source), os.fsencode(target)
    assert len(old) == len(new)
    for path in paths:
        if (target / path).exists() and not path.endswith(_REWRITTEN):
            continue
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(SUFFIX):
            copy_artifact(source / path, target / path, old, new)
            continue
        with replacing(target / path) as file:
            file.write((source / path).read_bytes().replace(old, new))
        shutil.copymode(source / path, target / path)
