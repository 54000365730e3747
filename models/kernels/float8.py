"""Linear layers as products in float8, for many tokens. Each row of a weight and each token has a scale of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from models.kernels.operators import launch, power_of_2

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max
# So that rows of zeros have a scale.
_LEAST = 1e-12
# The first generation with products in float8 (Ada Lovelace).
_CAPABILITY = (8, 9)
# Inductor fuses the conversion of rows of up to so many columns with the kernel before it. Longer rows it would read
# twice, which is slower than a kernel of its own (H100, 2026-11).
_MOST_FUSED_COLUMNS = 4096
# Rows of more columns get twice the warps, so that a row fits into a program's registers.
_WARPS, _MOST_COLUMNS_OF_WARPS = 8, 8192


def check_float8(setting: str, remedy: str) -> None:
    """Check that the GPU, if there is one, multiplies in float8. The error says which `setting` needs it, and what to
    do.

    Raises:
        ValueError: it does not.
    """
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability()) < _CAPABILITY:
        gpu = f"{torch.cuda.get_device_name()} ({capability[0]}.{capability[1]})"
        needed = ".".join(map(str, _CAPABILITY))
        raise ValueError(f"{setting} needs a GPU of compute capability {needed}; this is {gpu}. {remedy}")


def scaled_linear(inputs: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer as a product in float8.

    inputs: [..., columns], weight: [features, columns], of float8, scale: [1, features], of float32, bias: [features],
    result: [..., features], of the inputs' type. On a GPU, inputs are bfloat16, and columns and features are multiples
    of 16.
    """
    rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()  # the product takes no transposed ones
    is_fused = torch.compiler.is_compiling() and rows.shape[1] <= _MOST_FUSED_COLUMNS
    values, scales = to_float8(rows) if is_fused else to_float8_at_once(rows)
    if rows.is_cuda:
        result = torch._scaled_mm(
            values, weight.t(), scale_a=scales, scale_b=scale, bias=bias, out_dtype=inputs.dtype, use_fast_accum=True
        )
    else:  # torch 2.11 has one scale for a whole matrix there
        result = (torch.mm(values.float(), weight.float().t()) * scales * scale).to(inputs.dtype)
        result = result if bias is None else result + bias
    return result.view(*inputs.shape[:-1], len(weight))


def to_float8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Values of float8 and scales of float32. Their product is about `rows`.

    rows and values: [rows, columns], scales: [rows, 1].
    """
    largest = rows.abs().amax(1, keepdim=True).float().clamp(min=_LEAST)
    return (rows.float() * (_LARGEST / largest)).to(_FLOAT8), largest * (1 / _LARGEST)


@torch.library.custom_op("image::to_float8", mutates_args=())
def to_float8_at_once(rows: Tensor) -> tuple[Tensor, Tensor]:
    """`to_float8` in one kernel, which reads each row once."""
    if not rows.is_cuda:
        return to_float8(rows)
    rows = rows.contiguous()
    values = torch.empty_like(rows, dtype=_FLOAT8)
    scales = torch.empty((len(rows), 1), dtype=torch.float32, device=rows.device)
    columns = rows.shape[1]
    launch(
        "to_float8",
        (len(rows),),
        _WARPS if columns <= _MOST_COLUMNS_OF_WARPS else 2 * _WARPS,
        rows=rows,
        values=values,
        scales=scales,
        COLUMNS=columns,
        PADDED_COLUMNS=power_of_2(columns),
        LARGEST=_LARGEST,
        LEAST=_LEAST,
    )
    return values, scales


@to_float8_at_once.register_fake
def _(rows: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(rows, dtype=_FLOAT8, memory_format=torch.contiguous_format)
    return values, rows.new_empty((len(rows), 1), dtype=torch.float32)
