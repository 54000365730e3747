"""What a server's process is observed at: memory of the GPU, its compiling process, torch's compiler. Imports no torch.

A server writes into the file that `OBSERVATIONS` names: a `Ready` when setup ends, then a `Sample` every quarter of a
second, each a JSON line. Times are of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "OBSERVATIONS"
_EVERY_S = 0.25
# How often the memory is read between two samples. Some peaks last a twentieth of a second.
_LOOKS = 10
# How long the driver may take to free the memory of a process that has ended.
_FREED_S = 3.0
# What a boot report counts as kernels.
_KERNELS = (".so", ".cubin", ".hsaco")
_COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
_WORKER = b"compile_cache.background.worker"


@dataclass(frozen=True, slots=True)
class Ready:
    """The end of setup: `report` is the BootReport's JSON of this moment, `compiler` the imported modules of torch's
    compiler, `kernels` what Triton has compiled so far, as it also does for an eager model with kernels of its own."""

    at_s: float
    report: dict[str, Any]
    compiler: list[str]
    kernels: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What a quarter of a second showed. `device_bytes` is the memory of the whole GPU in use, `reserved_bytes` what
    torch has of it in the server, both at the moment when others than the server had most; None without a GPU.
    `compiling_processes` is how many the server has at the end."""

    at_s: float
    device_bytes: int | None
    reserved_bytes: int | None
    waiting: int
    compiling_processes: int


@dataclass(frozen=True, slots=True)
class Observed:
    """What a file of observations says."""

    ready: Ready
    samples: tuple[Sample, ...]

    @classmethod
    def read(cls, file: Path) -> Observed:
        """Read what is there so far; a line that is being written is left out.

        Raises:
            RuntimeError: the server has not been READY.
        """
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        if not lines:
            raise RuntimeError(f"the server was never READY: {file} is empty")
        samples = tuple(Sample(**json.loads(line)) for line in lines[1:])
        return cls(Ready(**json.loads(lines[0])), samples)

    def wait_ended(self, file: Path, timeout_s: float) -> bool:
        """Wait until the server has no compiling process, as the file says, and the driver has taken its memory back;
        False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            samples = Observed.read(file).samples
            if samples and not samples[-1].compiling_processes:
                time.sleep(_FREED_S)
                return True
            time.sleep(_EVERY_S)
        return False


def observe(report: Callable[[], str], waiting: Callable[[], int]) -> None:
    """Begin to observe this process, if `OBSERVATIONS` is set. Call it when setup ends."""
    if not (path := os.environ.get(VARIABLE)):
        return
    compiler = sorted(name for name in list(sys.modules) if name.startswith(_COMPILER))
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    kernels = sum(path.suffix in _KERNELS for path in folder.rglob("*"))
    ready = Ready(time.monotonic(), json.loads(report()), compiler, kernels)
    file = Path(path)
    _append(file, ready)
    threading.Thread(target=_look, args=(file, waiting), name="observer", daemon=True).start()


def _look(file: Path, waiting: Callable[[], int]) -> None:
    device = device_memory()
    while True:
        memory = _fullest(device) if device else (None, None)
        _append(file, Sample(time.monotonic(), *memory, waiting(), compiling_processes()))
        if not device:
            time.sleep(_EVERY_S)


def _fullest(device: Callable[[], int]) -> tuple[int, int]:
    """The GPU's memory in use, and what torch has of it here, when others had most; takes a quarter of a second."""
    looks = []
    for _ in range(_LOOKS):
        looks.append((device(), int(sys.modules["torch"].cuda.memory_reserved())))
        time.sleep(_EVERY_S / _LOOKS)
    return max(looks, key=lambda look: look[0] - look[1])


def _append(file: Path, record: Any) -> None:
    with file.open("a") as opened:
        opened.write(json.dumps(dataclasses.asdict(record)) + "\n")


def compiling_processes() -> int:
    """How many living children of this process compile."""
    found = 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                is_mine = int(parent) == os.getpid() and state != "Z"
                found += is_mine and _WORKER in (folder / "cmdline").read_bytes()
    return found


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def device_memory() -> Callable[[], int] | None:
    """What tells the bytes in use on this process's first GPU, by all processes; None without a GPU. It asks the driver
    and not CUDA, which would not let it while a graph is recorded."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device = ctypes.c_void_p()
    number = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
        return None

    def used() -> int:
        memory = _Memory()
        library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
        return int(memory.used)

    return used
