"""The norm of one vector."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models.kernels.operators import rms_norm

SIZES = [4096, 5120, 96, 1]


def inputs(size: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vector = 3 * torch.randn(1, 1, size, generator=generator)
    return vector.to(device, dtype), (torch.rand(size, generator=generator) + 0.5).to(device, dtype)


def by_transformers(vector: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = LlamaRMSNorm(len(weight), eps=1e-5)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(vector)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_is_that_of_transformers(size, dtype, tolerance, device):
    """On a CPU, to the bit."""
    given = inputs(size, device, dtype)
    atol, rtol = (1e-5, tolerance) if device == "cuda" else (0, 0)
    torch.testing.assert_close(rms_norm(*given, 1e-5), by_transformers(*given), atol=atol, rtol=rtol)


def test_torch_can_compile_it():
    given = (*inputs(96, "cpu", torch.float32), 1e-5)
    torch.library.opcheck(rms_norm, given, test_utils=("test_schema", "test_faketensor"))
