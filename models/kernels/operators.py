"""Custom operators for a single token: products of matrices with one vector, the norm, and attention.

A token reads every weight once and computes little with it, so memory bandwidth decides. On GPUs that can, the Triton
kernels load their first weights while their predecessor still runs (programmatic dependent launch, CUDA C++ Programming
Guide).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it
from torch import Tensor

# The part of a matrix that a program multiplies at once: its number of elements, and its most columns. The fastest of
# six on an H200 (2026-11): for numbers of 16 bits or more, for 8 bits, and for two matrices at once.
_BLOCK, _BLOCK_OF_8_BITS, _GATED_BLOCK = (4096, 2048), (2048, 1024), (4096, 1024)
_WARPS = 4
_NORM_WARPS = 8
# One kernel multiplies at most this many matrices by the same vector.
MOST_MATRICES = 3

# Attention splits the keys of a head into this many parts.
_PARTS = 16
# The tokens that a program multiplies at once, and the blocks that it loads ahead. More do not fit into shared memory.
_BLOCK_TOKENS, _STAGES = 64, 3
_LARGE_SIZE, _LARGE_BLOCK_TOKENS, _LARGE_STAGES = 128, 32, 2
# The fewest rows that a tensor core multiplies.
_LEAST_ROWS = 16

# Hopper is the first generation whose kernels can start before their predecessor has ended.
_OVERLAPPING_CAPABILITY = (9, 0)


@torch.library.custom_op("text::matrix_vector", mutates_args=())
def matrix_vector(
    vector: Tensor,
    matrix: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
) -> Tensor:
    """`matrix @ vector`, times `scale`, plus `bias`, summed in float32; then rounded to the vector's type, plus
    `residual`.

    vector: [1, 1, columns], matrix: [rows, columns], contiguous, scale: [rows, 1], bias: [rows], residual and result:
    [1, 1, rows], of the vector's type. With `scale`, the matrix may be of int8 or float8.
    """
    if vector.is_cuda:
        block = _BLOCK_OF_8_BITS if matrix.itemsize == 1 else _BLOCK
        return _multiply_on_gpu(vector, [matrix], block, scale=scale, bias=bias, residual=residual)[0]
    if scale is None:
        result = F.linear(vector, matrix, bias)
    else:
        result = F.linear(vector.float(), matrix.float()) * scale[:, 0]
        result = (result if bias is None else result + bias).to(vector.dtype)
    return result if residual is None else residual + result


@matrix_vector.register_fake
def _(vector: Tensor, matrix: Tensor, *others: Any) -> Tensor:
    return vector.new_empty((1, 1, matrix.shape[0]))


@torch.library.custom_op("text::matrix_vectors", mutates_args=())
def matrix_vectors(vector: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    """`matrix @ vector` for two or three matrices in one kernel. A small matrix alone does not keep a GPU busy.

    vector: [1, 1, columns], matrices: [rows, columns] each, contiguous, of the vector's type; results: [1, 1, rows].
    """
    if vector.is_cuda:
        return _multiply_on_gpu(vector, matrices, _BLOCK)
    return [F.linear(vector, matrix) for matrix in matrices]


@matrix_vectors.register_fake
def _(vector: Tensor, matrices: Sequence[Tensor]) -> list[Tensor]:
    return [vector.new_empty((1, 1, matrix.shape[0])) for matrix in matrices]


@torch.library.custom_op("text::gated_matrix_vector", mutates_args=())
def gated_matrix_vector(vector: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate @ vector) * (up @ vector)`, summed in float32 and rounded after each operator.

    vector: [1, 1, columns], gate and up: [rows, columns], contiguous; result: [1, 1, rows].
    """
    if vector.is_cuda:
        return _multiply_on_gpu(vector, [gate], _GATED_BLOCK, up=up)[0]
    return F.silu(F.linear(vector, gate)) * F.linear(vector, up)


