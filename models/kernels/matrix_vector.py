"""Custom operators: products of matrices with one vector, which take most of a token's time.

A token reads every weight once and computes little with it, so memory bandwidth decides. On GPUs that can, the Triton
kernels load their first weights while their predecessor still runs (programmatic dependent launch, CUDA C++ Programming
Guide).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it

from models.kernels.launch import can_overlap, kernel, launch_options, power_of_2


class Block(NamedTuple):
    """The part of a matrix that a program multiplies at once: its number of elements, and its most columns."""

    elements: int
    most_columns: int


# The fastest of six on an H200 (2026-11): for numbers of 16 bits or more, for 8 bits, and for two matrices at once.
BLOCK = Block(4096, 2048)
BLOCK_OF_8_BITS = Block(2048, 1024)
GATED_BLOCK = Block(4096, 1024)
_WARPS = 4
# One kernel multiplies at most this many matrices by the same vector.
MOST_MATRICES = 3


@torch.library.custom_op("text::matrix_vector", mutates_args=())
def matrix_vector(
    vector: torch.Tensor,
    matrix: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`matrix @ vector`, times `scale`, plus `bias`, summed in float32; then rounded to the vector's type, plus
    `residual`.

    vector: [1, 1, columns], matrix: [rows, columns], contiguous, scale: [rows, 1], bias: [rows], residual and result:
    [1, 1, rows], of the vector's type. With `scale`, the matrix may be of int8 or float8.
    """
    if vector.is_cuda:
        block = BLOCK_OF_8_BITS if matrix.itemsize == 1 else BLOCK
        return multiply_on_gpu(vector, [matrix], block, scale=scale, bias=bias, residual=residual)[0]
    if scale is None:
        result = F.linear(vector, matrix, bias)
    else:
        result = F.linear(vector.float(), matrix.float()) * scale[:, 0]
        result = (result if bias is None else result + bias).to(vector.dtype)
    return result if residual is None else residual + result


@matrix_vector.register_fake
def _(
    vector: torch.Tensor,
    matrix: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    return vector.new_empty((1, 1, matrix.shape[0]))


@torch.library.custom_op("text::matrix_vectors", mutates_args=())
def matrix_vectors(vector: torch.Tensor, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`matrix @ vector` for two or three matrices in one kernel. A small matrix alone does not keep a GPU busy.

    vector: [1, 1, columns], matrices: [rows, columns] each, contiguous, of the vector's type; results: [1, 1, rows].
    """
    if vector.is_cuda:
        return multiply_on_gpu(vector, matrices, BLOCK)
    return [F.linear(vector, matrix) for matrix in matrices]


@matrix_vectors.register_fake
def _(vector: torch.Tensor, matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [vector.new_empty((1, 1, matrix.shape[0])) for matrix in matrices]


@torch.library.custom_op("text::gated_matrix_vector", mutates_args=())
def gated_matrix_vector(vector: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate @ vector) * (up @ vector)`, summed in float32 and rounded after each operator.

    vector: [1, 1, columns], gate and up: [rows, columns], contiguous; result: [1, 1, rows].
    """
    if vector.is_cuda:
        return multiply_on_gpu(vector, [gate], GATED_BLOCK, up=up)[0]
    return F.silu(F.linear(vector, gate)) * F.linear(vector, up)


@gated_matrix_vector.register_fake
def _(vector: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return vector.new_empty((1, 1, gate.shape[0]))


def multiply_on_gpu(
    vector: torch.Tensor,
    matrices: Sequence[torch.Tensor],
    block: Block,
    *,
    up: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Launch the kernel of all operators above, for one to three matrices. Keyword arguments need a single matrix."""
    columns = matrices[0].shape[1]
    block_columns = min(block.most_columns, power_of_2(columns))
    block_rows = block.elements // block_columns
    results = [vector.new_empty((1, 1, len(matrix))) for matrix in matrices]
    missing = [None] * (MOST_MATRICES - len(matrices))
    matrix, second, third = *matrices, *missing
    result, second_result, third_result = *results, *missing
    rows, second_rows, third_rows = *map(len, matrices), *missing
    overlaps = can_overlap(vector.device)
    kernel("multiply")[(sum(-(-len(matrix) // block_rows) for matrix in matrices),)](
        vector=vector.contiguous(),
        matrix=matrix,
        second=second,
        third=third,
        result=result,
        second_result=second_result,
        third_result=third_result,
        rows=rows,
        second_rows=second_rows,
        third_rows=third_rows,
        up=up,
        scale=scale,
        bias=bias,
        residual=residual if residual is None else residual.contiguous(),
        COLUMNS=columns,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        OVERLAPS=overlaps,
        num_warps=_WARPS,
        **launch_options(overlaps),
    )
    return results
