"""A model's weights brought to the GPU while Python imports: by early weights, and by other loaders of safetensors.

    pip install fastsafetensors runai-model-streamer
    python benchmarks/loaders.py /tmp/flux1
    python benchmarks/loaders.py demo/llama-adder

Right after `import torch`, a thread loads all tensors, and the main thread imports what a pipeline needs. Each way is a
new process; three rounds take turns. Prints a JSON line for each: seconds from the thread's start until the weights are
there, until the imports are done, and until both are; GB that torch has allocated and reserved, and that are in use on
the GPU. Then all bytes are compared with what safetensors' own loader reads. `none` only imports. The files are read
first, so all ways read the page cache: fastsafetensors would pass it by, but for FASTSAFETENSORS_ODIRECT=0.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fresh_boot import ROOT


def early_weights(folder: str, files: list[str], device: str) -> dict[str, Any]:
    """As a boot begins, but without the GPU's first uses, which follow on that thread."""
    import torch

    from models.early_weights import EarlyWeights, read_header

    with EarlyWeights(Path(folder)) as early:
        early._copy(torch.device(device))
        copies = dict(early._copies)
    headers = {os.path.realpath(file): read_header(Path(file)) for file in files}
    return {name: copies[file, at] for file, header in headers.items() for name, (_, at, _) in header.items()}


def fastsafetensors(folder: str, files: list[str], device: str) -> dict[str, Any]:
    """Without GPUDirect Storage, which passes by the page cache. A `libcudart.so` must be in LD_LIBRARY_PATH."""
    from fastsafetensors import fastsafe_open

    with fastsafe_open(files, device=device, nogds=True) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def runai(folder: str, files: list[str], device: str) -> dict[str, Any]:
    """The Run:ai model streamer, as vLLM calls it."""
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files, device=device)
        return dict(streamer.get_tensors())


def safetensors(folder: str, files: list[str], device: str) -> dict[str, Any]:
    """File by file."""
    from safetensors.torch import load_file

    return {name: tensor for file in files for name, tensor in load_file(file, device=device).items()}


WAYS = {"none": lambda *_: {}, **{way.__name__: way for way in (early_weights, fastsafetensors, runai, safetensors)}}


def measure(way: str, folder: str, files: list[str]) -> dict[str, Any]:
    """Load and import in this process.

    Raises:
        SystemExit: a tensor differs.
        KeyError: one is missing.
    """
    gc.disable()  # as a boot does
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    began = time.perf_counter()

    def load() -> tuple[dict[str, Any], float]:
        found = WAYS[way](folder, files, device)
        if device != "cpu":
            torch.cuda.synchronize()
        return found, time.perf_counter() - began

    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(load)
        from diffusers import FluxPipeline  # noqa: F401

        imports_s = time.perf_counter() - began
        found, weights_s = loading.result()
    line = {"weights_s": weights_s, "imports_s": imports_s, "both_s": max(weights_s, imports_s)}
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        line |= {"allocated_gb": torch.cuda.memory_allocated() / 1e9, "used_gb": (total - free) / 1e9}
        line["reserved_gb"] = torch.cuda.memory_reserved() / 1e9
    for file in files if way != "none" else ():
        for name, expected in safetensors(folder, [file], device).items():
            if not torch.equal(*(one.flatten().view(torch.uint8) for one in (expected, found.pop(name)))):
                raise SystemExit(f"{way}: {name} differs")
    return {"way": way, **{name: round(value, 3) for name, value in line.items()}}


def main() -> None:
    """Measure the way that is named, or start a process for each."""
    folder, *ways = sys.argv[1:]
    files = sorted(map(str, Path(folder).rglob("*.safetensors")))
    if ways:
        print(json.dumps(measure(ways[0], folder, files)))
        return
    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
    environ = {"FASTSAFETENSORS_ODIRECT": "0", **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    for way in [*WAYS] * 3:
        subprocess.run([sys.executable, __file__, folder, way], env=environ)


if __name__ == "__main__":
    main()