@gated_matrix_vector.register_fake
def _(vector: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return vector.new_empty((1, 1, gate.shape[0]))


def _multiply_on_gpu(
    vector: Tensor,
    matrices: Sequence[Tensor],
    block: tuple[int, int],
    *,
    up: Tensor | None = None,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> list[Tensor]:
    """Launch the kernel of all operators above, for one to three matrices. Keyword arguments need a single matrix."""
    columns = matrices[0].shape[1]
    elements, most_columns = block
    block_columns = min(most_columns, power_of_2(columns))
    block_rows = elements // block_columns
    results = [vector.new_empty((1, 1, len(matrix))) for matrix in matrices]
    launch(
        "multiply",
        (sum(-(-len(matrix) // block_rows) for matrix in matrices),),
        _WARPS,
        vector=vector.contiguous(),
        matrices=tuple(matrices),
        results=tuple(results),
        rows=tuple(map(len, matrices)),
        up=up,
        scale=scale,
        bias=bias,
        residual=residual if residual is None else residual.contiguous(),
        COLUMNS=columns,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
    )
    return results


def normalize(hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`hidden_states` divided by the root mean square of their last dimension, in float32, then rounded and multiplied
    by `weight`, as transformers' LlamaRMSNorm does.

    hidden_states and result: [..., size], weight: [size].
    """
    values = hidden_states.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * values.to(hidden_states.dtype)


@torch.library.custom_op("text::rms_norm", mutates_args=())
def rms_norm(vector: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`normalize` of one vector.

    A GPU spends more time on launching and ending so small a kernel than on the norm. On GPUs that can, this kernel
    starts before the previous product has ended, and lets the next product load its first weights early.

    vector: [1, 1, size], weight: [size], of the vector's type; result: [1, 1, size].
    """
    if not vector.is_cuda:
        return normalize(vector, weight, epsilon)
    size = vector.shape[-1]
    result = torch.empty_like(vector, memory_format=torch.contiguous_format)
    launch(
        "normalize",
        (1,),
        _NORM_WARPS,
        vector=vector.contiguous(),
        weight=weight.contiguous(),
        result=result,
        epsilon=epsilon,
        SIZE=size,
        PADDED_SIZE=power_of_2(size),
    )
    return result


@rms_norm.register_fake
def _(vector: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return torch.empty_like(vector, memory_format=torch.contiguous_format)


@torch.library.custom_op("text::decode_attention", mutates_args=())
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of the token at `position` over the filled part of a static cache: the tokens up to and including
    itself.

    query: [1, heads, 1, size], key: [1, key-value heads, tokens, size], value: [1, key-value heads, tokens, value
    size], position: [1]; result: [1, heads, 1, value size]. `window` is the number of last tokens that count, or 0 for
    all. `softcap` bounds the scores; 0.0 does not.
    """
    if query.is_cuda:
        contiguous = (tensor.contiguous() for tensor in (query, key, value))
        return _attend_on_gpu(*contiguous, position, scale=scale, window=window, softcap=softcap)
    end = int(position) + 1
    start = max(0, end - window) if window else 0
    key, value = key[:, :, start:end], value[:, :, start:end]
    if not softcap:
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [1, key-value heads, group, size]
    scores = torch.tanh(rows @ key.transpose(2, 3) * (scale / softcap)) * softcap
    return (scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value).flatten(1, 2).unsqueeze(2)


@decode_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _attend_on_gpu(query: Tensor, key: Tensor, value: Tensor, position: Tensor, **options: float) -> Tensor:
    """Split the filled part among many programs and join their results.

    One program for each head would leave most of a GPU idle (flash decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The kernel reads the filled length on the device, so one
    recorded CUDA graph serves every length.
    """
    heads, size = query.shape[1], query.shape[3]
    key_heads, value_size = key.shape[1], value.shape[3]
    group = heads // key_heads
    is_large = max(size, value_size) > _LARGE_SIZE
    block, stages = (_LARGE_BLOCK_TOKENS, _LARGE_STAGES) if is_large else (_BLOCK_TOKENS, _STAGES)
    partial = torch.empty((heads, _PARTS, value_size), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, heads, _PARTS), dtype=torch.float32, device=query.device)
    result = query.new_empty((1, heads, 1, value_size))
    launch(
        "attend_part",
        (key_heads, _PARTS),
        _WARPS,
        query=query,
        key=key,
        value=value,
        position=position,
        partial=partial,
        sums=sums,
        tokens=key.shape[2],
        heads=heads,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, power_of_2(group)),
        SIZE=size,
        PADDED_SIZE=max(16, power_of_2(size)),
        VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=max(16, power_of_2(value_size)),
        PARTS=_PARTS,
        BLOCK=block,
        num_stages=stages,
        **options,
    )
    launch(
        "join_parts",
        (heads,),
        _WARPS,
        partial=partial,
        sums=sums,
        result=result,
        heads=heads,
        VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=power_of_2(value_size),
        PARTS=_PARTS,
    )
    return result


def launch(name: str, programs: tuple[int, ...], warps: int, **arguments: Any) -> None:
    """Launch a kernel of triton_kernels.py, which can start while its predecessor still runs where the GPU can.

    Some backends of Triton do not know `launch_pdl`, and a CPU has no Triton.
    """
    from models.kernels import triton_kernels

    overlaps = _can_overlap(torch.cuda.current_device())
    options = {"launch_pdl": True} if overlaps else {}
    kernel: Any = getattr(triton_kernels, name)
    kernel[programs](**arguments, OVERLAPS=overlaps, num_warps=warps, **options)


def power_of_2(number: int) -> int:
    """The least power of 2 that is not smaller than `number`."""
    return 1 << (number - 1).bit_length()


@cache
def _can_overlap(device: int) -> bool:
    """Whether a kernel can start while its predecessor still runs."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= _OVERLAPPING_CAPABILITY


def is_compiler_imported() -> bool:
    """Whether this process may compile graphs already."""
    return "torch._inductor.config" in sys.modules
