"""Orders code for calls from the second process, and takes its files into the cache directory.

The process writes into a folder of its own, beside the cache directory, with a path of the same length. torch finds
compiled kernels by absolute path, and writes that path into its files. Because both paths have the same length, one can
replace the other in any file, pickles included.

Nothing here imports torch's compiler before the first artifact arrives.
"""

from __future__ import annotations

import contextvars
import logging
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_cache.background.child import CompilingProcess
from compile_cache.background.queue import Done, Jobs
from compile_cache.calls.pickling import hand_over
from compile_cache.calls.spec import on_gpu
from compile_cache.errors import Failure, attempt
from compile_cache.files import replacing
from compile_cache.inductor.function_file import PRECOMPILED, SUFFIX, copy_artifact
from compile_cache.inductor.state import ServerState
from compile_cache.settings import Settings
from compile_cache.storage.directory import CacheDirectory
from compile_cache.timeline import note, noted

if TYPE_CHECKING:
    from compile_cache.inductor.function import Precompiled
    from compile_cache.inductor.make import Speed
    from compile_cache.inductor.state import ServerState
    from compile_cache.settings import Settings

log = logging.getLogger("compile_cache")

_HANDLER = "compile_cache.background.child_work:start_making"
# A whole transformer with tuning takes two minutes on a fast machine.
_JOB_TIMEOUT_S = 900.0
_IDLE_S = 30.0
# Loading an artifact holds Python's lock for about 0.1 s, which a prediction would wait for. So it waits for a moment
# in which no region is called, between two predictions or while the GPU works, but not for long.
_GAP_S = 0.1
_LONGEST_WAIT_S = 2.0
_LETTERS = str.maketrans("0123456789", "abcdefghij")
# torch rewrites these files in place.
_REWRITTEN = (".best_config",)
CGROUP = Path("/sys/fs/cgroup")
# torch has no more, on a host of any size (torch/_inductor/config.py).
_MOST_THREADS = 32


@dataclass(frozen=True, slots=True)
class Order:
    """One kind of call to compile: the bytes of `hand_over`, the server's state, and the dimensions to leave open.

    `dynamic` has (tensor, dimension) pairs. The code must fit any size of these dimensions.
    """

    call: bytes
    state: ServerState
    dynamic: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Making:
    """The answer to an order: an artifact's path and all its files, or the reason why there is none.

    Files without an artifact are those of graphs, which later boots trace again. `seconds` is the time that the order
    took. `speed` has the compiled and the eager time of the call, if measured.
    """

    path: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0
    speed: Speed | None = None


