"""What no boot on a GPU can go below: torch's import, first uses of the GPU, and the copy of a model's weights.

    python benchmarks/floor.py /tmp/flux1

Prints the parts in seconds, one after the other in a new process, and their sum.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_COPIED_BYTES = 8 << 30
_PIECE_BYTES = 1 << 30


def seconds(work: Callable[[], Any]) -> float:
    """How long `work` takes, until the GPU is done."""
    began = time.perf_counter()
    work()
    if (torch := sys.modules.get("torch")) is not None:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Print the parts and their sum, as JSON."""
    parts = {"import torch": seconds(lambda: __import__("torch"))}
    import torch
    from torch.nn import functional

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)

    parts["context"] = seconds(lambda: zeros(1))
    parts["cublas"] = seconds(lambda: functional.linear(zeros(64, 64), zeros(64, 64)))
    parts["attention"] = seconds(lambda: functional.scaled_dot_product_attention(*[zeros(1, 24, 4608, 128)] * 3))
    parts["convolution"] = seconds(lambda: functional.conv2d(zeros(1, 512, 128, 128), zeros(512, 512, 3, 3), padding=1))
    host = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")

    def copy() -> None:
        for _ in range(_COPIED_BYTES // _PIECE_BYTES):
            there.copy_(host, non_blocking=True)

    copy()
    size = sum(path.stat().st_size for path in Path(sys.argv[1]).rglob("*.safetensors"))
    parts["weights"] = seconds(copy) * size / _COPIED_BYTES
    print(json.dumps({name: round(found, 3) for name, found in {**parts, "floor": sum(parts.values())}.items()}))


if __name__ == "__main__":
    main()
