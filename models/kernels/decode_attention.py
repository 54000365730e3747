"""A custom operator: attention of one token over the filled part of a static cache.

On a GPU, a Triton kernel splits the filled part among many programs and joins their results. One program for each head
would leave most of a GPU idle (flash decoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html). The kernel
reads the filled length on the device, so one recorded CUDA graph serves every length.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812, as everybody calls it

from models.kernels.launch import can_overlap, kernel, launch_options, power_of_2

# The keys of a head are split into this many parts.
_PARTS = 16
# The tokens that a program multiplies at once, and the blocks that it loads ahead. More do not fit into shared memory.
_BLOCK_TOKENS, _STAGES = 64, 3
_LARGE_SIZE, _LARGE_BLOCK_TOKENS, _LARGE_STAGES = 128, 32, 2
# The fewest rows that a tensor core multiplies.
_LEAST_ROWS = 16


@torch.library.custom_op("text::decode_attention", mutates_args=())
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of the token at `position` over the tokens up to and including itself.

    query: [1, heads, 1, size], key: [1, key-value heads, tokens, size], value: [1, key-value heads, tokens, value
    size], position: [1]; result: [1, heads, 1, value size]. `window` is the number of last tokens that count, or 0 for
    all. `softcap` bounds the scores; 0.0 does not.
    """
    if query.is_cuda:
        return _on_gpu(query, key, value, position, scale, window, softcap)
    end = int(position) + 1
    start = max(0, end - window) if window else 0
    key, value = key[:, :, start:end], value[:, :, start:end]
    if not softcap:
        return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=True)
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)  # [1, key-value heads, group, size]
    scores = torch.tanh(rows @ key.transpose(2, 3) * (scale / softcap)) * softcap
    return (scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value).flatten(1, 2).unsqueeze(2)


@decode_attention.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    heads, size = query.shape[1], query.shape[3]
    key_heads, value_size = key.shape[1], value.shape[3]
    query = query.contiguous()
    group = heads // key_heads
    is_large = max(size, value_size) > _LARGE_SIZE
    block, stages = (_LARGE_BLOCK_TOKENS, _LARGE_STAGES) if is_large else (_BLOCK_TOKENS, _STAGES)
    partial = torch.empty((heads, _PARTS, value_size), dtype=torch.float32, device=query.device)
    sums = torch.empty((2, heads, _PARTS), dtype=torch.float32, device=query.device)
    result = query.new_empty((1, heads, 1, value_size))
    overlaps = can_overlap(query.device)
    kernel("attend_part")[(key_heads, _PARTS)](
        query,
        key,
        value,
        position,
        partial,
        sums,
        scale,
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        heads,
        window,
        softcap,
        GROUP=group,
        ROWS=max(_LEAST_ROWS, power_of_2(group)),
        SIZE=size,
        PADDED_SIZE=max(16, power_of_2(size)),
        VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=max(16, power_of_2(value_size)),
        PARTS=_PARTS,
        BLOCK=block,
        OVERLAPS=overlaps,
        num_warps=4,
        num_stages=stages,
        **launch_options(overlaps),
    )
    _join_parts(partial, sums, result, overlaps)
    return result


def _join_parts(partial: torch.Tensor, sums: torch.Tensor, result: torch.Tensor, overlaps: bool) -> None:
    heads, _, value_size = partial.shape
    kernel("join_parts")[(heads,)](
        partial,
        sums,
        result,
        heads,
        VALUE_SIZE=value_size,
        PADDED_VALUE_SIZE=power_of_2(value_size),
        PARTS=_PARTS,
        OVERLAPS=overlaps,
        num_warps=4,
        **launch_options(overlaps),
    )
