"""How fast one vector is multiplied with the matrices of an 8B language model, and with which block sizes.

    python benchmarks/matrix_vector.py --out matrix_vector.jsonl

For each shape, matrices of more bytes than any cache holds, one after the other in one recorded CUDA graph, so that no
launch waits for the host: torch's own product, and models/kernels/matrix_vector.py with several block sizes;
`*` marks those that it uses. Then a chain of all of a token's products and norms. What a large copy moves is measured
in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from boot_process import describe_machine
from clock import copy_bytes_per_s, median_s
from table import markdown

sys.path.append(str(Path(__file__).resolve().parents[1]))

from models.kernels.matrix_vector import (
    BLOCK,
    BLOCK_OF_8_BITS,
    GATED_BLOCK,
    Block,
    gated_matrix_vector,
    matrix_vector,
    matrix_vectors,
    multiply_on_gpu,
)
from models.kernels.rms_norm import rms_norm

_REPEATS = 10
_LAYERS = 32
_LEAST_BYTES = 400 << 20
_BLOCKS = tuple(
    Block(elements, columns)
    for elements, columns in ((2048, 1024), (2048, 2048), (4096, 1024), (4096, 2048), (4096, 4096), (8192, 2048))
)
_COLUMNS = ("matrices", "rows, columns", "type", "torch, GB/s", "block", "GB/s", "of a copy's GB/s")


@dataclass(frozen=True)
class Shape:
    """Matrices that one kernel multiplies with one vector, of so many rows each; `gated`: one gates the other."""

    name: str
    rows: tuple[int, ...]
    columns: int
    gated: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def size_bytes(self) -> int:
        """Of the matrices."""
        return sum(self.rows) * self.columns * self.dtype.itemsize


_SHAPES = (
    Shape("o", (4096,), 4096),
    Shape("k", (1024,), 4096),
    Shape("q, k and v", (4096, 1024, 1024), 4096),
    Shape("gate and up", (14336, 14336), 4096, gated=True),
    Shape("down", (4096,), 14336),
    Shape("logits", (128256,), 4096),
    Shape("down", (4096,), 14336, dtype=torch.int8),
    Shape("down", (4096,), 14336, dtype=torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Rate:
    """One shape with one block size; bytes of the matrices alone."""

    name: str
    rows: tuple[int, ...]
    columns: int
    dtype: str
    block: Block
    is_used: bool
    bytes_per_s: float
    torch_bytes_per_s: float | None


def recorded_s(call: Callable[[], None]) -> float:
    """The device's seconds for a call, replayed from a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_s(graph.replay, _REPEATS)


def rates(shape: Shape) -> Iterator[Rate]:
    """One shape with torch, then with each block size."""
    groups = [random_matrices(shape) for _ in range(-(-_LEAST_BYTES // shape.size_bytes))]
    vector = torch.randn(1, 1, shape.columns, dtype=torch.bfloat16, device="cuda")
    scale = torch.rand(*shape.rows, 1, device="cuda") if shape.dtype.itemsize == 1 else None

    def multiply_by_torch() -> None:
        for group in groups:
            for matrix in group:
                F.linear(vector, matrix)

    def multiply(block: Block) -> None:
        for first, *others in groups:
            if shape.gated:
                multiply_on_gpu(vector, [first], block, up=others[0])
            else:
                multiply_on_gpu(vector, [first, *others], block, scale=scale)

    size = len(groups) * shape.size_bytes
    torch_rate = size / recorded_s(multiply_by_torch) if scale is None else None
    used = GATED_BLOCK if shape.gated else BLOCK if scale is None else BLOCK_OF_8_BITS
    for block in _BLOCKS:
        rate = size / recorded_s(functools.partial(multiply, block))
        kind = str(shape.dtype).removeprefix("torch.")
        yield Rate(shape.name, shape.rows, shape.columns, kind, block, block == used, rate, torch_rate)


def random_matrices(shape: Shape) -> list[torch.Tensor]:
    """Zeros would be multiplied faster."""
    values = [torch.randn(rows, shape.columns, device="cuda") for rows in shape.rows]
    return [(value * 32 if shape.dtype.itemsize == 1 else value).to(shape.dtype) for value in values]


def chain_s() -> tuple[float, int]:
    """The seconds for all of a token's products and the norms between them, of what those before gave, and the bytes of
    the matrices."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") / columns**0.5

    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    layers = [[matrix(*shape) for shape in shapes] for _ in range(_LAYERS)]
    logits = matrix(128256, 4096)
    vector = torch.randn(1, 1, 4096, dtype=torch.bfloat16, device="cuda")
    factors = torch.ones(4096, dtype=torch.bfloat16, device="cuda")

    def token() -> None:
        hidden = vector
        for query, key, value, output, gate, up, down in layers:
            attended = matrix_vectors(rms_norm(hidden, factors, 1e-5), [query, key, value])[0]
            hidden = matrix_vector(attended, output, None, None, hidden)
            gated = gated_matrix_vector(rms_norm(hidden, factors, 1e-5), gate, up)
            hidden = matrix_vector(gated, down, None, None, hidden)
        matrix_vector(rms_norm(hidden, factors, 1e-5), logits, None, None)

    total = sum(one.numel() for layer in layers for one in layer) + logits.numel()
    return recorded_s(token), 2 * total


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to which each rate is added as a JSON line")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA GPU")
    copied = copy_bytes_per_s()
    found = [rate for shape in _SHAPES for rate in rates(shape)]
    if args.out:
        args.out.write_text("".join(json.dumps(asdict(rate)) + "\n" for rate in found))
    rows = [
        [
            rate.name,
            f"{' + '.join(map(str, rate.rows))}, {rate.columns}",
            rate.dtype,
            f"{rate.torch_bytes_per_s / 1e9:.0f}" if rate.torch_bytes_per_s else "–",
            f"{rate.block.elements}, {rate.block.most_columns}{' *' if rate.is_used else ''}",
            f"{rate.bytes_per_s / 1e9:.0f}",
            f"{rate.bytes_per_s / copied:.2f}",
        ]
        for rate in found
    ]
    print(f"machine: {describe_machine()}\ncopy within the device, read and written: {copied / 1e9:.0f} GB/s\n")
    print(markdown(_COLUMNS, rows))
    seconds, size = chain_s()
    print(f"\nall products and norms of a token in turn: {seconds * 1e3:.3f} ms, {size / seconds / 1e9:.0f} GB/s")


if __name__ == "__main__":
    main()
