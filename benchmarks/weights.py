"""How fast weights get to the device: from_pretrained, the same with parallel loading, models/weights.py, a plain read.

Each load is a fresh process, in turns, of files in the page cache, with the imports done and the device in use before
the clock starts. Then one process loads both ways and compares every tensor. Exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from table import markdown, spread

ROOT = Path(__file__).resolve().parents[1]
WAYS = {
    "plain": "from_pretrained(device_map=…)",
    "parallel": "the same, HF_ENABLE_PARALLEL_LOADING",
    "moved": "models/weights.py",
    "read": "read into memory, 8 threads",
}
_COLUMNS = ("way", "n", "s", "GB/s", "host memory of its own, GB", "device peak, GB")
_READ_THREADS = 8
_READ_BYTES = 16 << 20


def weight_files(folder: str) -> list[Path]:
    """All safetensors files of the pipeline."""
    return sorted(Path(folder).glob("*/*.safetensors"))


def read_files(folder: str) -> None:
    """The page cache's bytes into memory, thread by thread the same few pages: what any loader has to do at least."""
    pieces = deque(
        (path, offset) for path in weight_files(folder) for offset in range(0, path.stat().st_size, _READ_BYTES)
    )

    def read_pieces() -> None:
        memory = bytearray(_READ_BYTES)
        while True:
            try:
                path, offset = pieces.popleft()
            except IndexError:
                return
            with path.open("rb", buffering=0) as file:
                os.preadv(file.fileno(), [memory], offset)

    with ThreadPoolExecutor(_READ_THREADS) as threads:
        for worker in [threads.submit(read_pieces) for _ in range(_READ_THREADS)]:
            worker.result()


def loader(way: str, folder: str) -> Callable[[], Any]:
    """What loads the pipeline one way; its imports are done, and its device is in use."""
    if way == "read":
        return lambda: read_files(folder)
    import torch
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    from models.image.pipeline import import_pipeline, load_pipeline

    logging.disable_progress_bar()
    import_pipeline(folder, None)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.zeros(1, device=device)
    if way == "moved":
        return lambda: load_pipeline(folder, None, torch.bfloat16, device)
    return lambda: DiffusionPipeline.from_pretrained(folder, dtype=torch.bfloat16, device_map=device.type)


def own_memory_bytes() -> int:
    """This process's memory that no file backs, pinned memory included (proc_pid_status(5))."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) << 10


def measure(way: str, folder: str) -> dict[str, float | None]:
    """One load, in this process."""
    load = loader(way, folder)
    before_bytes, started = own_memory_bytes(), time.perf_counter()
    pipeline = load()
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    host_bytes = own_memory_bytes() - before_bytes
    del pipeline
    return {
        "s": seconds,
        "GB/s": sum(path.stat().st_size for path in weight_files(folder)) / 1e9 / seconds,
        "host": host_bytes / 1e9,
        "device": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }


def compare(folder: str) -> None:
    """Load both ways, and compare every parameter and buffer.

    Raises:
        SystemExit: one differs.
    """
    import torch

    ours, theirs = loader("moved", folder)(), loader("plain", folder)()
    compared, different = 0, []
    for name, part in ours.components.items():
        if not isinstance(part, torch.nn.Module):
            continue
        expected = tensors(theirs.components[name])
        for key, tensor in tensors(part).items():
            compared += 1
            if not is_same(tensor, expected.pop(key, None)):
                different.append(f"{name}.{key}")
        different += [f"{name}.{key}" for key in expected]
    print(f"{compared} parameters and buffers compared, {len(different)} differ {different[:5] or ''}")
    if different:
        raise SystemExit(1)


def tensors(module: Any) -> dict[str, Any]:
    """Parameters and buffers under all of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def is_same(tensor: Any, other: Any) -> bool:
    """Whether they are equal in their bits, type, layout, place and use."""
    import torch

    def properties(one: Any) -> tuple[Any, ...]:
        return type(one), one.dtype, one.device, one.shape, one.stride(), one.requires_grad

    def bits(one: Any) -> Any:
        return one.detach().flatten().view(torch.uint8)

    return other is not None and properties(tensor) == properties(other) and torch.equal(bits(tensor), bits(other))


def run(arguments: list[str], environ: dict[str, str], timeout_s: float) -> str:
    """The output of this script in a process of its own.

    Raises:
        SystemExit: it failed.
    """
    environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.run(
        [sys.executable, __file__, *arguments], env=environ, capture_output=True, text=True, timeout=timeout_s
    )
    if child.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{child.stdout}\n{child.stderr[-3000:]}")
    return child.stdout.splitlines()[-1]


def main() -> None:
    """Measure in turns, print the table, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder in bf16, such as flux_shape.py writes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one load")
    parser.add_argument("--one", choices=[*WAYS, "compare"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one == "compare":
        return compare(args.model)
    if args.one:
        return print(json.dumps(measure(args.one, args.model)))

    def measured(way: str) -> dict[str, float | None]:
        environ = {"HF_ENABLE_PARALLEL_LOADING": "yes" if way == "parallel" else "no"}
        return json.loads(run(["--model", args.model, "--one", way], environ, args.timeout))

    measured("read")  # the page cache
    results: dict[str, list[dict[str, float | None]]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            results[way].append(measured(way))
            print(f"{WAYS[way]}: {results[way][-1]}", flush=True)
    rows = [
        [
            WAYS[way],
            len(loads),
            *(spread([load[column] for load in loads]) for column in ("s", "GB/s", "host", "device")),
        ]
        for way, loads in results.items()
    ]
    print(f"\nmedian (least–greatest)\n\n{markdown(_COLUMNS, rows)}\n")
    print(run(["--model", args.model, "--one", "compare"], {}, args.timeout))


if __name__ == "__main__":
    main()
