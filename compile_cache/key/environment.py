"""The environment: everything that a compiled artifact depends on, besides the model's version.

It is read from package files, the CUDA driver and /proc before torch is imported, so that the restore can start at
once. A boot compares it with torch's own values before it uses a restored file.

Another Python runs this file as a script to name its own environment. So it imports nothing of this package.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import platform
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

# Of the key, the packs and what is in them: packs of another version are nowhere that a boot looks.
FORMAT_VERSION = 3

# Variables with these prefixes change generated code, except those that only decide where or how fast it is compiled.
_CODE_VARIABLES = ("TORCHINDUCTOR_", "TRITON_", "INDUCTOR_", "TORCH_COMPILE_")
_NEUTRAL_VARIABLES = frozenset(
    {
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "TORCHINDUCTOR_COMPILE_THREADS",
        "TORCHINDUCTOR_WORKER_START",
        "TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        "TORCHINDUCTOR_FX_GRAPH_CACHE",
        "TORCHINDUCTOR_AUTOGRAD_CACHE",
        "TORCHINDUCTOR_REDIS_URL",
        "TRITON_PRINT_AUTOTUNING",
        "TORCH_COMPILE_DEBUG",
    }
)
# Any other value may be a secret.
_PLAIN_VALUES = re.compile(r"[0-9]|true|false|on|off|yes|no|", re.IGNORECASE)
# Inductor calls the C++ compiler with `-march=native`, which generates instructions from these flags.
_INSTRUCTION_FLAGS = re.compile(
    r"^(pni|ssse3|sse\w*|avx\w*|amx\w*|fma4?|f16c|bmi\d|abm|lzcnt|popcnt|movbe|adx|gfni|xop|tbm|asimd\w*|sve\w*|i8mm|bf16)$"
)


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment, one value in each field. A field that does not apply is empty (no GPU, no Triton).

    The CPU's instruction set and thread count are left out if there is a GPU: the same GPU is found beside many
    processors, and artifacts with C++ code record both themselves.
    """

    torch: str
    triton: str
    cuda: str
    hip: str
    gpu: str
    capability: str
    device_index: int
    python: str
    glibc: str
    machine: str
    instructions: str
    threads: int
    cache_dir: str
    options: str
    variables: tuple[str, ...]
    format: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        """The environment's name in a store: 32 hexadecimal digits."""
        return digest(asdict(self))

    def to_json(self) -> str:
        """The record as canonical JSON: sorted, without spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def differences(self, other: Environment) -> tuple[str, ...]:
        """A line for each field that differs, such as `torch 2.11.0 → 2.13.0`. Long lists show new and missing
        parts."""
        return tuple(
            f"{field.name.replace('_', ' ')} {_difference(field.name, ours, theirs)}"
            for field in fields(self)
            if (ours := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


def _difference(name: str, ours: Any, theirs: Any) -> str:
    """`a → b`; for lists, such as the instruction set, `+new -missing`."""
    if name == "instructions":
        ours, theirs = ours.split(), theirs.split()
    if isinstance(ours, list | tuple):
        new, gone = sorted(set(theirs) - set(ours)), sorted(set(ours) - set(theirs))
        return " ".join([*(f"+{part}" for part in new), *(f"-{part}" for part in gone)])
    return f"{'none' if ours == '' else ours} → {'none' if theirs == '' else theirs}"


def detect_environment(cache_dir: str, options: str, environ: Mapping[str, str]) -> Environment:
    """The environment, as far as it is known without importing torch. Takes milliseconds."""
    torch, cuda, hip = _installed_torch()
    gpu, capability = cuda_device() if cuda else _NO_GPU
    return Environment(
        torch=torch,
        triton=installed_version("triton"),
        cuda=cuda,
        hip=hip,
        gpu=gpu,
        capability=capability,
        device_index=0,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        glibc=" ".join(platform.libc_ver()),
        machine=platform.machine(),
        instructions="" if gpu else instruction_flags(),
        threads=0 if gpu else cpu_threads(environ),
        cache_dir=cache_dir,
        options=options,
        variables=tuple(
            _described(name, value)
            for name, value in sorted(environ.items())
            if name.startswith(_CODE_VARIABLES) and name not in _NEUTRAL_VARIABLES
        ),
    )


def _described(name: str, value: str) -> str:
    """A variable in a record: with its value if that is a plain switch, else with a digest. The name is the salt, so
    that two records with one value agree. The rounds make guessing slow, and take 4 ms."""
    if _PLAIN_VALUES.fullmatch(value):
        return f"{name}={value}"
    sealed = hashlib.pbkdf2_hmac("sha256", os.fsencode(value), name.encode(), 10_000)
    return f"{name} (digest {sealed.hex()[:16]})"


def observe_environment(detected: Environment) -> Environment:
    """`detected`, with torch's own values in all fields that torch knows. Imports torch."""
    import torch

    on_gpu = torch.cuda.is_available()
    return replace(
        detected,
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=torch.version.hip or "",
        gpu=torch.cuda.get_device_name() if on_gpu else "",
        capability="{}.{}".format(*torch.cuda.get_device_capability()) if on_gpu else "",
        device_index=torch.cuda.current_device() if on_gpu else 0,
        instructions="" if on_gpu else instruction_flags(),
        threads=0 if on_gpu else torch.get_num_threads(),
    )


