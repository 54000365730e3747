"""A custom operator: the norm of one vector, between two products.

A GPU spends more time on launching and ending so small a kernel than on the norm. On GPUs that can, this kernel starts
before the previous product has ended, and lets the next product load its first weights early.
"""

from __future__ import annotations

import torch

from models.kernels.launch import can_overlap, kernel, launch_options, power_of_2

_WARPS = 8


def normalize(hidden_states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`hidden_states` divided by the root mean square of their last dimension, in float32, then rounded and multiplied
    by `weight`, as transformers' LlamaRMSNorm does.

    hidden_states and result: [..., size], weight: [size].
    """
    values = hidden_states.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * values.to(hidden_states.dtype)


@torch.library.custom_op("text::rms_norm", mutates_args=())
def rms_norm(vector: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`normalize` of one vector.

    vector: [1, 1, size], weight: [size], of the vector's type; result: [1, 1, size].
    """
    if vector.is_cuda:
        return _on_gpu(vector, weight, epsilon)
    return normalize(vector, weight, epsilon)


@rms_norm.register_fake
def _(vector: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.empty_like(vector, memory_format=torch.contiguous_format)


def _on_gpu(vector: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    size = vector.shape[-1]
    result = torch.empty_like(vector, memory_format=torch.contiguous_format)
    overlaps = can_overlap(vector.device)
    kernel("normalize")[(1,)](
        vector.contiguous(),
        weight.contiguous(),
        result,
        epsilon,
        SIZE=size,
        PADDED_SIZE=power_of_2(size),
        OVERLAPS=overlaps,
        num_warps=_WARPS,
        **launch_options(overlaps),
    )
    return result
