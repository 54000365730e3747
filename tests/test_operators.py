"""The operators for one token, as they are defined: products of matrices with one vector, the norm, attention."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models.kernels.operators import decode_attention, gated_matrix_vector, matrix_vector, matrix_vectors, rms_norm

# rows, columns, kind of the matrix, whether there is a bias
CASES = [
    (4096, 4096, "plain", False),
    (1024, 14336, "plain", True),
    (50, 96, "plain", True),
    (7, 3000, "plain", False),
    (300, 4096, "int8", False),
    (50, 96, "int8", True),
    (300, 4096, "fp8", False),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def inputs(case: tuple, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    """Of the operator."""
    rows, columns, kind, has_bias = case
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 1, columns, generator=generator)
    matrix = torch.randn(rows, columns, generator=generator)
    bias = torch.randn(rows, generator=generator).to(device, dtype) if has_bias else None
    if kind == "plain":
        return vector.to(device, dtype), matrix.to(device, dtype), None, bias
    scale = (torch.rand(rows, 1, generator=generator) + 0.5) / 32
    return vector.to(device, dtype), (matrix * 32).to(TYPES[kind]).to(device), scale.to(device), bias


def by_definition(vector, matrix, scale, bias):
    result = matrix.double() @ vector[0, 0].double()
    if scale is not None:
        result = result * scale[:, 0].double()
    return (result if bias is None else result + bias.double())[None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_it_multiplies_and_adds_a_residual_to_the_rounded_product(case, dtype, tolerance, device):
    given = inputs(case, device, dtype)
    product = matrix_vector(*given)
    torch.testing.assert_close(product.double(), by_definition(*given), atol=1e-3, rtol=tolerance)
    residual = torch.randn(product.shape, generator=torch.Generator().manual_seed(1)).to(product)
    # In float32 there is nothing to round between the two, and on a GPU they are one instruction.
    is_fused = device == "cuda" and dtype.itemsize == 4
    total = matrix_vector(*given, residual)
    torch.testing.assert_close(total, product + residual, atol=1e-4 if is_fused else 0, rtol=0)


# rows of each matrix, columns
TOGETHER = [((4096, 1024, 1024), 4096), ((70, 33), 500), ((5, 1, 300), 96)]


def vectors_inputs(rows: tuple, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 1, columns, generator=generator).to(device, dtype)
    return vector, [torch.randn(number, columns, generator=generator).to(device, dtype) for number in rows]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns"), TOGETHER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_matrices_give_what_each_gives(rows, columns, dtype, device):
    vector, matrices = vectors_inputs(rows, columns, device, dtype)
    for found, matrix in zip(matrix_vectors(vector, matrices), matrices, strict=True):
        assert torch.equal(found, matrix_vector(vector, matrix, None, None))


def gated_inputs(rows: int, columns: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 1, columns, generator=generator)
    matrices = [torch.randn(rows, columns, generator=generator) / columns**0.5 for _ in range(2)]
    return tuple(tensor.to(device, dtype) for tensor in (vector, *matrices))


def gated_by_definition(vector, gate, up):
    vector = vector[0, 0].double()
    return (nn.functional.silu(gate.double() @ vector) * (up.double() @ vector))[None, None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "columns"), [(14336, 4096), (300, 700), (5, 96)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_it_multiplies_what_is_gated(rows, columns, dtype, tolerance, device):
    given = gated_inputs(rows if device == "cuda" else min(rows, 512), columns, device, dtype)
    found = gated_matrix_vector(*given).double()
    torch.testing.assert_close(found, gated_by_definition(*given), atol=tolerance / 10, rtol=tolerance)


@pytest.mark.gpu
def test_kernels_that_overlap_read_what_those_before_them_have_written():
    """A chain of norms and products, recorded: each reads what those before wrote a moment ago."""
    generator = torch.Generator("cuda").manual_seed(0)
    matrices = [torch.randn(2048, 2048, device="cuda", generator=generator) / 45 for _ in range(8)]
    factors = torch.rand(2048, device="cuda", generator=generator) + 0.5
    vector = torch.zeros(1, 1, 2048, device="cuda")

    def chain() -> torch.Tensor:
        result = vector + 0
        for matrix in matrices:
            result = matrix_vector(rms_norm(result, factors, 1e-6), matrix, None, None, result)
        return result

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain()
    for _ in range(50):
        vector.normal_(generator=generator)
        graph.replay()
        expected = vector[0, 0].double()
        for matrix in matrices:
            normed = expected * (expected.pow(2).mean() + 1e-6).rsqrt() * factors.double()
            expected = expected + matrix.double() @ normed
        assert ((result[0, 0] - expected).norm() / expected.norm()).item() < 1e-5


SIZES = [4096, 5120, 96, 1]


def norm_inputs(size: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    vector = 3 * torch.randn(1, 1, size, generator=generator)
    return vector.to(device, dtype), (torch.rand(size, generator=generator) + 0.5).to(device, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_the_norm_is_that_of_transformers(size, dtype, tolerance, device):
    """On a CPU, to the bit."""
    given = norm_inputs(size, device, dtype)
    norm = LlamaRMSNorm(size, eps=1e-5)
    norm.weight = nn.Parameter(given[1], requires_grad=False)
    atol, rtol = (1e-5, tolerance) if device == "cuda" else (0, 0)
    torch.testing.assert_close(rms_norm(*given, 1e-5), norm(given[0]), atol=atol, rtol=rtol)


# heads, key-value heads, size, value size, tokens, position, window, softcap
ATTENTION_CASES = [
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


def attention_inputs(case: tuple, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple:
    """Of the operator; what is not filled yet is NaN, so that reading it shows."""
    heads, key_heads, size, value_size, tokens, position, window, softcap = case
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, heads, 1, size, generator=generator)
    key = torch.randn(1, key_heads, tokens, size, generator=generator)
    value = torch.randn(1, key_heads, tokens, value_size, generator=generator)
    key[:, :, position + 1 :] = value[:, :, position + 1 :] = float("nan")
    tensors = [tensor.to(device, dtype) for tensor in (query, key, value)]
    return (*tensors, torch.tensor([position], device=device), size**-0.5, window, softcap)


def attention_by_definition(query, key, value, position, scale, window, softcap):
    end = int(position) + 1
    start = max(0, end - window) if window else 0
    group = query.shape[1] // key.shape[1]
    key = key[:, :, start:end].double().repeat_interleave(group, dim=1)
    value = value[:, :, start:end].double().repeat_interleave(group, dim=1)
    scores = query.double() @ key.transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    return scores.softmax(dim=-1) @ value


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_attention_gathers_what_the_definition_says_and_nothing_that_is_not_filled(case, dtype, tolerance, device):
    given = attention_inputs(case, device, dtype)
    found = decode_attention(*given).double()
    torch.testing.assert_close(found, attention_by_definition(*given), atol=tolerance, rtol=tolerance)


OPERATORS = {
    "product": (matrix_vector, inputs(CASES[2])),
    "product of 8 bits": (matrix_vector, inputs(CASES[5])),
    "gated": (gated_matrix_vector, gated_inputs(30, 70)),
    "several": (matrix_vectors, vectors_inputs((3, 5), 7)),
    "norm": (rms_norm, (*norm_inputs(96, "cpu", torch.float32), 1e-5)),
    "attention": (decode_attention, attention_inputs(ATTENTION_CASES[0])),
}


@pytest.mark.parametrize(("operator", "given"), OPERATORS.values(), ids=OPERATORS)
def test_torch_can_compile_an_operator(operator, given):
    torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))