def cpu_threads(environ: Mapping[str, str]) -> int:
    """The number of threads that torch will use on the CPU: from variables, else the available physical cores.

    Inductor's lookups of CPU code have this number, so a boot with a wrong number finds nothing. On x86 torch takes the
    number from MKL. MKL prefers its own variable, and uses at most the machine's cores unless `MKL_DYNAMIC` is off.
    """
    with_mkl = platform.machine() == "x86_64"
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS") if with_mkl else ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = environ.get(name, "").partition(",")[0].strip()  # OMP_NUM_THREADS lists a number for each nesting level
        if first.isdecimal() and int(first) > 0:
            capped = with_mkl and environ.get("MKL_DYNAMIC", "").lower() not in ("false", "0")
            return min(int(first), _cores(range(os.cpu_count() or 1))) if capped else int(first)
    return _cores(os.sched_getaffinity(0))


def _cores(cpus: Iterable[int]) -> int:
    return max(1, len({_core_of(cpu) for cpu in cpus}))


def _core_of(cpu: int) -> str:
    """The CPUs of a core, as the kernel lists them; the CPU itself if the kernel does not tell."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _installed_torch() -> list[str]:
    """The version, CUDA and HIP of the installed torch, from its `version.py`, which imports nothing of torch.

    The package metadata lacks the build ("2.11.0" for 2.11.0+cu130), which decides which artifacts can be loaded.
    """
    from importlib.util import find_spec

    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ["", "", ""]
    found = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return [found.get(name) or "" for name in ("__version__", "cuda", "hip")]


def installed_version(distribution: str) -> str:
    """The version of an installed package; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


_NO_GPU = ("", "")
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, cuda.h


@functools.cache
def cuda_device() -> tuple[str, str]:
    """The name and compute capability of torch's device 0, from the CUDA driver, which honours CUDA_VISIBLE_DEVICES
    like torch. Initialises the driver without the GIL, which torch then need not do, and makes no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _NO_GPU
    device, number = ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    if driver.cuInit(0) != 0 or driver.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return _NO_GPU
    driver.cuDeviceGetName(name, len(name), device)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        capability.append(str(number.value))
    return name.value.decode(errors="replace"), ".".join(capability)


@functools.cache
def instruction_flags() -> str:
    """The CPU's instruction set extensions, sorted. CPU artifacts are compiled for exactly these."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith(("flags", "Features"))]
    except OSError:
        return ""
    flags = lines[0].partition(":")[2].split() if lines else []
    return " ".join(sorted(flag for flag in flags if _INSTRUCTION_FLAGS.match(flag)))


def digest(description: Any) -> str:
    """32 hexadecimal digits: the digest of plain values."""
    text = json.dumps(description, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


if __name__ == "__main__":
    print(detect_environment(sys.argv[1], sys.argv[2], os.environ).to_json())
