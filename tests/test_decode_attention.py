"""Attention of one token over what is filled of a cache."""

from __future__ import annotations

import pytest
import torch

from models.kernels.operators import decode_attention

# heads, key-value heads, size, value size, tokens, position, window, softcap
CASES = [
    (8, 2, 64, 64, 512, 300, 0, 0.0),
    (4, 4, 32, 32, 64, 0, 0, 0.0),
    (32, 8, 128, 128, 1024, 1023, 0, 0.0),
    (4, 1, 24, 16, 300, 255, 40, 0.0),
    (8, 2, 64, 64, 512, 130, 0, 5.0),
    (8, 2, 64, 64, 2048, 1500, 1000, 3.0),
    (8, 4, 256, 256, 512, 400, 0, 0.0),
    (4, 1, 192, 128, 512, 400, 0, 0.0),
    (4, 1, 512, 512, 512, 400, 100, 0.0),
]


def inputs(case: tuple, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    """Of the operator; what is not filled yet is NaN, so that reading it shows."""
    heads, key_heads, size, value_size, tokens, position, window, softcap = case
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 1, size, generator=generator)
    key = torch.randn(1, key_heads, tokens, size, generator=generator)
    value = torch.randn(1, key_heads, tokens, value_size, generator=generator)
    key[:, :, position + 1 :] = value[:, :, position + 1 :] = float("nan")
    tensors = [tensor.to(device, dtype) for tensor in (query, key, value)]
    return (*tensors, torch.tensor([position], device=device), size**-0.5, window, softcap)


def by_definition(query, key, value, position, scale, window, softcap):
    end = int(position) + 1
    start = max(0, end - window) if window else 0
    group = query.shape[1] // key.shape[1]
    key = key[:, :, start:end].double().repeat_interleave(group, dim=1)
    value = value[:, :, start:end].double().repeat_interleave(group, dim=1)
    scores = query.double() @ key.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.softmax(dim=-1) @ value


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_it_gathers_what_the_definition_says_and_reads_nothing_that_is_not_filled(case, dtype, tolerance, device):
    given = inputs(case, device, dtype)
    torch.testing.assert_close(decode_attention(*given).double(), by_definition(*given), atol=tolerance, rtol=tolerance)


def test_torch_can_compile_it():
    torch.library.opcheck(decode_attention, inputs(CASES[0]), test_utils=("test_schema", "test_faketensor"))