class Orders:
    """A compiling process, and the calls that wait for it: `jobs`. They begin once released, at READY.

    `open_artifacts` imports torch's compiler, and `load` loads an artifact. The jobs' thread calls both. `calls` counts
    the regions' calls so far.
    """

    def __init__(
        self,
        settings: Settings,
        directory: CacheDirectory,
        open_artifacts: Callable[[], None],
        load: Callable[[str], Precompiled],
        calls: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._open_artifacts, self._load, self._calls = open_artifacts, load, calls
        self._directory = directory
        self._workshop = Workshop(directory)
        self._log = directory.logs / "compiling.log"
        self.jobs = Jobs(self._start, _JOB_TIMEOUT_S, _IDLE_S)
        self.jobs.hold()

    def pack(self, module: nn.Module, args: Any, kwargs: Any, shares_weights: bool) -> tuple[bytes, bool]:
        """A call in bytes for the compiling process, and whether all its tensors are on a GPU.

        Raises:
            NotHandedOver: no other process can build this call.
        """
        content = hand_over(module, args, kwargs, _is_shared if shares_weights else None)
        return content, on_gpu(module, args, kwargs)

    def order(
        self,
        name: str,
        call: tuple[bytes, bool],
        dynamic: tuple[tuple[int, int], ...],
        done: Callable[[Making, Precompiled | None], None],
        rank: int,
    ) -> None:
        """Order code for a call that this thread has just served eager: the lowest rank is made first. Another thread
        calls `done` with the answer and the loaded function, if there is one.

        Raises:
            StateNotTaken: another process cannot have the state that the call depends on.
        """
        content, is_on_gpu = call
        order = Order(content, ServerState.take(is_on_gpu), dynamic)
        # torch 2.13 keeps settings in context variables. An artifact is loaded with the settings of this call.
        context = contextvars.copy_context()
        self.jobs.submit(name, pickle.dumps(order), lambda answer: context.run(self._receive, answer, done), rank)

    def _start(self) -> CompilingProcess:
        self._workshop.prepare()
        path = str(self._workshop.path)
        environ = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(compile_threads()),
            **os.environ,
            **{"TORCHINDUCTOR_CACHE_DIR": path, "TRITON_CACHE_DIR": f"{path}/triton"},
        }
        return CompilingProcess.start(_HANDLER, pickle.dumps((self._settings, path)), self._log, environ)

    def _receive(self, answer: Done, done: Callable[[Making, Precompiled | None], None]) -> None:
        note("second process", answer.name, time.perf_counter() - answer.seconds, answer.seconds)
        taken = attempt(self._taken, answer)
        if isinstance(taken, Failure):
            taken = Making(reason=f"its artifact cannot be used: {taken.reason}"), None
        making, function = taken
        log.info(
            "background.done call=%s seconds=%.1f waiting=%d reason=%s",
            answer.name,
            answer.seconds,
            self.jobs.waiting - 1,
            making.reason or "-",
        )
        done(making, function)

    def _taken(self, answer: Done) -> tuple[Making, Precompiled | None]:
        """The answer to an order, with its artifact loaded. Raises the errors of loading."""
        making: Making = Making(reason=answer.reason) if answer.answer is None else pickle.loads(answer.answer)
        if not making.files:
            return making, None
        self.wait_for_gap()
        self._directory.outgoing.expect(making.files)  # before they exist: another thread may be looking
        if not making.path:  # the files of graphs, which no other code of this boot is compared with
            self._workshop.take(making.files)
            return making, None
        with noted("second process", f"{answer.name}: load"):
            self._open_artifacts()
            self._workshop.take(making.files)
            return making, self._load(making.path)

    def wait_for_gap(self) -> None:
        """Wait until no region was called for a moment, or for 2 s."""
        calls = self._calls()
        for _ in range(round(_LONGEST_WAIT_S / _GAP_S)):
            time.sleep(_GAP_S)
            before, calls = calls, self._calls()
            if calls == before:
                return


def _is_shared(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_cuda


class Workshop:
    """The folder of the compiling process, beside `directory`."""

    def __init__(self, directory: CacheDirectory) -> None:
        self._directory = directory
        self.path = directory.path.with_name(directory.path.name.translate(_LETTERS))

    def prepare(self) -> None:
        """Empty the folder, and copy the cache directory into it, so that nothing is compiled twice.

        Raises:
            OSError: the folder cannot be written.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)
        self._copy(self._directory.scan(), self._directory.path, self.path)

    def take(self, paths: Iterable[str]) -> None:
        """Copy finished files into the cache directory: kernels first, then the artifacts that need them.

        Raises:
            ArtifactError: an artifact is damaged.
            OSError: a file is missing, or the cache directory cannot be written.
        """
        self._copy(sorted(paths, key=lambda path: path.startswith(PRECOMPILED)), self.path, self._directory.path)

    def _copy(self, paths: Iterable[str], source: Path, target: Path) -> None:
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


def compile_threads() -> int:
    """One for every two CPUs that this process may use, at most 32; on two or three CPUs, two.

    torch would start one for each CPU, and ignore a container's quota. Then predictions have no CPU of their own: a low
    priority makes a worker's turns on a CPU shorter, but does not prevent them. And when a container has used up its
    quota, predictions stop too, whatever their priority.
    """
    allowed = len(os.sched_getaffinity(0))
    cpus = min(allowed, quota_cpus(CGROUP) or allowed)
    return min(_MOST_THREADS, max(cpus // 2, min(cpus, 2)))


def quota_cpus(cgroup: Path) -> int:
    """The CPUs that a container's quota allows, rounded down, but at least 1; 0 without a quota.

    Sources: cgroup v2's `cpu.max` ("max 100000" or "150000 100000", in µs), and v1's `cpu.cfs_quota_us` (-1: none) and
    `cpu.cfs_period_us`.
    """
    try:
        if (both := cgroup / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(1, int(quota) // int(period)) if int(quota) > 0 else 0
    except (OSError, ValueError, ZeroDivisionError):  # not Linux's files, or "max"
        return 0
